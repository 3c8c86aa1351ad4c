"""Every case of a study can be run, is compared with the others in its group, and is plotted."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.bench.agents.plotting import PlotError
from tiered_kv.bench.sim.engine.driver import simulate
from tiered_kv.bench.sim.engine.machines import Tiers
from tiered_kv.bench.sim.engine.metrics import Outcome, TurnRecord
from tiered_kv.bench.sim.servers.servers import server
from tiered_kv.bench.sim.study.catalogue import (
    PRESETS,
    STUDIES,
    TABLES,
    TIGHT,
    fold,
    folds,
    sweep,
)
from tiered_kv.bench.sim.study.cells import (
    RECORDED,
    Bench,
    Cell,
    Place,
    Source,
    running,
)
from tiered_kv.bench.sim.study.report import plot, report
from tiered_kv.bench.sim.study.study import (
    STEP,
    Case,
    Group,
    Study,
    over_best,
    over_first,
    run_study,
    search,
)
from tiered_kv.bench.sim.workloads.generate import ROLLOUTS

PLACE = Place("rtx4090-24", "llama-3.1-8b", pool_tokens=16_000)
JOBS = Source("original", 24)
PUBLISHED = [
    make("recording") for make in (*TABLES.values(), *PRESETS.values(), *STUDIES.values(), folds)
]


@pytest.mark.parametrize("study", PUBLISHED, ids=lambda study: study.name)
def test_every_case_is_a_server_on_a_machine_with_jobs(study: Study) -> None:
    assert len({(group.label, group.scene) for group in study.groups}) == len(study.groups)
    for group in study.groups:
        assert len({case.label for case in group.cases}) == len(group.cases) > 1
        for case in group.cases:
            server(case.server)
        if group.source.workload not in RECORDED and study.name in STUDIES:
            places = {case.place or group.place for case in group.cases}
            for place in places:
                assert len(group.source.jobs_for(place.machine(), 100).jobs) > group.source.jobs / 5


def test_a_small_fold_names_the_best_of_the_others(bench: Bench) -> None:
    small = fold(PLACE, Source("original", 40))
    result = run_study(Study("folds", (small,), [0, 1], [0], over_best), bench, lambda _: None)
    (row,) = result["folds"]
    others = [case.label for case in small.cases[2:-1]]
    assert set(row["mean_s"]) == {case.label for case in small.cases}
    assert row["best_other"] == min(others, key=row["mean_s"].__getitem__)
    assert result["geomean_over_best"] == pytest.approx(row["over_best"]["value"])
    assert f"| {row['best_other']}, " in report(result)
    with pytest.raises(PlotError, match="print its table with"):
        plot(result, Path())


def test_the_others_of_a_group_are_compared_with_the_first(tmp_path: Path, bench: Bench) -> None:
    alone = replace(PLACE, max_seqs=1)
    cases = (Case("stock", "fcfs"), Case("ours", "occupancy"), Case("one", "fcfs", alone))
    group = Group("here", PLACE, JOBS, cases, 1.2)
    study = Study("small", (group,), [0, 1], [0], partial(over_first, "Small", "mean_s"))
    result = run_study(study, bench, lambda _: None)
    stock, ours, one = result["rows"]
    assert (stock["over_first"]["value"], stock["over_first"]["low"]) == (1.0, 1.0)
    for row in (ours, one):
        over = row["over_first"]
        assert over["low"] < over["value"] < over["high"]
        mean_s = row["figures"]["mean_s"] / stock["figures"]["mean_s"]
        assert over["value"] == pytest.approx(mean_s, rel=0.3), "a geometric mean, and a mean"
    assert ours["over_first"]["value"] < 1.0 < one["over_first"]["value"]
    assert report(result).count("\n| here: ") == 3
    for path in plot(result, tmp_path / "figures"):
        assert path.stat().st_size > 1_000


def test_where_all_jobs_arrive_at_the_start_there_is_no_load_to_find(bench: Bench) -> None:
    source = Source("rollouts", 2 * ROLLOUTS)
    place = Place("a100-40", "llama-3.1-8b")
    cases = (Case("stock", "fcfs"), Case("ours", "occupancy+cpu"))
    group = Group("a step", place, source, cases, None)
    study = Study("step", (group,), [0], [0], partial(over_first, "Rollouts", "makespan_s"))
    result = run_study(study, bench, lambda _: None)
    for row in result["rows"]:
        assert row["figures"]["makespan_s"] > row["figures"]["mean_s"]
        assert row["over_first"]["low"] is None, "one seed gives no interval"
    assert " to " not in report(result).splitlines()[2]


@pytest.mark.slow
def test_a_sweep_is_measured_once_drawn_and_reported(tmp_path: Path) -> None:
    place = Place("rtx4090-24", "llama-3.1-8b", pool_tokens=20_000, cpu_gib=8.0)
    study = sweep("sweep", [((place, Source("original", 16)), ("lru+cpu",))], (0.5, 1.5), 1)
    seen: list[Cell] = []
    with running(1, tmp_path / "cells", seen.append) as bench:
        result = run_study(study, bench, lambda _: None)
    rows = {(row["policy"], row["load"]): row for row in result["rows"]}
    assert {policy for policy, _ in rows} == {"fcfs", "lru+cpu", "infinite"}
    assert rows["fcfs", 0.5]["closed"] is None
    assert rows["fcfs", 0.5]["left_out"] == {"too_long_sessions": 0.0, "too_long_turns": 0.0}
    assert rows["lru+cpu", 1.5]["over_fcfs"] < 0.9
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    with running(1, tmp_path / "cells") as again:
        assert run_study(study, again, lambda _: None) == result
    assert kept == {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert len(plot(result, tmp_path)) == 2
    assert "| lru+cpu |" in report(json.loads(json.dumps(result)))
    assert len(seen) > study.total_runs


def test_a_kept_run_is_not_used_once_the_code_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell.of(TIGHT, Source("original", 2), "fcfs", 1.0, 0)
    kept = cell.key
    assert cell.key == kept
    monkeypatch.setattr("tiered_kv.bench.sim.study.cells.code_digest", lambda outside: "other code")
    assert cell.key != kept


# -- load sweeps -----------------------------------------------------------------------


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


# -- machine limits ----------------------------------------------------------------------


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


def test_a_static_batch_starts_after_the_whole_previous_one() -> None:
    few = replace(PLACE, prefix_caching=False, max_seqs=4)  # the pool has space for four
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
