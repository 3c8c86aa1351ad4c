"""Middleware that copies clients' ids and hints to the request field that the connector reads.

    --middleware tiered_kv.connectors.vllm.middleware.JobMiddleware

Claude Code, Codex, OpenCode and others name their session, their agent and its parent in headers
and body fields (``tiered_kv.policies.jobs.identity`` has the table). Continuum's clients put hints
at the top level of the body, and clients of Anthropic's, OpenAI's and Dynamo's APIs use body fields
to state how long their KV is to be kept. vLLM drops all of these silently. This middleware adds
them to ``kv_transfer_params`` before vLLM reads the body. It changes nothing else, so streamed
answers stay streams, and it never sets a cache salt.

Without the middleware, vLLM 0.30 to 0.33 keeps ``kv_transfer_params``, ``vllm_xargs`` and the
header ``X-Session-ID`` on all four ``PATHS``, and a top-level ``session_id`` on all of them except
``/v1/messages``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

import msgspec

from tiered_kv.policies.jobs.identity import (
    BODY_FIELDS,
    CLIENT,
    HEADERS,
    SYSTEMS,
    USER_AGENT,
    claim,
)
from tiered_kv.policies.jobs.kv_hints import (
    CACHE_CONTROL,
    CARRIED,
    DEFAULT_TTL,
    RETENTION,
    seconds,
    stated,
)

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
PATHS = frozenset({"/v1/chat/completions", "/v1/completions", RESPONSES, MESSAGES})
"""Paths on which vLLM accepts ``kv_transfer_params``."""
NAMES = ("job_id", "is_last_step", "tool_name", "tool_command", "expected_tool_s")
"""Names of the top-level hints that ``tiered_kv.policies.jobs.hints`` reads."""
PARAMS, SESSION = "kv_transfer_params", "session_id"
MAX_BODY_BYTES = 16 << 20
"""Maximum size of a body that is changed, bytes: a few million tokens, or many images."""

_START_BYTES = 512
"""Number of bytes read from the start of a system prompt."""
_HEADERS = {name.encode(): name for name in HEADERS}
_RAW = (*SYSTEMS, PARAMS)
_PLAIN = (*NAMES, SESSION, RETENTION, *sorted(BODY_FIELDS - {*SYSTEMS}))

_CONTROL_NAME = f'"{CACHE_CONTROL}"'.encode()
_CONTROL = re.compile(rb"\s*:\s*(\{[^{}]{0,256}\})")
_MOST_CONTROLS = 64
"""Maximum number of ``cache_control`` fields that are read. Anthropic allows four of them."""

# Skips all other fields, and so reads a body several times faster than ``json``.
_Body = msgspec.defstruct(
    "_Body",
    [
        *((name, Any, None) for name in _PLAIN),
        *((name, msgspec.Raw, msgspec.Raw()) for name in _RAW),
    ],
)
_decode = msgspec.json.Decoder(_Body).decode

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class JobMiddleware:
    """ASGI middleware that adds ids and hints to request bodies; see the module docstring.

    Args:
        app: next application.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (path := _asked(scope)) is not None:
            scope, receive = await _with_ids(scope, receive, path)
        await self._app(scope, receive, send)


