"""Adds to streamed answers the report of where the KV of the prompt was found.

vLLM adds the report that the connector returns for a finished request only to answers that are not
streamed. For streamed answers, the API server receives the report too, with the last tokens of the
request. ``listen`` reads the report from these tokens' output, and ``ReportMiddleware`` adds it to
the event that ends the answer, as a top-level field like in complete answers. Events are passed on
immediately, and no event is added. Anything unexpected is left unchanged.

``/v1/responses`` needs none of this, because vLLM's last event contains the complete answer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tiered_kv.connectors.vllm.middleware import MESSAGES

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FIELD, OURS = "kv_transfer_params", "tiered_kv"
"""Field of an answer, and the name of the connector's report in it."""


@dataclass(frozen=True, slots=True)
class LastEvent:
    """Format of the event that ends an answer, as vLLM writes it.

    Attributes:
        begins: start of the event, up to its JSON object.
        mark: text that only this event contains, outside of the answer's text.
    """

    begins: bytes
    mark: bytes

    def with_field(self, event: bytes, value: bytes) -> bytes:
        """Add the field to an event of this format. Returns any other event unchanged.

        Args:
            value: the field's value, as JSON.
        """
        name = f'"{FIELD}":'.encode()
        alone = event.startswith(self.begins) and event.endswith(b"}\n\n")
        if not alone or self.mark not in event or name in event:
            return event
        if event.find(b"\n", len(self.begins)) != len(event) - 2:  # several events together
            return event
        return event[:-3] + b"," + name + value + b"}\n\n"


_OPENAI = LastEvent(b"data: {", b'"finish_reason":"')
_EVENTS = {
    "/v1/chat/completions": _OPENAI,
    "/v1/completions": _OPENAI,
    MESSAGES: LastEvent(b"event: message_delta\ndata: {", b'"stop_reason":"'),
}


class _Report:
    """The report of an HTTP request in progress.

    Attributes:
        said: the report as JSON; None until the engine has sent it.
    """

    __slots__ = ("_prompts", "said")

    def __init__(self) -> None:
        self.said: bytes | None = None
        self._prompts = 0

    def listen(self, outputs: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        """Pass outputs on, and read the report from them. Nothing is reported for a request with
        several prompts, because their outputs may arrive in any order."""
        self._prompts += 1
        return self._listen(outputs)

    async def _listen(self, outputs: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        async with aclosing(outputs):
            async for output in outputs:
                params = output.kv_transfer_params
                if params is not None and self._prompts == 1 and OURS in params:
                    self.said = json.dumps({OURS: params[OURS]}).encode()
                yield output


_current: ContextVar[_Report | None] = ContextVar("tiered_kv_report", default=None)


class _Listening:
    """An engine client's ``generate`` with its outputs observed."""

    def __init__(self, generate: Callable[..., AsyncGenerator[Any]]) -> None:
        self._generate = generate

    def __call__(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        outputs = self._generate(*args, **kwargs)
        report = _current.get()
        return outputs if report is None else report.listen(outputs)


def listen(client: Any) -> None:
    """Start observing what an engine client generates. Idempotent.

    Args:
        client: vLLM's engine client; None for a server without an engine.
    """
    generate = getattr(client, "generate", None)
    if generate is not None and not isinstance(generate, _Listening):
        client.generate = _Listening(generate)


class ReportMiddleware:
    """ASGI middleware that adds the connector's report to the last event of a streamed answer.

    Args:
        app: next application.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        form = _form(scope)
        if form is None:
            await self._app(scope, receive, send)
            return
        report = _Report()

        async def send_reported(message: Message) -> None:
            if report.said is not None and (event := message.get("body")):
                message["body"] = form.with_field(event, report.said)
            await send(message)

        before = _current.set(report)
        try:
            await self._app(scope, receive, send_reported)
        finally:
            _current.reset(before)


def _form(scope: Scope) -> LastEvent | None:
    """Return the format of the last event of a streamed answer to a request; None for requests on
    other paths."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return _EVENTS.get(path)
