"""Workloads: generated and recorded jobs, and their arrivals."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.bench.agents.left_out import LeftOut
from tiered_kv.bench.sim.workloads.generate import GENERATED, ROLLOUTS, TURNS, generate
from tiered_kv.bench.sim.workloads.recorded import coding_agents
from tiered_kv.bench.sim.workloads.workload import Hints, Workload


@pytest.mark.parametrize("name", GENERATED)
def test_generated_jobs_are_the_same_for_a_seed_and_prompts_continue_one_another(name: str) -> None:
    made = generate(name, 30, seed=1)
    assert made == generate(name, 30, seed=1)
    assert made.jobs != generate(name, 30, seed=2).jobs
    for job in made.jobs:
        context = 0
        for turn in job.turns:
            assert turn.shared == context, "the whole context is kept"
            assert turn.added > 0
            assert turn.output > 0
            context += turn.added + turn.output
        assert job.longest == context
        assert job.turns[-1].gap_s == 0.0


def test_continuum_s_jobs_have_seven_gaps_and_grow_to_2900_tokens() -> None:
    for job in generate("original", 20, seed=0).jobs:
        gaps = sorted(turn.gap_s for turn in job.turns[:-1])
        assert len(gaps) == 7
        assert 0.05 <= gaps[0] <= gaps[5] <= 0.3
        assert 2 <= gaps[6] <= 5
        assert job.longest == 2_900


def test_arrivals_of_a_seed_only_come_closer_at_a_higher_rate() -> None:
    jobs = generate("original", 20, seed=0)
    slow, fast = jobs.at(1.0, 7), jobs.at(4.0, 7)
    assert [job.name for job in slow.jobs] == [job.name for job in fast.jobs]
    for a, b in zip(slow.jobs, fast.jobs, strict=True):
        assert a.arrives_s == pytest.approx(4 * b.arrives_s)
    assert slow.jobs[0].arrives_s == 0.0
    assert slow != jobs.at(1.0, 8)


def test_clients_that_err_name_the_other_tool() -> None:
    right, wrong = generate("original", 5, 0), generate("wrong-hints", 5, 0)
    assert wrong.hints is Hints.WRONG
    for a, b in zip(right.jobs, wrong.jobs, strict=True):
        for told, misled in zip(a.turns[:-1], b.turns[:-1], strict=True):
            assert told.gap_s == misled.gap_s
            assert told.tool != misled.tool


@pytest.mark.parametrize("count", TURNS)
def test_jobs_have_as_many_turns_as_their_workload_is_named_for(count: int) -> None:
    for job in generate(f"turns-{count}", 20, 0).jobs:
        assert len(job.turns) == count
        long = [turn for turn in job.turns if turn.gap_s > 1.0]
        assert len(long) == max(1, round((count - 1) / 7))


def test_rollouts_of_a_prompt_share_it_and_nothing_else() -> None:
    jobs = generate("rollouts", 3 * ROLLOUTS, 5).jobs
    groups = [jobs[at : at + ROLLOUTS] for at in range(0, len(jobs), ROLLOUTS)]
    for own in groups:
        assert len({(job.prefix, job.prefix_tokens) for job in own}) == 1
        assert len({len(job.turns) for job in own}) > 1
        assert all(job.turns[0].prompt == job.prefix_tokens for job in own)
    assert len({own[0].prefix for own in groups}) == 3


def test_a_burst_arrives_together_at_the_same_rate_over_all() -> None:
    times = [job.arrives_s for job in generate("burst", 400, seed=0).at(2.0, 0).jobs]
    assert len(set(times)) == 20
    assert 400 / times[-1] == pytest.approx(2.0, rel=0.5)
    rollouts = generate("rollouts", 2 * ROLLOUTS, 5).at(1.0, 5)
    assert {job.arrives_s for job in rollouts.jobs} == {0.0}, "all of them"


def test_jobs_too_long_for_half_the_pool_are_left_out_and_counted() -> None:
    jobs = generate("mixed", 100, seed=0)
    fit = jobs.that_fit(pool_tokens=20_000, max_len=131_072)
    assert 0 < len(fit.jobs) < 100
    assert fit.dropped == 100 - len(fit.jobs)
    left_out = [job for job in jobs.jobs if job not in fit.jobs]
    turns = sum(len(job.turns) for job in left_out)
    assert fit.left_out == {"too_long": LeftOut(len(left_out), turns)}
    assert all(job.longest <= 10_000 for job in fit.jobs)


# -- recorded sessions ------------------------------------------------------------------


def request(t: float, tokens: int, lcp: int, gap: float | None) -> dict[str, object]:
    return {"t": t, "in": tokens, "out": 50, "lcp": lcp, "stop": "tool_use", "api": 2.0, "gap": gap}


def test_sessions_become_jobs_that_end_where_the_user_left(tmp_path: Path) -> None:
    subs = [request(0, 500, 0, 0.0), request(4, 900, 448, 1.0)]
    sub = {"k": "sub", "id": "agent_1", "t": 30.0, "dur_ms": 9_000, "reqs": subs}
    rows = [request(0, 1_000, 0, 0.0), request(10, 1_500, 960, 8.0), sub]
    rows += [request(40, 1_200, 1_152, 12.0)]
    later = [request(9_000, 2_000, 1_200, 5_000.0)] + [
        request(9_000 + n, 2_000 + n, 2_000, 1.0) for n in range(1, 4)
    ]
    session = {"id": "s", "dup": False, "reqs": [*rows, *later]}
    copy = {"id": "c", "dup": True, "reqs": rows}
    path = tmp_path / "sessions.jsonl.gz"
    path.write_bytes(gzip.compress(f"{json.dumps(session)}\n{json.dumps(copy)}\n".encode()))
    first, second = coding_agents(path).jobs
    assert [(t.shared, t.added, t.gap_s) for t in first.turns] == [
        (0, 1_000, 8.0),
        (960, 540, 3.0),  # twelve seconds, of which the sub-agent took nine
        (1_152, 48, 0.0),
    ]
    (agent,) = first.turns[1].agents
    assert [turn.prompt for turn in agent.turns] == [500, 900]
    assert second.turns[0].shared == 0, "another job, which shares nothing"
    assert len(second.turns) == 4


def recorded(folder: Path, *sessions: list[Any]) -> Workload:
    """Write a recording of sessions with these requests, and return its jobs."""
    said = [{"id": f"s{at}", "dup": False, "reqs": reqs} for at, reqs in enumerate(sessions)]
    path = folder / "sessions.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, said)).encode()))
    coding_agents.cache_clear()
    return coding_agents(path)


def grown(count: int) -> list[dict[str, Any]]:
    return [request(9 * at, 1_000 + 100 * at, 990 + 100 * at, 5.0) for at in range(count)]


@pytest.mark.parametrize("unknown", [{"in": None}, {"out": None}, None])
def test_a_request_without_its_tokens_ends_a_job_and_is_counted(
    tmp_path: Path, unknown: dict[str, None] | None
) -> None:
    rows: list[Any] = grown(9)
    rows[3] = unknown and {**rows[3], **unknown}
    found = recorded(tmp_path, rows, grown(4))
    assert [len(job.turns) for job in found.jobs] == [3, 5, 4]
    assert found.jobs[1].turns[0].shared == 0, "nothing is known of what it shares"
    assert found.left_out["nulls"] == LeftOut(sessions=1, turns=1)
    assert found.left_out["too_short"] == LeftOut()


@pytest.mark.parametrize("unknown", ["gap", "lcp"])
def test_a_request_without_gap_or_shared_tokens_starts_another_job(
    tmp_path: Path, unknown: str
) -> None:
    rows = grown(9)
    rows[2][unknown] = None
    found = recorded(tmp_path, rows)
    assert [len(job.turns) for job in found.jobs] == [7]
    assert found.left_out["nulls"] == LeftOut()
    assert found.left_out["too_short"] == LeftOut(sessions=1, turns=2)


def test_a_sub_agent_of_unknown_duration_is_in_its_parents_gap(tmp_path: Path) -> None:
    first, second, third = grown(3)
    known = {"k": "sub", "id": "known", "dur_ms": 2_000, "reqs": grown(2)}
    unknown = {"k": "sub", "id": "unknown", "dur_ms": None, "reqs": grown(4)}
    cut = {"k": "sub", "id": "cut", "dur_ms": 3_000, "reqs": [*grown(1), None, *grown(2)]}
    empty = {"k": "sub", "id": "empty", "dur_ms": 4_000, "reqs": None}
    found = recorded(tmp_path, [first, unknown, second, known, unknown, cut, empty, third])
    (job,) = found.jobs
    assert [(turn.gap_s, len(turn.agents)) for turn in job.turns] == [(5.0, 0), (2.0, 2), (0.0, 0)]
    assert [len(agent.turns) for agent in job.turns[1].agents] == [2, 1]
    assert found.left_out["nulls"] == LeftOut(sessions=1, turns=4 + 4 + 3)


def test_a_recording_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="2 turns of 1 sessions are in shorter jobs, and 4 turns of 2 sessions have nulls",
    ):
        recorded(tmp_path, [None, *grown(2)], [None, None, None])
