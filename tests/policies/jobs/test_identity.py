"""A job is identified by scope, session and agent, from whichever ids a request has."""

from __future__ import annotations

import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

from tests.arbitrary_ids import LEAVES, MARK, anything
from tiered_kv.bench.identities.recorded import Client, Request, clients
from tiered_kv.connectors.vllm.middleware import MESSAGES, PATHS, carry
from tiered_kv.policies.jobs.hints import read_hints
from tiered_kv.policies.jobs.identity import (
    HEADERS,
    INFERRED_PREFIX,
    MAX_JOB_ID_CHARS,
    NOBODY,
    SOURCES,
    Identity,
    Place,
    claim,
    identify,
)

CLAUDE = {"x-claude-code-session-id": "S", "user-agent": "claude-cli/2.1.197"}
SUBAGENT = {**CLAUDE, "x-claude-code-agent-id": "a1"}
NESTED = {**SUBAGENT, "x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"}


NOTHING: Mapping[str, Any] = {}


def who(
    headers: Mapping[str, str] = NOTHING,
    body: Mapping[str, Any] = NOTHING,
    *,
    params: Mapping[str, Any] = NOTHING,
    xargs: object = None,
    session_id: object = None,
) -> Identity:
    """Return the identity of a request that has passed the middleware."""
    carried = claim(headers, body).ids
    return identify({"client": carried, **params} if carried else params, xargs, session_id)


# -- sessions, agents and parents ---------------------------------------------------


def test_a_request_without_ids_has_no_identity() -> None:
    assert who() == NOBODY
    assert identify(None) == identify({}, {}) == identify("text") == NOBODY


def test_a_subagent_is_a_separate_job_and_has_its_parents_id() -> None:
    assert who(CLAUDE).job == "S"
    assert who(SUBAGENT)[:4] == ("S/agent:a1", "S", "a1", "S")
    assert who(NESTED)[:4] == ("S/agent:a2", "S", "a2", "S/agent:a1")


def test_a_thread_with_the_id_of_its_session_is_the_main_agent() -> None:
    """Codex sends a session id and a thread id with each request. They are equal in requests of the
    main agent, and differ in those of a sub-agent."""
    codex = {"session-id": "S", "thread-id": "S"}
    child = {"session-id": "S", "thread-id": "T", "x-codex-parent-thread-id": "S"}
    assert who(codex)[:4] == ("S", "S", None, None)
    assert who(child)[:4] == ("S/agent:T", "S", "T", "S")


def test_sessions_may_have_parents() -> None:
    """OpenCode starts a session for each sub-agent, and names the session's parent in a header. The
    id of that session is also vLLM's session id."""
    child = {"x-session-affinity": "T", "x-parent-session-id": "S"}
    assert who(child, session_id="T")[:4] == ("T", "T", None, "S")
    assert who({"x-parent-session-id": "S"}, session_id="T").parent == "S"


def test_explicit_ids_name_session_agent_and_parent() -> None:
    given = {"session_id": "S", "agent_id": "a", "parent_agent_id": "lead"}
    for found in (who(params=given), who(xargs=given)):
        assert found[:4] == ("S/agent:a", "S", "a", "S")
    assert who(params={"session_id": "S", "parent_session_id": "P"}).parent == "P"
    assert who(params={"job_id": "j", "parent_job_id": "p"})[:4] == ("j", None, None, "p")


@pytest.mark.parametrize("as_text", [True, False])
def test_a_routers_context_is_an_object_or_a_json_string(as_text: bool) -> None:
    said = {"task_id": "t", "agent_id": "lead", "program_id": "p", "parent_program_id": "q"}
    context = json.dumps(said) if as_text else said
    for found in (who(xargs={"agentic_context": context}), who(params={"agentic_context": said})):
        assert (found.job, found.parent) == ("p", "q")
    del said["program_id"]
    assert who(xargs={"agentic_context": said}).job == "t"
    assert who(xargs={"agentic_context": "{"}) == Identity(ignored=1)


def test_claude_codes_user_id_has_the_session_in_two_forms() -> None:
    session = "0199c7a4-5b7e-7d31-a7c2-3f1f0c6d2b11"
    for user_id in (
        json.dumps({"device_id": "d" * 64, "session_id": session}),
        f"user_{'d' * 64}_account__session_{session}",
    ):
        assert who({}, {"metadata": {"user_id": user_id}}).job == session


