"""The simulator's parts: workloads, recorded sessions, the gate, the order of requests."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tiered_kv.bench.agents.left_out import LeftOut
from tiered_kv.bench.sim.engine.machines import machine
from tiered_kv.bench.sim.engine.models import MODELS
from tiered_kv.bench.sim.servers.arrivals import Gate, Order, Ordering
from tiered_kv.bench.sim.servers.servers import BASES, server
from tiered_kv.bench.sim.study.catalogue import PLACES
from tiered_kv.bench.sim.study.cells import Bench, Cell, Key, Place, Source, Summary
from tiered_kv.bench.sim.study.loads import STEP, find_loads, first_guess, search
from tiered_kv.bench.sim.study.study import closed
from tiered_kv.bench.sim.validate import equal_orders
from tiered_kv.bench.sim.workloads.generate import GENERATED, generate
from tiered_kv.bench.sim.workloads.recorded import coding_agents
from tiered_kv.bench.sim.workloads.workload import Hints, Workload


@pytest.mark.parametrize("name", GENERATED)
def test_generated_jobs_are_the_same_for_a_seed_and_go_on_from_one_another(name: str) -> None:
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


def test_a_burst_arrives_together_at_the_same_rate_over_all() -> None:
    burst = generate("burst", 400, seed=0).at(2.0, 0)
    times = [job.arrives_s for job in burst.jobs]
    assert len(set(times)) == 20
    assert 400 / times[-1] == pytest.approx(2.0, rel=0.5)


def test_clients_that_err_name_the_other_tool() -> None:
    right, wrong = generate("original", 5, 0), generate("wrong-hints", 5, 0)
    assert wrong.hints is Hints.WRONG
    for a, b in zip(right.jobs, wrong.jobs, strict=True):
        for told, misled in zip(a.turns[:-1], b.turns[:-1], strict=True):
            assert told.gap_s == misled.gap_s
            assert told.tool != misled.tool


def test_jobs_too_long_for_half_the_pool_are_left_out_and_counted() -> None:
    jobs = generate("mixed", 100, seed=0)
    fit = jobs.that_fit(pool_tokens=20_000, max_len=131_072)
    assert 0 < len(fit.jobs) < 100
    assert fit.dropped == 100 - len(fit.jobs)
    left_out = [job for job in jobs.jobs if job not in fit.jobs]
    turns = sum(len(job.turns) for job in left_out)
    assert fit.left_out == {"too_long": LeftOut(len(left_out), turns)}
    assert all(job.longest <= 10_000 for job in fit.jobs)


# -- recorded sessions --------------------------------------------------------------------


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
    """The jobs of sessions with these requests."""
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
def test_what_does_not_say_how_it_follows_is_another_job(tmp_path: Path, unknown: str) -> None:
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
        match="2 turns of 1 sessions are in shorter ones, and 4 turns of 2 sessions have nulls",
    ):
        recorded(tmp_path, [None, *grown(2)], [None, None, None])


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n'))
    with pytest.raises(ValueError, match="no session of a coding agent"):
        coding_agents(path)


# -- servers -------------------------------------------------------------------------------


def test_every_server_can_be_named_and_others_are_refused() -> None:
    for base in BASES:
        assert server(base).name == base
    assert server("occupancy+cpu+ssd").ssd
    assert server("lmcache").cpu
    with pytest.raises(ValueError, match="write one of"):
        server("ocupancy")
    with pytest.raises(ValueError, match="stock vLLM"):
        server("fcfs+cpu")


def test_a_server_may_have_another_eviction_rule_and_parts_from_elsewhere() -> None:
    assert server("occupancy+cpu").eviction is None
    assert server("occupancy+cpu@lru").eviction == "lru"
    rule = "tiered_kv.policies.cache.lru:LeastRecentlyUsed"
    named = server(f"tiered_kv.testing.policies:FixedPin+cpu@{rule}")
    assert (named.policy, named.cpu) == ("tiered_kv.testing.policies:FixedPin", True)
    assert named.eviction == rule
    assert named.outside == {"tiered_kv.testing.policies", "tiered_kv.policies.cache.lru"}
    with pytest.raises(ValueError, match="@ and an eviction rule"):
        server("occupancy@lru")  # there is nothing to evict from
    with pytest.raises(ValueError, match="is no eviction rule: did you mean lru"):
        server("occupancy+cpu@lur")
    with pytest.raises(ValueError, match="has no class Missing"):
        server("tiered_kv.testing.policies:Missing+cpu")


def test_every_machine_of_the_list_holds_its_model() -> None:
    for place in PLACES:
        assert place.machine().pool_tokens > 10_000
    with pytest.raises(ValueError, match="does not fit"):
        machine("rtx4090-24", "llama-3.1-70b")
    with pytest.raises(ValueError, match="write one of"):
        machine("gtx", "llama-3.1-8b")
    assert MODELS["llama-3.1-8b"].kv_bytes == 131_072


def test_a_program_is_paused_when_contexts_grow_too_much_and_goes_on_before_new_ones() -> None:
    gate, sent = Gate(pool_tokens=100), list[str]()
    gate.ask("a", 40, lambda: sent.append("a1"))
    gate.ask("b", 40, lambda: sent.append("b1"))
    gate.ask("c", 40, lambda: sent.append("c1"))
    assert sent == ["a1", "b1"], "there is no room for the third"
    gate.grew("a", 70)
    gate.tick()
    gate.ask("b", 45, lambda: sent.append("b2"))
    assert sent == ["a1", "b1"], "the last to come is paused"
    gate.ask("a", 80, lambda: sent.append("a2"))
    gate.over("a")
    gate.tick()
    assert sent == ["a1", "b1", "a2", "b2", "c1"]


def test_a_program_alone_is_never_held() -> None:
    gate, sent = Gate(pool_tokens=10), list[str]()
    gate.ask("a", 1_000, lambda: sent.append("a"))
    gate.tick()
    assert sent == ["a"]


def test_the_job_that_was_served_least_goes_first() -> None:
    order = Ordering(Order.ATTAINED)
    for job in ("long", "short"):
        order.began(job, None)
    assert order.asked("long", "r1", 0.0) == 0
    order.answered("long", "r1", waited_s=0.0, served_s=9.0)
    order.answered("short", "r2", waited_s=0.0, served_s=1.5)
    assert order.asked("short", "r3", 0.0) < order.asked("long", "r4", 0.0)
    order.answered("long", "r4", waited_s=100.0, served_s=0.0)
    assert order.asked("long", "r5", 0.0) == 0, "it has starved"


def test_jobs_are_ranked_by_their_begin_and_sub_agents_as_their_parents() -> None:
    order = Ordering(Order.JOB)
    order.began("a", None)
    order.began("b", None)
    order.began("a/sub", "a")
    assert [order.asked(job, job, 0.0) for job in ("b", "a/sub", "a")] == [1, 0, 0]


# -- loads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("edge", [0.013, 0.9, 47.0])
def test_the_highest_stable_rate_is_found(edge: float) -> None:
    looking = search(1.0)
    asked, found = [next(looking)], None
    while found is None:
        try:
            asked.append(looking.send(asked[-1] <= edge))
        except StopIteration as end:
            found = end.value
    assert found <= edge <= found * STEP * 1.0001
    assert len(asked) == len(set(asked)), "no rate is asked for twice"


def test_the_first_rate_tried_is_where_contexts_fill_the_pool() -> None:
    def at(pool_tokens: int) -> float:
        place = Place("h200-141", "llama-3.1-8b", pool_tokens=pool_tokens)
        return first_guess((place, Source("swe-agent", 4)), alone_s=100.0)

    assert at(2_000_000) == pytest.approx(2 * at(1_000_000))
    assert at(1_000_000) > 2 * at(60_000) > 2 / 100.0, "there is always room for one"


def test_loads_of_all_servers_are_searched_concurrently() -> None:
    """So that no process is idle while one search has a single run left."""
    scene = Place("l40s-48", "llama-3.1-8b"), Source("swe-agent", 4)
    near = first_guess(scene, 1.0)
    edges = {"fcfs": 0.9 * near, "occupancy": 47.0 * near}
    asked: list[int] = []

    class Runs:
        def run(self, wanted: Mapping[Key, Sequence[Cell]]) -> dict[Key, list[Summary]]:
            asked.append(sum(map(len, wanted.values())))
            return {
                key: [
                    {"mean_s": 1.0 if cell.jobs_per_s <= edges[cell.server] else 3.1}
                    for cell in cells
                ]
                for key, cells in wanted.items()
            }

    found = find_loads(cast("Bench", Runs()), [scene], range(2), tuple(edges))[scene]
    for name, edge in edges.items():
        assert found.stable[name] <= edge <= found.stable[name] * STEP * 1.0001
    assert asked[:2] == [2, 4]
    assert asked[-1] == 2, "one was found before the other"


def test_shares_of_the_way_and_orders() -> None:
    assert closed(20.0, fcfs_s=100.0, infinite_s=20.0) == 1.0
    assert closed(100.0, fcfs_s=100.0, infinite_s=20.0) == 0.0
    assert equal_orders([(1.0, 10.0), (2.0, 20.0), (2.05, 19.0)]), "near each other is a tie"
    assert not equal_orders([(1.0, 10.0), (2.0, 9.0)])
    assert not math.isnan(closed(30.0, 100.0, 20.0))
