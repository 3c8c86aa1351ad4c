"""Reports in streamed answers: where their prompt came from.

vLLM puts what the connector returns for a finished request into whole answers alone. The API server
has it for streams too, with the last tokens of the request. ``listen`` takes it there, as the
tokens pass, and ``ReportMiddleware`` adds it to the event that ends the answer, as a field at its
top level, as in whole answers. Every event goes on at once, and none is added. What does not look
as expected is left as it is.

``/v1/responses`` needs none of this: vLLM's last event holds the whole answer.
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
"""Field of an answer, and in it the name of the connector's report."""


@dataclass(frozen=True, slots=True)
class LastEvent:
    """Form of the event that ends an answer, as vLLM writes it.

    Attributes:
        begins: what it begins with, up to its JSON object.
        mark: what only such an event has, outside of the answer's text.
    """

    begins: bytes
    mark: bytes

    def with_field(self, event: bytes, value: bytes) -> bytes:
        """Add the field to an event of this form; return any other as it is.

        Args:
            value: JSON.
        """
        name = f'"{FIELD}":'.encode()
        alone = event.startswith(self.begins) and event.endswith(b"}\n\n")
        if not alone or self.mark not in event or name in event:
            return event
        if event.find(b"\n", len(self.begins)) != len(event) - 2:  # several events at once
            return event
        return event[:-3] + b"," + name + value + b"}\n\n"


_OPENAI = LastEvent(b"data: {", b'"finish_reason":"')
_EVENTS = {
    "/v1/chat/completions": _OPENAI,
    "/v1/completions": _OPENAI,
    MESSAGES: LastEvent(b"event: message_delta\ndata: {", b'"stop_reason":"'),
}


class _Report:
    """The report of an HTTP request that is under way.

    Attributes:
        said: it, as JSON, once the engine has told it.
    """

    __slots__ = ("_prompts", "said")

    def __init__(self) -> None:
        self.said: bytes | None = None
        self._prompts = 0

    def listen(self, outputs: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        """Pass outputs on. Of several prompts in one request none is reported: their outputs may
        come in any order."""
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
    """An engine client's ``generate`` whose outputs are listened to."""

    def __init__(self, generate: Callable[..., AsyncGenerator[Any]]) -> None:
        self._generate = generate

    def __call__(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        outputs = self._generate(*args, **kwargs)
        report = _current.get()
        return outputs if report is None else report.listen(outputs)


def listen(client: Any) -> None:
    """Listen to what an engine client generates, from now on. Idempotent.

    Args:
        client: vLLM's engine client; None for a server without an engine.
    """
    generate = getattr(client, "generate", None)
    if generate is not None and not isinstance(generate, _Listening):
        client.generate = _Listening(generate)


class ReportMiddleware:
    """ASGI application around another.

    Args:
        app: application that receives the requests next.
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
    """Form of the last event of a request's answer, if it is streamed; None for other requests."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return _EVENTS.get(path)
