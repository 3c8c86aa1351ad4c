"""Answers of a real engine's routes become a server state, and invalid answers become an error
message."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runtime.conftest import MakeRig
from tests.top.made import shown
from tests.top.recorded import busy_rig, record
from tests.top.route_server import Answer, RouteServer, refusal
from tiered_kv.connectors.vllm.routes.engine_calls import NOT_THERE
from tiered_kv.status import DecisionCount, JobState, Where
from tiered_kv.testing.checked_kv import text
from tiered_kv.top.route_client import (
    NO_ROUTES,
    NO_TOKEN,
    ODD_TOKEN,
    WRONG_TOKEN,
    RouteClient,
    RouteError,
)
from tiered_kv.top.watch import Watch

STATUS = "/tiered_kv/status"


def said(server: RouteServer, token: str | None = None) -> str:
    """Return the error message of a failed poll."""
    with pytest.raises(RouteError) as caught:
        Watch(RouteClient(server.url, token)).look()
    return str(caught.value)


def test_a_server_state_matches_the_engine(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = busy_rig(make_rig, tmp_path)
    with RouteServer(record(monkeypatch, rig)).running() as server:
        seen = Watch(RouteClient(f"{server.url}/v1", None)).look()
    (engine,) = seen.status.engines
    vram = engine.tiers.vram
    assert vram.blocks == 127
    assert vram.pinned_blocks == rig.pins.held_blocks == 20 + 2
    assert vram.running_blocks == len(rig.half.pool.blocks_of("running 1")) == 4
    assert vram.running_blocks + vram.pinned_blocks + vram.free_blocks == 127
    really_cached = sum(
        block.block_hash is not None and not block.ref_cnt and not block.is_null
        for block in rig.half.pool.blocks
    )
    assert abs(vram.reusable_blocks - really_cached) <= 1, "but for the last block of the turn"
    assert engine.tiers.cpu.pages == len(rig.index)
    decided = {DecisionCount("fast", "pin", 1), DecisionCount("slow", "store", 1)}
    assert set(engine.decisions.counts) == decided
    assert engine.counters["prompt_tokens_recomputed"] > 300
    jobs = {job.id[:8]: job for job in seen.jobs}
    assert jobs["pinned"].state is jobs["away"].state is JobState.WAITING
    assert jobs["pinned"].kv.where is Where.VRAM
    assert jobs["pinned"].kv.until is not None
    assert jobs["pinned"].since is not None
    assert jobs["pinned"].expected_at == pytest.approx(jobs["pinned"].since + 50.0)
    assert jobs["away"].kv.where is Where.STORE
    assert jobs["away"].kv.back_at is not None
    assert jobs["running"].state is JobState.RUNNING
    assert seen.whole
    assert seen.growth == {}
    lines = shown(seen, 120, 30)
    assert [line for line in lines if line.startswith("\\x1b[31m")], "the hostile one"
    assert all(line.isprintable() for line in lines)


def test_both_of_two_engines_are_shown(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = busy_rig(make_rig, tmp_path), make_rig(blocks=64)
    second.half.facts = replace(second.half.facts, replica=1)
    second.ask("t1", text(40, seed=1), params={"job_id": "other"})
    with RouteServer(record(monkeypatch, first, second)).running() as server:
        seen = Watch(RouteClient(server.url, None)).look()
    assert [one.engine for one in seen.status.engines] == [0, 1]
    assert seen.total.tiers.vram.blocks == 127 + 63
    assert [job.id for job in seen.of_engine(1).jobs] == ["other"]
    assert len(seen.jobs) == 5
    assert seen.of_engine(1).total.tiers.vram.blocks == 63


def test_growth_of_counters_is_shown_from_the_second_poll_on(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = busy_rig(make_rig, tmp_path)
    with RouteServer(record(monkeypatch, rig)).running() as server:
        watch = Watch(RouteClient(server.url, None))
        before = watch.look().total.counters
        rig.run()
        server.answers = record(monkeypatch, rig)
        seen = watch.look()
    grown = seen.grown
    assert grown is not None
    assert grown.over_s > 0
    assert grown.counters["turns"] == 1 == seen.total.counters["turns"] - before["turns"]


def test_each_refusal_states_what_to_do() -> None:
    with RouteServer({}).running() as server:
        assert said(server) == NO_ROUTES
        server.answers[STATUS] = refusal(401, "These routes need the token.")
        assert said(server) == NO_TOKEN
        assert said(server, "wrong") == WRONG_TOKEN
        server.answers[STATUS] = refusal(403, "These routes are off: serve on --host 127.0.0.1.")
        assert said(server) == "These routes are off: serve on --host 127.0.0.1."
        server.answers[STATUS] = refusal(501, NOT_THERE)
        assert said(server) == NOT_THERE
        server.answers[STATUS] = refusal(503, "\x1b[2JThe engine does not respond.")
        assert said(server) == "\\x1b[2JThe engine does not respond."
        server.answers[STATUS] = Answer("<html>", 502)
        assert said(server) == "The server answered with status 502: see its log, and try again."
        for body in ("<html>hello", "{}", '{"engines": []}', "[" * 100_000, '{"engines": [7]}'):
            server.answers[STATUS] = Answer(body)
            assert "use the same version of tiered-kv as the server" in said(server)
    assert "does not respond" in said(server)
    assert "check that the server runs" in said(server)
    assert "http://HOST:8000" in said(RouteServer({}))


def test_the_token_is_sent_to_the_server_only() -> None:
    with RouteServer({}).running() as other, RouteServer({}).running() as server:
        assert said(server, " geheim ü ") == NO_ROUTES
        assert server.tokens == ["Bearer geheim ü".encode().decode("latin-1")]
        server.answers[STATUS] = Answer("", 302, {"Location": f"{other.url}/elsewhere"})
        said(server, "s3cret")
        assert server.tokens[-1] == "Bearer s3cret"
        assert other.tokens == [None], "which the server sends on to"
        server.tokens.clear()
        assert said(server) != ""
        assert said(server, "") != ""
        assert server.tokens == [None, None]


@pytest.mark.parametrize("token", ["voil\u00e0", "x\u00a0", "\u0142", os.fsdecode(b"\xff")])
def test_a_token_is_sent_byte_for_byte(token: str) -> None:
    with RouteServer({}).running() as server:
        assert said(server, token) == NO_ROUTES
        assert server.tokens == ["Bearer " + os.fsencode(token).decode("latin-1")]


def test_an_invalid_token_is_not_shown() -> None:
    with pytest.raises(RouteError) as caught:
        RouteClient("http://127.0.0.1:1", "s3cret\nX: y")
    assert str(caught.value) == ODD_TOKEN


def test_a_missing_server_is_reported_with_its_last_state(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = record(monkeypatch, busy_rig(make_rig, tmp_path))
    with RouteServer(answers).running() as server:
        watch = Watch(RouteClient(server.url, None))
        before = watch.look_again()
    gone = watch.look_again()
    assert gone.problem is not None
    assert "check that the server runs" in gone.problem
    assert gone.jobs == before.jobs
    with server.running(port=int(server.url.rsplit(":")[-1])):
        assert watch.look_again().problem is None, "it is back"
