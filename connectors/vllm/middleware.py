"""Jobs named at the top level of a request's body, where Continuum's clients name them.

    --middleware tiered_kv.connectors.vllm.middleware.JobMiddleware

vLLM drops unknown fields there without a word, and no connector sees them. This moves them into
``kv_transfer_params`` before vLLM reads the body. Everything else passes through as it came, so
streamed answers stay streams.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
"""Where vLLM takes ``kv_transfer_params``."""
NAMES = ("job_id", "is_last_step", "tool_name", "tool_command", "expected_tool_s")
"""What is moved: the names that ``tiered_kv.policies.turns`` reads."""
MAX_BODY_BYTES = 16 << 20
"""A longer body is passed on as it is: a few million tokens, or many images."""

_MARKS = tuple(f'"{name}"'.encode() for name in NAMES)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class JobMiddleware:
    """An ASGI application around another.

    Args:
        app: what gets the requests then.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _is_asked(scope):
            scope, receive = await _with_hints_moved(scope, receive)
        await self._app(scope, receive, send)


def move_hints(body: bytes) -> bytes:
    """The same JSON object with the hints at its top level moved into ``kv_transfer_params``.

    What is said there already wins. A body without such hints, or that is not what vLLM expects,
    comes back as it is; never raises.
    """
    if not any(mark in body for mark in _MARKS):
        return body
    try:
        request = json.loads(body)
        if not isinstance(request, dict):
            return body
        said = {name: request.pop(name) for name in NAMES if name in request}
        params = request.get("kv_transfer_params")
        if params is None:
            params = {}
        if not said or not isinstance(params, dict):
            return body
        new = {name: value for name, value in said.items() if params.get(name) is None}
        return json.dumps({**request, "kv_transfer_params": {**params, **new}}).encode()
    except (ValueError, RecursionError):
        return body


def _is_asked(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) in PATHS


async def _with_hints_moved(scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
    """Read the body and change it if need be; the application receives what came of it."""
    messages = [await receive()]
    size = len(messages[0].get("body", b""))
    while messages[-1].get("more_body", False) and size <= MAX_BODY_BYTES:
        messages.append(await receive())
        size += len(messages[-1].get("body", b""))
    whole = messages[-1]["type"] == "http.request" and not messages[-1].get("more_body", False)
    if whole and size <= MAX_BODY_BYTES:
        body = b"".join(message.get("body", b"") for message in messages)
        moved = move_hints(body)
        if moved is not body:
            messages = [{"type": "http.request", "body": moved, "more_body": False}]
            scope = {**scope, "headers": _resized(scope["headers"], len(moved))}
    left = iter(messages)

    async def receive_again() -> Message:
        return next(left, None) or await receive()

    return scope, receive_again


def _resized(headers: Any, size: int) -> list[tuple[bytes, bytes]]:
    length = str(size).encode()
    return [
        (name, length if name.lower() == b"content-length" else value) for name, value in headers
    ]