@pytest.mark.parametrize(
    "body",
    [
        {"metadata": metadata}
        for metadata in (
            "text",
            {"user_id": None},
            {"user_id": 7},
            {"user_id": "user_7"},
            {"user_id": "{"},
            {"user_id": "[" * 2000},
            {"user_id": '{"a":' * 600},
            {"user_id": json.dumps(["S"])},
            {"user_id": json.dumps({"account": "a"})},
            {"user_id": json.dumps({"session_id": "S", "more": "x" * 5000})},
        )
    ]
    + [{"prompt_cache_key": key} for key in (7, "", "my-application", ["S"])]
    + [{"client_metadata": 3}, {"nvext": {"agent_context": "S"}}, {"previous_response_id": 3}],
)
def test_ids_that_many_conversations_share_are_not_sessions(body: dict[str, Any]) -> None:
    assert claim({}, body) == ({}, False)


def test_a_subagent_without_an_id_is_inferred_below_its_session() -> None:
    """If a router drops the headers, only the system prompt shows that the request is from a
    sub-agent of Claude Code. Its job is then inferred, with the session as its parent."""
    body = {"metadata": {"user_id": json.dumps({"session_id": "S"})}, "system": MARK}
    assert who({}, body)[:4] == (None, "S", None, "S")
    assert who(SUBAGENT, body).job == "S/agent:a1"
    assert who({}, {**body, "system": "x" * 600 + MARK}).job == "S", "the mark is at the start"
    translated = {"metadata": body["metadata"], "instructions": MARK}
    assert who({}, translated)[:4] == (None, "S", None, "S"), "by a gateway, to Responses"


def test_aiperfs_header_is_read_from_aiperf_only() -> None:
    """AIPerf sends the same correlation id with all requests of a session. Other clients send a new
    one with each request."""
    header = {"x-correlation-id": "c"}
    assert who({**header, "user-agent": "aiperf/1.0"}).job == "c"
    assert who({**header, "user-agent": "python"}) == who(header) == NOBODY


def test_a_continued_response_counts_if_nothing_else_names_the_job() -> None:
    body = {"previous_response_id": "resp_1"}
    assert who({}, body).follows == "resp_1"
    assert who(CLAUDE, body)[:5] == ("S", "S", None, None, None)


# -- several ids in one request -----------------------------------------------------


def test_the_first_source_counts_and_the_clients_own_session_is_added() -> None:
    assert who(session_id="R").job == "R"
    assert who(params={"session_id": "P"}, xargs={"session_id": "X"}, session_id="R").job == "P"
    assert who(xargs={"session_id": "X"}, session_id="R").job == "X"
    assert who(CLAUDE, session_id="S").job == "S", "the same session in two places"
    assert who(CLAUDE, session_id="R").job == "R/session:S"


def test_one_session_for_all_does_not_merge_clients_and_agents() -> None:
    other = {**CLAUDE, "x-claude-code-session-id": "T"}
    found = [who(one, session_id="R") for one in (CLAUDE, SUBAGENT, NESTED, other)]
    assert len({one.job for one in found}) == 4
    assert [one.parent for one in found] == [None, found[0].job, found[1].job, None]
    child = {"x-session-affinity": "T", "x-parent-session-id": "S"}
    parent = who({"x-session-affinity": "S"}, session_id="R")
    assert who(child, session_id="R").parent == parent.job


def test_one_gateway_header_for_all_does_not_hide_the_clients_own_session() -> None:
    """A gateway such as LiteLLM may send one id for all clients behind it. The sessions of these
    clients, for example Claude Code, are still separate jobs."""
    gateway = {"x-litellm-session-id": "G"}
    bodies = [{"metadata": {"user_id": json.dumps({"session_id": one})}} for one in "ST"]
    assert [who(gateway, one).job for one in bodies] == ["G/session:S", "G/session:T"]
    assert who(gateway, bodies[0], session_id="R").job == "R/session:G/session:S"
    assert who({"session-id": "S"}, {"client_metadata": {"session_id": "S"}}).job == "S"


def test_a_job_id_is_used_as_it_is() -> None:
    """Other ids do not change a job id that the client sends. The documentation promises that
    requests with the same job_id are turns of one job."""
    for headers in (CLAUDE, SUBAGENT, {}):
        found = who(headers, params={"job_id": "j"}, session_id="R")
        assert (found.job, found.parent) == ("j", None)


