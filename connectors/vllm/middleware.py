"""Middleware that moves job hints from a request's body to where the connector reads them.

    --middleware tiered_kv.connectors.vllm.middleware.JobMiddleware

Continuum's clients name jobs at the top level of the body. Claude Code and Codex name their session
in other fields. vLLM drops all of these silently. This middleware moves them into
``kv_transfer_params`` before vLLM reads the body, without validating them. Everything else passes
through unchanged, so streamed answers stay streams.

Without it, vLLM 0.30 to 0.33 keeps ``kv_transfer_params`` and ``vllm_xargs`` on all four paths, the
header ``X-Session-ID`` too, and a top-level ``session_id`` on all paths except ``/v1/messages``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
PATHS = frozenset({"/v1/chat/completions", "/v1/completions", RESPONSES, MESSAGES})
"""Paths on which vLLM accepts ``kv_transfer_params``."""
NAMES = ("job_id", "is_last_step", "tool_name", "tool_command", "expected_tool_s")
"""Names of moved hints, which ``tiered_kv.policies.jobs.hints`` reads."""
MAX_BODY_BYTES = 16 << 20
"""Maximum size of a body that is changed: a few million tokens, or many images."""
MAX_USER_ID_CHARS = 4096
"""Maximum length of a user id that is parsed. Claude Code's has about 250 characters."""

_SESSION_FIELDS = {MESSAGES: ("session_id", "metadata"), RESPONSES: ("prompt_cache_key",)}
"""Session fields that vLLM does not know, by path."""
_MARKS = {
    path: tuple(f'"{name}"'.encode() for name in (*NAMES, *_SESSION_FIELDS.get(path, ())))
    for path in PATHS
}
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_OLDER_USER_ID = re.compile(rf"user_\w*_session_({_UUID.pattern})", re.IGNORECASE)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class JobMiddleware:
    """ASGI middleware.

    Args:
        app: next application.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (path := _asked(scope)) is not None:
            scope, receive = await _with_hints_moved(scope, receive, path)
        await self._app(scope, receive, send)


def move_hints(body: bytes, path: str) -> bytes:
    """Move the hints at the top level of a JSON object into ``kv_transfer_params``, together with
    the client's session name as ``session_id``.

    Hints that are already there take precedence. A body without hints, or one that vLLM would
    reject, is returned unchanged. Never raises.

    Args:
        path: the request's path, one of ``PATHS``.
    """
    if not any(mark in body for mark in _MARKS[path]):
        return body
    try:
        request = json.loads(body)
        if not isinstance(request, dict):
            return body
        hints = {name: request.pop(name) for name in NAMES if name in request}
        if (session := _session(request, path)) is not None:
            hints["session_id"] = session
        params = request.get("kv_transfer_params")
        if params is None:
            params = {}
        if not hints or not isinstance(params, dict):
            return body
        new = {name: value for name, value in hints.items() if params.get(name) is None}
        return json.dumps({**request, "kv_transfer_params": {**params, **new}}).encode()
    except (ValueError, RecursionError):
        return body


def _session(request: Mapping[str, Any], path: str) -> Any:
    """Session that a body names; None if it names none, or if vLLM itself reads it."""
    if path == MESSAGES:
        session = request.get("session_id")
        return session if session is not None else _of_claude_code(request.get("metadata"))
    if path == RESPONSES:
        key = request.get("prompt_cache_key")
        # Codex sends its session. Other clients name something that many conversations share.
        return key if isinstance(key, str) and _UUID.fullmatch(key) else None
    return None


def _of_claude_code(metadata: Any) -> Any:
    """Session in ``metadata.user_id``: a JSON object with ``session_id``, or (before 2.1.78) a name
    that ends in it. None for other clients, which name a user there."""
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(user_id, str) or len(user_id) > MAX_USER_ID_CHARS:
        return None
    if older := _OLDER_USER_ID.fullmatch(user_id):
        return older[1]
    try:
        found = json.loads(user_id)
    except (ValueError, RecursionError):
        return None
    return found.get("session_id") if isinstance(found, dict) else None


def _asked(scope: Scope) -> str | None:
    """Path of a request if it is one of ``PATHS``; None for all other requests."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path if path in PATHS else None


async def _with_hints_moved(scope: Scope, receive: Receive, path: str) -> tuple[Scope, Receive]:
    """Read the body, and change it if needed. Returns what the application receives."""
    messages = [await receive()]
    size = len(messages[0].get("body", b""))
    while messages[-1].get("more_body", False) and size <= MAX_BODY_BYTES:
        messages.append(await receive())
        size += len(messages[-1].get("body", b""))
    whole = messages[-1]["type"] == "http.request" and not messages[-1].get("more_body", False)
    if whole and size <= MAX_BODY_BYTES:
        body = b"".join(message.get("body", b"") for message in messages)
        moved = move_hints(body, path)
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