def carry(body: bytes, path: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """Add the ids of a request and the hints at the top level of its body to
    ``kv_transfer_params``.

    Existing fields of ``kv_transfer_params`` take precedence. A body without ids and hints, or a
    body that vLLM would reject, is returned unchanged. Never raises.

    Args:
        path: the request's path, one of ``PATHS``.
        headers: names of the headers in lower case, and their values.
    """
    told = {_HEADERS[name]: value.decode("latin-1") for name, value in headers if name in _HEADERS}
    request = _read(body)
    if request is None:
        return body
    new = {name: request[name] for name in NAMES if name in request}
    if path == MESSAGES and SESSION in request:  # vLLM reads it on the other paths
        new[SESSION] = request[SESSION]
    if told.keys() - {USER_AGENT} or not BODY_FIELDS.isdisjoint(request):
        claimed = claim(told, request)
        if claimed.ids:
            new[CLIENT] = claimed.ids
        if claimed.last:
            new.setdefault("is_last_step", True)
    ttl = _cache_control(body) if path == MESSAGES else None
    if (ttl is not None or "nvext" in request or RETENTION in request) and (
        kept := stated(request, ttl)
    ):
        new[CARRIED] = kept
    if not new:
        return body
    return _merged(body, new) if PARAMS in request else _spliced(body, new)


def _cache_control(body: bytes) -> object:
    """Return the longest time in the ``cache_control`` fields of Anthropic's API, in any block of a
    body; None if there is no such field.

    The fields are found by their name in the bytes, so that no message is parsed. The name cannot
    occur in a text, because JSON escapes the quotes in a text.
    """
    longest, longest_s = None, -1.0
    at = body.find(_CONTROL_NAME)
    for _ in range(_MOST_CONTROLS):
        if at < 0:
            break
        found = _CONTROL.match(body, at + len(_CONTROL_NAME))
        try:
            control = msgspec.json.decode(found[1]) if found is not None else {}
        except (msgspec.DecodeError, UnicodeDecodeError):
            control = {}
        if control.get("type") == "ephemeral":
            ttl = control.get("ttl", DEFAULT_TTL)
            if (ttl_s := _seconds(ttl)) > longest_s:
                longest, longest_s = ttl, ttl_s
        at = body.find(_CONTROL_NAME, at + len(_CONTROL_NAME))
    return longest


def _seconds(ttl: object) -> float:
    """Return a time in seconds; 0 if the value is not a time."""
    try:
        return seconds(ttl)
    except ValueError:
        return 0.0


def _read(body: bytes) -> dict[str, Any] | None:
    """Return the fields of a body that this middleware reads and that are not null; None if the
    body is not a JSON object."""
    try:
        found = _decode(body)
    except msgspec.DecodeError:
        return _read_slowly(body)
    except (UnicodeDecodeError, RecursionError):
        return None
    request = {name: value for name in _PLAIN if (value := getattr(found, name)) is not None}
    for name in _RAW:
        if start := bytes(memoryview(getattr(found, name))[:_START_BYTES]):
            request[name] = start.decode("latin-1")
    return request


def _read_slowly(body: bytes) -> dict[str, Any] | None:
    """Read a body as ``_read`` does, but with ``json``. vLLM accepts some bodies that ``msgspec``
    rejects: bodies with NaN, or with half of an emoji from a client that truncates texts."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    request = {name: found[name] for name in _PLAIN if found.get(name) is not None}
    raw = {name: json.dumps(found[name])[:_START_BYTES] for name in _RAW if name in found}
    return request | raw


def _spliced(body: bytes, new: Mapping[str, Any]) -> bytes:
    """Return a body that had no ``kv_transfer_params``, with the parameters ``new`` added. The body
    is not parsed again."""
    rest = body[body.index(b"{") + 1 :]
    if rest.lstrip().startswith(b"}"):  # vLLM accepts no empty object
        return body
    return json.dumps({PARAMS: new})[:-1].encode() + b"," + rest


def _merged(body: bytes, new: Mapping[str, Any]) -> bytes:
    """Return a body that has ``kv_transfer_params``, with the parameters ``new`` added to them."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return body
    params = request[PARAMS] if request[PARAMS] is not None else {}
    if not isinstance(params, dict):
        return body
    added = {name: value for name, value in new.items() if params.get(name) is None}
    return json.dumps({**request, PARAMS: {**params, **added}}).encode()


def _asked(scope: Scope) -> str | None:
    """Return the path of a request if it is one of ``PATHS``; None for all other requests."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path if path in PATHS else None


async def _with_ids(scope: Scope, receive: Receive, path: str) -> tuple[Scope, Receive]:
    """Read the body, and change it if necessary. Returns the scope and the receive function for the
    application."""
    messages = [await receive()]
    size = len(messages[0].get("body", b""))
    while messages[-1].get("more_body", False) and size <= MAX_BODY_BYTES:
        messages.append(await receive())
        size += len(messages[-1].get("body", b""))
    whole = messages[-1]["type"] == "http.request" and not messages[-1].get("more_body", False)
    if whole and size <= MAX_BODY_BYTES:
        body = b"".join(message.get("body", b"") for message in messages)
        changed = carry(body, path, scope["headers"])
        if changed is not body:
            messages = [{"type": "http.request", "body": changed, "more_body": False}]
            scope = {**scope, "headers": _resized(scope["headers"], len(changed))}
    left = iter(messages)

    async def receive_again() -> Message:
        return next(left, None) or await receive()

    return scope, receive_again


def _resized(headers: Any, size: int) -> list[tuple[bytes, bytes]]:
    length = str(size).encode()
    return [
        (name, length if name.lower() == b"content-length" else value) for name, value in headers
    ]
