"""Top-level hints are moved to ``kv_transfer_params``; everything else passes unchanged."""

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
    move_hints,
)
from tiered_kv.policies.jobs.hints import TurnHints, read_hints

CHAT = "/v1/chat/completions"
DISCONNECT: Message = {"type": "http.disconnect"}


class Toy:
    """An application that accepts all input, and streams two answers."""

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
    """The body as a client may send it, in pieces that end at ``cuts``."""
    ends = [*sorted(min(cut, len(body)) for cut in cuts), len(body)]
    pieces = [body[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    last = len(pieces) - 1
    return [
        {"type": "http.request", "body": piece, "more_body": n < last}
        for n, piece in enumerate(pieces)
    ]


def serve(messages: Sequence[Message], **scope: Any) -> tuple[Toy, list[Message]]:
    """One request through the middleware: what the application saw, what the client got."""
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


# -- a client of Continuum's --------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", RESPONSES, MESSAGES])
def test_a_job_named_at_the_top_is_named_to_the_connector(path: str) -> None:
    body = json.dumps({"model": "m", "job_id": "swe-1", "is_last_step": False}).encode()
    toy, _ = serve(chunked(body), path=path)
    assert json.loads(toy.body) == {
        "model": "m",
        "kv_transfer_params": {"job_id": "swe-1", "is_last_step": False},
    }
    assert toy.content_length == len(toy.body)


def test_all_that_read_hints_knows_is_moved() -> None:
    values = ["j", True, "bash", "make", 3.5]
    body = json.dumps(dict(zip(NAMES, values, strict=True))).encode()
    moved = json.loads(move_hints(body, CHAT))
    hints = read_hints(moved["kv_transfer_params"])
    assert hints == TurnHints("j", True, "bash", "make", 3.5, ignored=0)


def test_what_is_in_the_parameters_already_wins() -> None:
    request = {
        "job_id": "top",
        "is_last_step": True,
        "tool_name": "bash",
        "kv_transfer_params": {"job_id": "inner", "tool_name": None, "other": [1]},
    }
    assert json.loads(move_hints(json.dumps(request).encode(), CHAT)) == {
        "kv_transfer_params": {
            "job_id": "inner",
            "tool_name": "bash",
            "other": [1],
            "is_last_step": True,
        }
    }


def test_answers_are_streamed_and_the_client_can_still_leave() -> None:
    toy, sent = serve(chunked(b'{"job_id": 1}', [4, 8]))
    assert [message.get("body") for message in sent] == [None, b"one", b"two"]
    assert toy.received[-1] is DISCONNECT


def test_a_server_behind_a_path_is_the_same_server() -> None:
    body = b'{"job_id": "j"}'
    for scope in ({"path": f"/llm{CHAT}"}, {"path": CHAT}):
        toy, _ = serve(chunked(body), root_path="/llm", **scope)
        assert toy.body != body


# -- sessions that vLLM does not take for one ----------------------------------------

SESSION = "0199c7a4-5b7e-7d31-a7c2-3f1f0c6d2b11"
CLAUDE_CODE = json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": SESSION})
OLDER_CLAUDE_CODE = f"user_{'d' * 64}_account__session_{SESSION}"


def session(path: str, **body: Any) -> object:
    """The session that the connector finds in the parameters of such a request."""
    asked = json.dumps({"model": "m", **body}).encode()
    toy, _ = serve(chunked(asked), path=path)
    got = json.loads(toy.body)
    kept = {name: got.get(name) for name in body if name != "kv_transfer_params"}
    assert kept == {name: body[name] for name in kept}, "vLLM still gets what it may want itself"
    return (got.get("kv_transfer_params") or {}).get("session_id")


@pytest.mark.parametrize("user_id", [CLAUDE_CODE, OLDER_CLAUDE_CODE])
def test_claude_code_names_its_session_in_the_users_id(user_id: str) -> None:
    assert session(MESSAGES, metadata={"user_id": user_id}) == SESSION


def test_codex_names_its_session_as_the_key_of_its_prompts() -> None:
    assert session(RESPONSES, prompt_cache_key=SESSION) == SESSION


def test_a_session_next_to_the_messages_is_used() -> None:
    """vLLM reads the field on its other paths itself, and has the last word there."""
    assert session(MESSAGES, session_id="s", metadata={"user_id": CLAUDE_CODE}) == "s"
    assert session(MESSAGES, session_id="s", kv_transfer_params={"session_id": "in"}) == "in"
    for path in PATHS - {MESSAGES}:
        assert session(path, session_id="s") is None


@pytest.mark.parametrize("said", [3.5, {"a": 1}, [SESSION], "x" * 600, ""])
def test_a_session_that_is_none_is_left_for_the_connector_to_count(said: object) -> None:
    inside = json.dumps({"session_id": said})
    for body in ({"session_id": said}, {"metadata": {"user_id": inside}}):
        found = session(MESSAGES, **body)
        assert found == said
        assert read_hints({"session_id": found}) == TurnHints(ignored=1)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        "text",
        {},
        {"user_id": None},
        {"user_id": 7},
        {"user_id": SESSION},
        {"user_id": "user_7"},
        {"user_id": f"user_7_session_{SESSION}; and more"},
        {"user_id": "{"},
        {"user_id": "[" * 2000},
        {"user_id": "9" * 4000},
        {"user_id": json.dumps([SESSION])},
        {"user_id": json.dumps({"account": "a"})},
        {"user_id": json.dumps({"session_id": SESSION, "more": "x" * module.MAX_USER_ID_CHARS})},
    ],
    ids=range(14),
)
def test_other_names_of_users_are_no_sessions(metadata: object) -> None:
    """One user has many conversations: as one job they would be in each other's way."""
    body = json.dumps({"metadata": metadata, "messages": []}).encode()
    assert serve(chunked(body), path=MESSAGES)[0].body == body