def test_unusable_ids_are_counted_and_the_next_source_is_used() -> None:
    long = "x" * (MAX_JOB_ID_CHARS + 1)
    for bad in ("", long, 3.5, True, ["S"], {"a": 1}, f"{INFERRED_PREFIX}7"):
        found = identify({"session_id": bad}, None, "known")
        assert (found.job, found.ignored) == ("known", 1)
    inside = {"metadata": {"user_id": json.dumps({"session_id": ["S"]})}}
    assert claim({}, inside).ids == {"ignored": 1}
    assert who({}, inside) == Identity(carried=True, ignored=1)


@pytest.mark.parametrize("client", ["text", 3, [], {"session": 3.5}, {"agent": []}])
def test_a_client_may_put_anything_where_ids_are_carried(client: object) -> None:
    assert identify({"client": client}).ignored == 1


def test_different_parts_give_different_ids() -> None:
    odd = ["a", "a/agent:b", "a/session:b", "(sha256) x", "", None, "x" * 500, "y" * 512]
    seen: dict[str | None, tuple[object, ...]] = {}
    for session in filter(None, odd):
        for own in filter(None, odd):
            for agent in odd:
                found = identify({"client": {"session": own, "agent": agent}}, None, session)
                parts = (session, own if own != session else None, agent or None)
                assert seen.setdefault(found.job, parts) == parts
                assert found.job is not None
                assert len(found.job) <= MAX_JOB_ID_CHARS


# -- the table of sources -----------------------------------------------------------


def test_every_field_of_the_table_is_read() -> None:
    """``SOURCES`` determines which fields are read, and the documentation is generated from it."""
    for source in SOURCES:
        for name in (*source.session, *source.job):
            *above, last = name.split(".")
            value = "0199c7a4-5b7e-7d31-a7c2-3f1f0c6d2b11" if source.pattern else "id"
            said: Any = {last: value}
            for outer in reversed(above):
                said = {outer: said}
            match source.place:
                case Place.PARAMS:
                    found = who(params=said)
                case Place.XARGS:
                    found = who(xargs=said)
                case Place.CONTEXT:
                    found = who(xargs={"agentic_context": said})
                case Place.VLLM:
                    found = who(session_id=value)
                case Place.HEADER:
                    found = who({"user-agent": source.user_agent, **said})
                case Place.BODY:
                    found = who({}, said)
            assert found.job == value, name


def test_names_are_in_lower_case_as_servers_pass_them() -> None:
    assert all(name == name.lower() for name in HEADERS)


# -- recorded requests --------------------------------------------------------------

CLIENTS = clients()
NAMED = [one for one in CLIENTS if one.ids or one.name in ("agentic_context", "continuum")]


def engine_side(turn: Request, path: str, *, headers: bool) -> Identity:
    """Return the identity of a recorded request as the engine sees it, after the middleware and
    vLLM."""
    body = json.dumps({**turn.body, "messages": [], "input": ""}).encode()
    sent = [(name.encode(), value.encode()) for name, value in turn.headers.items()]
    got = json.loads(carry(body, path, sent if headers else []))
    session = got.get("session_id") if path != MESSAGES else None
    session = session or (turn.headers.get("x-session-id") if headers else None)
    return read_hints(got.get("kv_transfer_params"), got.get("vllm_xargs"), session).who


@pytest.mark.parametrize("path", sorted(PATHS))
@pytest.mark.parametrize("client", NAMED, ids=lambda one: one.name)
def test_each_recorded_agent_is_one_job_whose_parent_is_right(client: Client, path: str) -> None:
    jobs: defaultdict[str, set[str | None]] = defaultdict(set)
    for turn in client.turns:
        jobs[turn.agent].add(engine_side(turn, path, headers=True).job)
    assert all(len(found) == 1 and None not in found for found in jobs.values()), jobs
    assert len(set.union(*jobs.values())) == len(jobs)
    for turn in client.turns:
        parent = client.parents.get(turn.agent)
        found = engine_side(turn, path, headers=True).parent
        assert found == (jobs[parent].copy().pop() if parent else None)


@pytest.mark.parametrize("name", ["codex", "claude_code", "opencode_responses"])
def test_behind_a_router_that_drops_headers_the_body_names_the_job(name: str) -> None:
    client = next(one for one in CLIENTS if one.name == name)
    for turn in client.turns:
        whole = engine_side(turn, turn.path, headers=True)
        found = engine_side(turn, turn.path, headers=False)
        if name == "claude_code" and turn.agent != "main":
            assert found[:4] == (None, whole.session, None, whole.session)
        else:
            assert found.job == whole.job
        if name == "codex":
            assert found.parent == whole.parent


