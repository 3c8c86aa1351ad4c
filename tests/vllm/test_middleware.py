"""Top-level hints are moved to ``kv_transfer_params``. Everything else passes unchanged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.connectors.vllm import middleware as module
from tiered_kv.connectors.vllm.middleware import (
    MESSAGES,
    NAMES,
    PATHS,
    RESPONSES,
    JobMiddleware,
    Message,
    Receive,
    Scope,
    Send,
    carry,
)
from tiered_kv.policies.jobs.hints import read_hints
from tiered_kv.policies.jobs.identity import HEADERS

CHAT = "/v1/chat/completions"
Headers = Sequence[tuple[bytes, bytes]]
DISCONNECT: Message = {"type": "http.disconnect"}


class Toy:
    """An application that accepts any input and streams an answer in two parts."""

    def __init__(self) -> None:
        self.scope: Scope = {}
        self.received: list[Message] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        while True:
            message = await receive()
            self.received.append(message)
            if not message.get("more_body", False):
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        self.received.append(await receive())
        await send({"type": "http.response.body", "body": b"two"})

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.received if m["type"] == "http.request")

    @property
    def content_length(self) -> int:
        return int(dict(self.scope["headers"])[b"content-length"])


def chunked(body: bytes, cuts: Sequence[int] = ()) -> list[Message]:
    """Return the messages of a body that a client sends in pieces, which end at ``cuts``."""
    ends = [*sorted(min(cut, len(body)) for cut in cuts), len(body)]
    pieces = [body[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    last = len(pieces) - 1
    return [
        {"type": "http.request", "body": piece, "more_body": n < last}
        for n, piece in enumerate(pieces)
    ]


def serve(messages: Sequence[Message], **scope: Any) -> tuple[Toy, list[Message]]:
    """Send one request through the middleware. Returns the application, which records its input,
    and the messages sent to the client."""
    toy, sent = Toy(), []
    left = iter(messages)
    whole = b"".join(message.get("body", b"") for message in messages)
    asked = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "root_path": "",
        "headers": [(b"host", b"h"), (b"content-length", str(len(whole)).encode())],
        **scope,
    }

    async def receive() -> Message:
        return next(left, DISCONNECT)

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(JobMiddleware(toy)(asked, receive, send))
    return toy, sent


# -- clients of Continuum ------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", RESPONSES, MESSAGES])
def test_a_top_level_job_id_reaches_the_connector(path: str) -> None:
    said = {"model": "m", "job_id": "swe-1", "is_last_step": False}
    toy, _ = serve(chunked(json.dumps(said).encode()), path=path)
    assert json.loads(toy.body) == {
        **said,
        "kv_transfer_params": {"job_id": "swe-1", "is_last_step": False},
    }
    assert toy.content_length == len(toy.body)


def test_every_known_hint_is_moved() -> None:
    values = ["j", True, "bash", "make", 3.5]
    body = json.dumps(dict(zip(NAMES, values, strict=True))).encode()
    moved = json.loads(carry(body, CHAT))
    hints = read_hints(moved["kv_transfer_params"])
    assert hints[:6] == ("j", True, "bash", "make", 3.5, 0)


def test_existing_parameters_take_precedence() -> None:
    request = {
        "job_id": "top",
        "is_last_step": True,
        "tool_name": "bash",
        "kv_transfer_params": {"job_id": "inner", "tool_name": None, "other": [1]},
    }
    assert json.loads(carry(json.dumps(request).encode(), CHAT))["kv_transfer_params"] == {
        "job_id": "inner",
        "tool_name": "bash",
        "other": [1],
        "is_last_step": True,
    }


def test_answers_are_streamed_and_the_client_can_still_disconnect() -> None:
    toy, sent = serve(chunked(b'{"job_id": 1}', [4, 8]))
    assert [message.get("body") for message in sent] == [None, b"one", b"two"]
    assert toy.received[-1] is DISCONNECT


def test_a_root_path_does_not_matter() -> None:
    body = b'{"job_id": "j"}'
    for scope in ({"path": f"/llm{CHAT}"}, {"path": CHAT}):
        toy, _ = serve(chunked(body), root_path="/llm", **scope)
        assert toy.body != body


# -- IDs that vLLM drops -------------------------------------------------------------

SESSION = "0199c7a4-5b7e-7d31-a7c2-3f1f0c6d2b11"
CLAUDE_CODE = json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": SESSION})


def params(path: str, headers: Headers = (), **body: Any) -> dict[str, Any]:
    """Return the kv_transfer_params of a request with these headers and body fields, as they reach
    vLLM."""
    asked = json.dumps({"model": "m", **body}).encode()
    sent = [(b"host", b"h"), (b"content-length", str(len(asked)).encode()), *headers]
    toy, _ = serve(chunked(asked), path=path, headers=sent)
    got = json.loads(toy.body)
    kept = {name: got.get(name) for name in body if name != "kv_transfer_params"}
    assert kept == {name: body[name] for name in kept}, "vLLM still gets what it may want itself"
    found = got.get("kv_transfer_params") or {}
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("path", sorted(PATHS))
def test_headers_and_body_fields_are_carried_on_every_path(path: str) -> None:
    agent = [(b"x-claude-code-agent-id", b"a1")]
    found = params(path, agent, metadata={"user_id": CLAUDE_CODE})
    assert found == {"client": {"session": SESSION, "agent": "a1", "parent_agent": ""}}
    assert read_hints(found).job_id == f"{SESSION}/agent:a1"


def test_a_session_next_to_the_messages_is_used() -> None:
    """On all paths except Anthropic's Messages API, vLLM itself reads ``session_id``. The
    middleware moves it only on that path."""
    assert params(MESSAGES, session_id="s") == {"session_id": "s"}
    inside = {"session_id": "in"}
    assert params(MESSAGES, session_id="s", kv_transfer_params=inside) == inside
    for path in PATHS - {MESSAGES}:
        assert params(path, session_id="s") == {}


def test_dynamos_final_turn_is_the_last_step_unless_the_body_differs() -> None:
    final = [(b"x-dynamo-session-id", b"d"), (b"x-dynamo-session-final", b"true")]
    ids = {"client": {"session": "d"}}
    assert params(CHAT, final) == {**ids, "is_last_step": True}
    assert params(CHAT, final, is_last_step=False) == {**ids, "is_last_step": False}


def test_ids_that_a_client_sends_as_carried_take_precedence() -> None:
    told = {"client": {"session": "inner"}}
    assert params(CHAT, [(b"session-id", b"outer")], kv_transfer_params=told) == told


def test_headers_are_never_used_as_a_salt() -> None:
    """No header becomes a cache salt, because headers are not verified. Clients are separated only
    by the salt in the body, which is part of the block hashes."""
    names = (*HEADERS, "cache_salt", "x-cache-salt")
    every = [(name.encode(), b"claimed") for name in names]
    asked = json.dumps({"messages": []}).encode()
    got = json.loads(carry(asked, CHAT, every))
    assert got.keys() == {"messages", "kv_transfer_params"}
    assert "salt" not in json.dumps(got)


def test_bodies_that_only_pythons_json_module_reads_are_accepted() -> None:
    """Python's ``json`` module accepts half of a surrogate pair, which remains when a client cuts a
    string, and NaN. The middleware reads such bodies too."""
    for text in ('"\\ud83d"', "NaN"):
        body = f'{{"metadata": {{"user_id": {json.dumps(CLAUDE_CODE)}}}, "x": {text}}}'.encode()
        assert json.loads(carry(body, MESSAGES))["kv_transfer_params"]["client"]["session"]


def test_a_body_is_copied_and_not_encoded_again() -> None:
    body = b'{ "x" : 1.50, "session_id":"s"}'
    changed = carry(body, MESSAGES)
    assert changed.endswith(b', "x" : 1.50, "session_id":"s"}')


# -- input that is passed through ----------------------------------------------------

UNTOUCHED = [
    b"",
    b"{}",
    b'{ "model":"m", "messages" : [] }',
    b'{"messages": [{"content": "the \\"job_id\\" of this"}]}',
    b'{"nested": {"job_id": "j"}}',
    b'[{"job_id": "j"}]',
    b'"job_id"',
    b'{"job_id": "j"',
    b'\xff\xfe{"job_id": "j"}',
    b'{"job_id": "j", "kv_transfer_params": "text"}',
    b'{"job_id": "j", "kv_transfer_params": 0}',
    b'{"job_id": "j", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
]


@pytest.mark.parametrize("body", UNTOUCHED, ids=range(len(UNTOUCHED)))
def test_other_bodies_pass_byte_for_byte_in_the_same_pieces(body: bytes) -> None:
    messages = chunked(body, [1, 5, 5])
    toy, _ = serve(messages)
    assert toy.received[:-1] == messages
    assert toy.content_length == len(body)


@pytest.mark.parametrize(
    "scope",
    [
        {"path": "/tokenize"},
        {"path": f"{CHAT}/render"},
        {"path": f"{MESSAGES}/count_tokens"},
        {"path": "/v1/embeddings"},
        {"method": "PUT"},
        {"method": "GET"},
    ],
)
def test_other_requests_are_not_even_read(scope: dict[str, Any]) -> None:
    body = b'{"job_id": "j"}'
    toy, _ = serve(chunked(body, [3]), **scope)
    assert toy.body == body


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
def test_other_protocols_are_passed_through(kind: str) -> None:
    received = serve([{"type": f"{kind}.startup"}], type=kind)[0].received
    assert received[0] == {"type": f"{kind}.startup"}


def test_a_body_beyond_the_limit_is_passed_through_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_BODY_BYTES", 100)
    fits = b'{"job_id": "j"}'.ljust(100)
    assert serve(chunked(fits, range(0, 100, 10)))[0].body != fits
    for cuts in (range(0), range(0, 1000, 10)):
        messages = chunked(b'{"job_id": "j"}'.ljust(1000), cuts)
        assert serve(messages)[0].received[:-1] == messages


def test_a_disconnect_in_the_middle_of_the_body_is_passed_on() -> None:
    messages = [*chunked(b'{"job_id": "j"}', [5])[:1], DISCONNECT]
    assert serve(messages)[0].received[:2] == messages
    assert serve([DISCONNECT])[0].received[0] == DISCONNECT


# -- arbitrary input -----------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
REQUESTS = st.builds(
    lambda hints, rest: {**rest, **hints},
    st.fixed_dictionaries({}, optional={"kv_transfer_params": JSON, **dict.fromkeys(NAMES, JSON)}),
    st.dictionaries(st.text(), JSON, max_size=4),
)
CUTS = st.lists(st.integers(0, 300), max_size=6)


@given(REQUESTS, CUTS, st.booleans())
def test_only_hints_are_moved_however_the_body_is_cut(
    request_: dict[str, Any], cuts: list[int], ascii_only: bool
) -> None:
    text = json.dumps(request_, ensure_ascii=ascii_only)
    messages = chunked(text.encode("utf-8", "replace"), cuts)
    asked = json.loads(b"".join(message["body"] for message in messages))
    toy, _ = serve(messages)
    assert toy.content_length == len(toy.body)
    params, said = asked.get("kv_transfer_params"), [n for n in NAMES if asked.get(n) is not None]
    if not said or not isinstance(params, dict | None):
        assert toy.received[:-1] == messages
        return
    got = json.loads(toy.body)
    assert {**asked, "kv_transfer_params": None} == {**got, "kv_transfer_params": None}
    expected = dict(params or {})
    for name in said:
        if expected.get(name) is None:
            expected[name] = asked[name]
    assert got["kv_transfer_params"] == expected


@given(st.binary(max_size=60) | st.sampled_from(UNTOUCHED[:6]), CUTS)
def test_a_body_that_is_not_json_is_passed_through(body: bytes, cuts: list[int]) -> None:
    messages = chunked(body, cuts)
    toy, _ = serve(messages)
    assert toy.received[:-1] == messages
