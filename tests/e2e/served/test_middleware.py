"""Clients name their jobs in their own fields, on a real server."""

from __future__ import annotations

import json
from contextlib import closing

import httpx
import pytest

from tests.e2e.asking import PATIENCE_S, count, job, tick, trace
from tiered_kv.bench.identities.recorded import clients
from tiered_kv.bench.identities.replay import Player
from tiered_kv.bench.servers.vllm_server import MODEL_NAME, VllmServer
from tiered_kv.trace.turn_record import TurnRecord

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BASE = {"model": MODEL_NAME, "temperature": 0}
CHAT = {**BASE, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello, " * 60}]}
COMPLETION = {**BASE, "max_tokens": 4, "prompt": "Once upon a time " * 40}
RESPONSE = {**BASE, "max_output_tokens": 4, "input": "Tell me of the sea. " * 30}
MESSAGE = {**CHAT, "system": "You are brief."}
SESSION = "0199c7a4-5b7e-7d31-a7c2-3f1f0c6d2b11"
CLAUDE_CODE = {"user_id": json.dumps({"device_id": "d" * 64, "session_id": SESSION})}


def turns(server: VllmServer, job: str, count: int) -> list[TurnRecord]:
    """Return the job's turns in the trace, once at least ``count`` are written."""

    def of_job(found: list[TurnRecord]) -> list[TurnRecord]:
        return [one for one in found if one.job == job]

    return of_job(trace(server, lambda found: len(of_job(found)) >= count))


def test_jobs_named_at_the_top_level_are_known_to_the_connector(server: VllmServer) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        asked = [
            ("/v1/chat/completions", {**CHAT, "job_id": "swe-1", "is_last_step": False}),
            ("/v1/completions", {**COMPLETION, "job_id": "swe-1"}),
            ("/v1/responses", {**RESPONSE, "job_id": "swe-1"}),
            ("/v1/messages", {**MESSAGE, "job_id": "swe-1"}),
        ]
        answers = [client.post(path, json=body).raise_for_status() for path, body in asked]
        for answer in answers:
            assert answer.json()["kv_transfer_params"]["tiered_kv"]["prompt_tokens"] > 0

        streamed = {**CHAT, "stream": True, "job_id": "swe-1", "is_last_step": True}
        with client.stream("POST", "/v1/chat/completions", json=streamed) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) > 4, "token by token"

        found = turns(server, "swe-1", 5)
        assert [one.turn for one in found] == [1, 2, 3, 4, 5]
        assert found[-1].decision.tier == "drop"

        body = json.dumps({**CHAT, "job_id": "cut", "is_last_step": True}).encode()
        pieces = (body[start : start + 100] for start in range(0, len(body), 100))
        client.post(
            "/v1/chat/completions", content=pieces, headers={"content-type": "application/json"}
        ).raise_for_status()
        assert len(turns(server, "cut", 1)) == 1

        plain = client.post("/v1/chat/completions", json=CHAT).raise_for_status().json()
        assert plain["choices"], "a client that names no job is served as ever"
    server.check()


def test_sessions_of_clients_are_jobs_on_their_paths(
    client: httpx.Client, server: VllmServer
) -> None:
    """A client's session id, in whichever field it is sent, names a job on the paths of the
    Messages and Responses APIs. The last turn of each job is streamed."""
    codex = "0199c7a4-0000-7d31-a7c2-3f1f0c6d2b11"
    for job_id, path, body in (
        (SESSION, "/v1/messages", {**MESSAGE, "metadata": CLAUDE_CODE}),
        (
            f"told/session:{SESSION}",
            "/v1/messages",
            {**MESSAGE, "metadata": CLAUDE_CODE, "session_id": "told"},
        ),
        (codex, "/v1/responses", {**RESPONSE, "prompt_cache_key": codex}),
        (
            f"asked/session:{codex}",
            "/v1/responses",
            {**RESPONSE, "prompt_cache_key": codex, "session_id": "asked"},
        ),
    ):
        client.post(path, json=body).raise_for_status()
        last = {**body, "stream": True, "is_last_step": True}
        with client.stream("POST", path, json=last) as stream:
            events = [line for line in stream.iter_lines() if line.startswith("event: ")]
        assert events[0] in ("event: message_start", "event: response.created")
        assert len(events) > 4, "token by token"
        found = turns(server, job_id, 2)
        assert [(one.turn, one.decision.tier == "drop") for one in found] == [(1, False), (2, True)]


def test_a_recorded_subagent_is_a_job_below_its_parent(
    client: httpx.Client, server: VllmServer
) -> None:
    """The recorded requests of Claude Code, with replaced prompts, include those of a sub-agent and
    of its own sub-agent. Each is a job that names its parent."""
    run = next(one for one in clients() if one.name == "claude_code").again()
    with closing(Player(server.url, routed=False)) as player:
        player.play(run, "/v1/messages", 0)
    (session,) = {one.headers["x-claude-code-session-id"] for one in run.turns}
    agents = {one.agent: one.headers.get("x-claude-code-agent-id") for one in run.turns}
    child, grandchild = (
        f"{session}/agent:{agents['child']}",
        f"{session}/agent:{agents['grandchild']}",
    )
    (record,) = turns(server, grandchild, 1)[:1]
    assert (record.session, record.agent, record.parent) == (session, agents["grandchild"], child)
    listed = client.get(f"/tiered_kv/jobs/{child}").raise_for_status().json()["jobs"][0]
    assert (listed["turn"], listed["parent"], listed["session"]) == (3, session, session)


def test_without_the_middleware_parameters_and_the_header_reach_every_path(
    client: httpx.Client, server: VllmServer
) -> None:
    """The middleware does not change these requests. A turn is written to the trace when its job's
    next turn arrives, so each job has two turns."""
    bodies = {
        "/v1/chat/completions": CHAT,
        "/v1/completions": COMPLETION,
        "/v1/responses": RESPONSE,
        "/v1/messages": MESSAGE,
    }
    for path, body in bodies.items():
        name = f"plain {path}"
        header = {"X-Session-ID": f"{name} header"}
        xargs = {"vllm_xargs": {"session_id": f"{name} xargs"}}
        for _ in range(2):
            client.post(path, json={**body, **job(f"{name} params")}).raise_for_status()
            client.post(path, json=body, headers=header).raise_for_status()
            client.post(path, json={**body, **xargs}).raise_for_status()
        for place in ("params", "header", "xargs"):
            assert len(turns(server, f"{name} {place}", 1)) == 1, (path, place)


def test_invalid_sessions_are_counted(client: httpx.Client, server: VllmServer) -> None:
    ignored = count(client, "hints_ignored")
    for session in (["a"], 3.5, "x" * 10_000):
        user_id = json.dumps({"session_id": session})
        for bad in ({"session_id": session}, {"metadata": {"user_id": user_id}}):
            client.post("/v1/messages", json={**MESSAGE, **bad}).raise_for_status()
    tick(client)
    # The user id of the last request is too long to be parsed.
    assert count(client, "hints_ignored") - ignored == 5
    server.check()