@pytest.mark.parametrize(
    "client", [one for one in CLIENTS if one not in NAMED], ids=lambda one: one.name
)
def test_other_clients_send_nothing_that_is_taken_for_an_id(client: Client) -> None:
    for turn in client.turns:
        found = engine_side(turn, turn.path, headers=True)
        assert found == NOBODY or (found.job is None and found.follows is not None)


def test_two_users_of_a_client_are_two_jobs() -> None:
    for client in (one for one in CLIENTS if one.ids):
        first, second = (
            {who(turn.headers, turn.body, session_id="R").job for turn in run.turns}
            for run in (client, client.again())
        )
        assert not first & second


def test_recordings_have_no_secrets_and_no_paths() -> None:
    for client in CLIENTS:
        text = json.dumps([[turn.headers, turn.body] for turn in client.turns])
        assert not re.search(r"authorization|api-key|Bearer|/tmp|/home|/work", text, re.IGNORECASE)


# -- arbitrary requests ---------------------------------------------------------------


def check(rng: random.Random) -> None:
    """Check one request with arbitrary ids."""
    headers = {
        name: str(rng.choice(LEAVES)) for name in rng.sample(sorted(HEADERS), rng.randrange(5))
    }
    body = anything(rng) if rng.random() < 0.9 else {}
    stated = claim(headers, body if isinstance(body, dict) else {})
    assert len(stated.ids) <= 9
    params = anything(rng)
    if isinstance(params, dict) and rng.random() < 0.5:
        params["client"] = stated.ids
    xargs, session_id = anything(rng), rng.choice([None, 2**70, *LEAVES])
    hints = read_hints(params, xargs, session_id)
    found = hints.who
    for name in (found.job, found.session, found.parent):
        assert name is None or 0 < len(name) <= MAX_JOB_ID_CHARS
        assert name is None or not name.startswith(INFERRED_PREFIX)
    assert found.agent is None or 0 < len(found.agent) <= MAX_JOB_ID_CHARS
    assert found.parent is None or found.parent != found.job
    assert hints == read_hints(params, xargs, session_id), "the same ids name the same job"
    if isinstance(body, dict) and rng.random() < 0.05:
        text = json.dumps({k: v for k, v in body.items() if not _has_bytes(v)}).encode()
        sent = [
            (name.encode(), value.encode("utf-8", "replace")) for name, value in headers.items()
        ]
        assert isinstance(json.loads(carry(text, rng.choice(sorted(PATHS)), sent)), dict)


def _has_bytes(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_bytes, value.values()))
    return isinstance(value, bytes)


@pytest.mark.scripts(40, nightly=1_000)
def test_arbitrary_ids_name_bounded_jobs_and_raise_nothing(seeds: range) -> None:
    """The test checks a hundred requests for each seed."""
    for seed in seeds:
        rng = random.Random(seed)
        for _ in range(100):
            check(rng)


# -- costs --------------------------------------------------------------------------

MOST_CALLS = 400
"""Maximum number of Python and C calls to identify a request. A call takes about 0.1 µs."""


def calls(turn: Request, text: str) -> int:
    """Return the number of calls that identifying a request takes in the API server and the engine:
    the minimum of three counts, because the garbage collector may make calls too."""
    return min(_calls(turn, text) for _ in range(3))


def _calls(turn: Request, text: str) -> int:
    body = json.dumps({**turn.body, "messages": text}).encode()
    sent = [(name.encode(), value.encode()) for name, value in turn.headers.items()]
    seen = 0

    def count(frame: object, event: str, function: object) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    params = json.loads(carry(body, turn.path, sent)).get("kv_transfer_params")
    read_hints(params, None, "R")  # warms up Python's cache of isinstance results
    sys.setprofile(count)
    try:
        carry(body, turn.path, sent)
        read_hints(params, None, "R")
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("client", CLIENTS, ids=lambda one: one.name)
def test_an_identity_costs_few_calls_however_long_the_prompt_is(client: Client) -> None:
    """The test counts calls, because clocks on shared machines are too noisy. ``bench.identities``
    measures the time."""
    for turn in client.turns:
        short, long = calls(turn, ""), calls(turn, "x" * 200_000)
        assert short == long
        assert short < MOST_CALLS