@pytest.mark.parametrize("key", [None, 7, "", "my-application", f"{SESSION}:model", [SESSION]])
def test_a_key_that_many_conversations_may_share_is_no_session(key: object) -> None:
    body = json.dumps({"prompt_cache_key": key, "input": "i"}).encode()
    assert serve(chunked(body), path=RESPONSES)[0].body == body


def test_each_path_has_fields_of_its_own() -> None:
    for path in (CHAT, "/v1/completions", RESPONSES):
        assert session(path, metadata={"user_id": CLAUDE_CODE}) is None
    for path in (CHAT, "/v1/completions", MESSAGES):
        assert session(path, prompt_cache_key=SESSION) is None


# -- what is not ours ---------------------------------------------------------------

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
    b'{"job_id": "j", "long": ' + b"9" * 5_000 + b"}",
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
def test_other_protocols_pass(kind: str) -> None:
    received = serve([{"type": f"{kind}.startup"}], type=kind)[0].received
    assert received[0] == {"type": f"{kind}.startup"}


def test_a_body_beyond_the_limit_passes_as_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_BODY_BYTES", 100)
    fits = b'{"job_id": "j"}'.ljust(100)
    assert serve(chunked(fits, range(0, 100, 10)))[0].body != fits
    for cuts in (range(0), range(0, 1000, 10)):
        messages = chunked(b'{"job_id": "j"}'.ljust(1000), cuts)
        assert serve(messages)[0].received[:-1] == messages


def test_a_client_that_leaves_in_the_middle_of_its_body_is_seen_to_leave() -> None:
    messages = [*chunked(b'{"job_id": "j"}', [5])[:1], DISCONNECT]
    assert serve(messages)[0].received[:2] == messages
    assert serve([DISCONNECT])[0].received[0] == DISCONNECT


# -- whatever comes -----------------------------------------------------------------

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
def test_only_hints_move_however_the_body_is_cut(
    request_: dict[str, Any], cuts: list[int], ascii_only: bool
) -> None:
    text = json.dumps(request_, ensure_ascii=ascii_only)
    messages = chunked(text.encode("utf-8", "replace"), cuts)
    asked = json.loads(b"".join(message["body"] for message in messages))
    toy, _ = serve(messages)
    assert toy.content_length == len(toy.body)
    params, said = asked.get("kv_transfer_params"), [name for name in NAMES if name in asked]
    if not said or not isinstance(params, dict | None):
        assert toy.received[:-1] == messages
        return
    got = json.loads(toy.body)
    kept = {key: value for key, value in asked.items() if key not in NAMES}
    assert {**kept, "kv_transfer_params": None} == {**got, "kv_transfer_params": None}
    expected = dict(params or {})
    for name in said:
        if expected.get(name) is None:
            expected[name] = asked[name]
    assert got["kv_transfer_params"] == expected


@given(st.binary(max_size=60) | st.sampled_from(UNTOUCHED[:6]), CUTS)
def test_what_is_no_json_passes(body: bytes, cuts: list[int]) -> None:
    messages = chunked(body, cuts)
    toy, _ = serve(messages)
    assert toy.received[:-1] == messages
