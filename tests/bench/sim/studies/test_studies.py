"""Studies: every case can be run, is told against the first of its group, and is drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.bench.sim.engine.driver import Tiers, simulate
from tiered_kv.bench.sim.engine.metrics import Outcome, TurnRecord
from tiered_kv.bench.sim.servers.servers import server
from tiered_kv.bench.sim.studies.bars import draw_bars
from tiered_kv.bench.sim.studies.catalogue import STUDIES
from tiered_kv.bench.sim.studies.comparison import (
    Case,
    Comparison,
    Group,
    markdown,
    run_comparison,
)
from tiered_kv.bench.sim.study.cells import CODING_AGENTS, Bench, Place, Source
from tiered_kv.bench.sim.workloads.generate import ROLLOUTS, TURNS, generate

PLACE = Place("rtx4090-24", "llama-3.1-8b", pool_tokens=16_000)
JOBS = Source("original", 24)


@pytest.mark.parametrize("name", STUDIES)
def test_every_case_is_a_server_on_a_machine_with_jobs(name: str) -> None:
    comparison = STUDIES[name]("recording")
    labels = [group.label for group in comparison.groups]
    assert len(set(labels)) == len(labels)
    for group in comparison.groups:
        cases = [case.label for case in group.cases]
        assert len(set(cases)) == len(cases) > 1
        for case in group.cases:
            server(case.server)
            place = (case.place or group.place).machine()
            if group.source.workload != CODING_AGENTS:
                assert len(group.source.jobs_for(place, 100).jobs) > group.source.jobs / 5


def test_the_first_of_a_group_is_what_the_others_are_told_against(
    tmp_path: Path, bench: Bench
) -> None:
    cases = (Case("stock", "fcfs"), Case("ours", "occupancy"), Case("one at once", "fcfs", ALONE))
    comparison = Comparison("Small", (Group("here", PLACE, JOBS, cases),))
    result = run_comparison(comparison, bench, lambda _: None, seeds=[0, 1])
    stock, ours, alone = result["rows"]
    assert (stock["over_first"]["value"], stock["over_first"]["low"]) == (1.0, 1.0)
    for row in (ours, alone):
        over = row["over_first"]
        assert over["low"] < over["value"] < over["high"]
        mean_s = row["figures"]["mean_s"] / stock["figures"]["mean_s"]
        assert over["value"] == pytest.approx(mean_s, rel=0.3), "a geometric mean, and a mean"
    assert ours["over_first"]["value"] < 1.0 < alone["over_first"]["value"]
    assert markdown(result).count("\n| here: ") == 3
    for path in draw_bars(result, tmp_path / "figures" / "study-small"):
        assert path.stat().st_size > 1_000


ALONE = replace(PLACE, max_seqs=1)


def test_where_all_jobs_arrive_at_once_there_is_no_load_to_find(bench: Bench) -> None:
    source = Source("rollouts", 2 * ROLLOUTS)
    place = Place("a100-40", "llama-3.1-8b")
    group = Group("a step", place, source, (Case("stock", "fcfs"), Case("ours", "occupancy+cpu")))
    comparison = Comparison("Rollouts", (group,), "makespan_s", load=None)
    result = run_comparison(comparison, bench, lambda _: None, seeds=[0])
    for row in result["rows"]:
        assert row["figures"]["makespan_s"] > row["figures"]["mean_s"]
        assert row["over_first"]["low"] is None, "one seed tells no interval"
    assert " to " not in markdown(result).splitlines()[2]


# -- workloads --------------------------------------------------------------------------


@pytest.mark.parametrize("count", TURNS)
def test_jobs_have_as_many_turns_as_they_say(count: int) -> None:
    workload = generate(f"turns-{count}", 20, 0)
    for job in workload.jobs:
        assert len(job.turns) == count
        assert job.turns[-1].gap_s == 0.0
        long = [turn for turn in job.turns if turn.gap_s > 1.0]
        assert len(long) == max(1, round((count - 1) / 7))
    assert generate(f"turns-{count}", 20, 0) == workload != generate(f"turns-{count}", 20, 1)


def test_rollouts_of_a_prompt_share_it_and_nothing_else() -> None:
    jobs = generate("rollouts", 3 * ROLLOUTS, 5).jobs
    for group in range(3):
        own = jobs[group * ROLLOUTS : (group + 1) * ROLLOUTS]
        assert len({(job.prefix, job.prefix_tokens) for job in own}) == 1
        assert len({len(job.turns) for job in own}) > 1
        for job in own:
            assert job.turns[0].prompt == job.prefix_tokens
            context = 0
            for turn in job.turns:
                assert turn.shared == context
                context += turn.added + turn.output
    assert len({job.prefix for job in jobs}) == 3


def test_all_rollouts_arrive_at_once() -> None:
    workload = generate("rollouts", 2 * ROLLOUTS, 5).at(1.0, 5)
    assert {job.arrives_s for job in workload.jobs} == {0.0}


# -- limits of a machine ----------------------------------------------------------------


def played(place: Place, name: str = "fcfs", **changed: Any) -> Outcome:
    machine = replace(place.machine(), **changed)
    workload = JOBS.jobs_for(machine, 0).at(4.0, 0)
    return simulate(machine, server(name), workload, Tiers())


def test_without_prefix_caching_nothing_is_found_again() -> None:
    found = played(replace(PLACE, prefix_caching=False)).summary()
    assert found["vram"] == 0.0
    assert found["recomputed"] == 1.0
    assert played(PLACE).summary()["vram"] > 0.0


def test_a_long_prompt_takes_more_steps_where_a_step_computes_less_of_it() -> None:
    whole, parts = played(PLACE), played(replace(PLACE, long_prefill=64))
    assert parts.steps > whole.steps
    assert parts.summary()["ttft_s"] > whole.summary()["ttft_s"]


def test_in_static_batches_none_begins_while_one_has_ended_and_another_runs() -> None:
    few = replace(PLACE, prefix_caching=False, max_seqs=4)  # the pool has room for them
    outcome = played(few, "in-batches")
    turns = [turn for job in outcome.jobs for turn in job.turns]
    batches: list[list[TurnRecord]] = []
    for turn in sorted(turns, key=lambda one: one.first_s):
        if not batches or turn.first_s >= max(one.ended_s for one in batches[-1]):
            batches.append([])
        batches[-1].append(turn)
    assert 1 < len(batches) < len(turns), "they are batches, and not single requests"
    for batch in batches:
        assert max(one.first_s for one in batch) < min(one.ended_s for one in batch)
    assert outcome.summary()["mean_s"] > played(few).summary()["mean_s"]
