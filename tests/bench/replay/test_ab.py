from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.bench.agents.client import Hints
from tiered_kv.bench.agents.figures import unequal
from tiered_kv.bench.agents.jobs import Job, Turn
from tiered_kv.bench.agents.left_out import LeftOut
from tiered_kv.bench.agents.paired import drawn_order
from tiered_kv.bench.agents.results import JobDone, Kept, Run, TurnDone
from tiered_kv.bench.agents.run_files import Ledger, RunFileError, read_runs
from tiered_kv.bench.replay.__main__ import app
from tiered_kv.bench.replay.ab import (
    BEYOND_TIMES,
    NEAR,
    PRESETS,
    Harness,
    HarnessError,
    NotStarted,
    Preset,
    nearest_rate,
    next_rate,
    total_runs,
)
from tiered_kv.bench.replay.kinds import Kind, make_kinds, size_for
from tiered_kv.bench.replay.measure import Workload, keep_trace
from tiered_kv.bench.replay.report import Row, readable, summary
from tiered_kv.bench.replay.verify_pin import Verdict
from tiered_kv.bench.servers.server_costs import ServerCosts

KINDS = make_kinds("model", size_for([3000], 6400))
PRESET = Preset(jobs=2, turns=1, idle_jobs=1, idle_rounds=3, rounds=2, pool_tokens=6400)
PACE = {"stock": 2.0, "control": 2.0, "tiered": 1.2, "reach": 1.1, "bound": 1.0}
"""Factor by which the load slows down each server. Servers that are not listed are as slow as
stock."""


def slowdown(server: str, jobs_per_s: float) -> float:
    """Return how many times longer a job takes on the server at this load than at idle."""
    return float(1 + PACE.get(server, 2.0) * (jobs_per_s / 0.15) ** 2.5)


class Machine:
    """Simulated servers. Jobs take longer at a higher arrival rate, and optional servers fail to
    start."""

    def __init__(self, stop_after: int | None = None, jobs: int = 2, **job: Any) -> None:
        self.measured: list[tuple[str, str, int]] = []
        self.costs = defaultdict[str, list[ServerCosts | None]](list)
        self._stop_after = stop_after
        self._jobs = jobs
        self._job = job

    def __call__(
        self,
        kind: Kind,
        load: str,
        number: int,
        jobs_per_s: float | None,
        costs: ServerCosts | None = None,
    ) -> Kept:
        if len(self.measured) == self._stop_after:
            raise KeyboardInterrupt
        if kind.optional:
            raise NotStarted(f"{kind.name} wants a GPU")
        self.measured.append((load, kind.name, number))
        self.costs[f"{kind.name} {load}"].append(costs)
        crowd = 0.0 if jobs_per_s is None else jobs_per_s
        took_s = 10.0 * slowdown(kind.name, crowd)
        turn = TurnDone(
            1, 0.0, took_s / 2, took_s, 100, 50, 1, tokens=(1, 2), logprobs=(-1.0, -2.0)
        )
        job = replace(JobDone("job", 0.0, took_s, (turn,)), **self._job)
        jobs = tuple(replace(job, name=f"job-{at}") for at in range(self._jobs))
        run = Run(kind.name, load, number, 0, crowd, jobs, ("--flag",), {"vllm": "0"}, 1.0, 1)
        return Kept(run, reserved_cpus="[]", other_cores=0.0)


def harness(folder: Path, machine: Machine, *, resume: bool = False, seed: int = 0) -> Harness:
    ledger = Ledger(folder, {"seed": seed}, resume=resume)
    return Harness(KINDS, PRESET, machine, ledger, seed=seed)


def test_all_loads_are_measured_in_an_order_that_the_seed_draws(tmp_path: Path) -> None:
    machine = Machine()
    done = harness(tmp_path, machine)
    done.run_all()
    names = ["stock", "control", "tiered", "reach", "bound"]
    for number, servers in enumerate((names, names[:3], names[:3])):
        idle = [name for load, name, n in machine.measured if (load, n) == ("idle", number)]
        assert idle == drawn_order(servers, 0, number)
    pressure = [name for load, name, n in machine.measured if (load, n) == ("pressure", 1)]
    assert pressure == drawn_order(["stock", "tiered", "reach", "bound"], 0, 1)
    first = [name for load, name, n in machine.measured if (load, n) == ("pressure", 0)]
    assert sorted(first) == ["bound", "reach", "tiered"], "calibration was stock's first"
    assert len(machine.measured) <= total_runs(KINDS, PRESET)
    assert set(done.not_started) == {"vllm-offloading", "vllm-simple"}


def test_bounds_may_run_in_the_first_round_alone(tmp_path: Path) -> None:
    machine = Machine()
    preset = replace(PRESET, bounds_once=True)
    Harness(KINDS, preset, machine, Ledger(tmp_path, {}, resume=False), seed=0).run_all()
    for load in ("pressure", "beyond"):
        by_round = [
            {name for at, name, n in machine.measured if (at, n) == (load, number)}
            for number in range(PRESET.rounds)
        ]
        assert by_round[0] >= {"reach", "bound", "tiered"}
        assert by_round[1] == {"stock", "tiered"}
    assert len(machine.measured) <= total_runs(KINDS, preset)


def test_a_router_gets_the_costs_of_stock_steps_and_does_not_run_before_they_are_known(
    tmp_path: Path,
) -> None:
    turns = tuple(
        TurnDone(at, 10.0 * at, 0.1 * at, 0.1 * at + 2.0, 100 * at, 0, 50) for at in range(1, 9)
    )
    machine = Machine(jobs=1, turns=turns)  # prompts of many lengths, so that costs can be fitted
    kinds = make_kinds("model", size_for([3000], 6400), peers=True)
    kinds = [replace(kind, optional=False) for kind in kinds]
    ledger = Ledger(tmp_path, {}, resume=False)
    Harness(kinds, PRESET, machine, ledger, seed=0).run_all()
    told = machine.costs
    assert told["lmcache idle"] == [None]
    assert "vllm-router idle" not in told
    for name in ("vllm-router", "tiered-behind-router"):
        (first, *_) = costs = told[f"{name} pressure"] + told[f"{name} beyond"]
        assert first is not None
        assert first.token == pytest.approx(1e-3, rel=0.05)
        assert costs == [first] * (2 * PRESET.rounds)


def test_pressure_is_the_load_of_the_wanted_slowdown_and_beyond_is_higher(
    tmp_path: Path,
) -> None:
    done = harness(tmp_path, Machine())
    done.run_all()
    rates = {run.load: run.jobs_per_s for run in done.runs}
    assert slowdown("stock", rates["pressure"]) == pytest.approx(3.0, rel=NEAR)
    stock = [run for run in done.runs if (run.server, run.load) == ("stock", "pressure")]
    assert [run.round for run in stock] == [0, 1]
    assert stock[0].jobs == stock[1].jobs
    assert rates["beyond"] == BEYOND_TIMES * rates["pressure"] > rates["pressure"]


def test_a_resumed_measurement_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    at_once = Machine()
    whole = harness(tmp_path / "whole", at_once)
    whole.run_all()
    stopped = harness(tmp_path / "parts", Machine(stop_after=9))
    with pytest.raises(KeyboardInterrupt):
        stopped.run_all()
    assert stopped.runs == whole.runs[: len(stopped.runs)]

    machine = Machine()
    resumed = harness(tmp_path / "parts", machine, resume=True)
    resumed.run_all()
    assert resumed.kept == whole.kept
    assert resumed.not_started == whole.not_started
    assert len(machine.measured) == len(at_once.measured) - 9
    read = [kept for kept in read_runs(tmp_path / "parts") if kept.run.load != "calibration"]
    assert sorted(map(str, read)) == sorted(map(str, whole.kept))


def test_more_rounds_resume_existing_runs_but_another_plan_does_not(tmp_path: Path) -> None:
    few, more = harness(tmp_path, Machine()), Machine()
    few.run_all()
    plan = Ledger(tmp_path, {"seed": 0}, resume=True)
    resumed = Harness(KINDS, replace(PRESET, rounds=3), more, plan, seed=0)
    resumed.run_all()
    assert {number for _, _, number in more.measured} == {2}
    assert len(resumed.kept) == len(few.kept) + len(more.measured)
    with pytest.raises(RunFileError, match=r"other settings \(seed\)"):
        harness(tmp_path, Machine(), resume=True, seed=1)

    broken = tmp_path / "runs" / "idle-0-stock.json"
    broken.write_text(broken.read_text()[:100])
    with pytest.raises(RunFileError, match="idle-0-stock"):
        harness(tmp_path, Machine(), resume=True).run_all()
    with pytest.raises(RunFileError, match="idle-0-stock"):
        read_runs(tmp_path)

    for seed in (1, 2):
        harness(tmp_path, Machine(), seed=seed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "runs-before"]
    assert json.loads((tmp_path / "runs-before/plan.json").read_text()) == {"seed": 1}


def test_the_measurement_stops_if_stock_finishes_no_job(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="stock vLLM finished no job"):
        harness(tmp_path, Machine(error="refused")).run_all()


@given(st.floats(0.01, 10.0), st.floats(0.5, 3.0))
def test_calibration_comes_near_on_any_smooth_curve(scale: float, power: float) -> None:
    def slowdown(rate: float) -> float:
        return float(1 + (rate / scale) ** power)

    tried = [(2.0 * scale, slowdown(2.0 * scale))]
    while len(tried) < 6 and abs(tried[-1][1] / 3 - 1) > 0.2:
        rate = next_rate(tried, 3.0)
        tried.append((rate, slowdown(rate)))
    assert slowdown(nearest_rate(tried, 3.0)) == pytest.approx(3.0, rel=0.35)


def test_the_warm_up_shares_nothing_with_the_jobs() -> None:
    turns = tuple(Turn((at,), (9,), 5.0) for at in range(3))
    workload = Workload((Job("a", "", turns), Job("b", "b", turns)), 1, 0, Hints.NONE, True)
    assert workload.warm_up.salt not in {job.salt for job in workload.jobs}
    assert [turn.gap_s for turn in workload.warm_up.turns] == [0.0, 0.0]
    assert [job.name for job in workload.of("idle")] == ["a"]
    assert [job.name for job in workload.of("beyond")] == ["a", "b"]


def test_the_summary_is_json_with_the_promised_keys(tmp_path: Path) -> None:
    done = harness(tmp_path, Machine())
    done.run_all()
    assert unequal(done.kept) == []
    uneven = [*done.kept, replace(done.kept[0], reserved_cpus="[1]", other_cores=0.9)]
    cores, busy = unequal(uneven)
    assert "different cores" in cores
    assert "0.9 cores" in busy
    left_out = {"nulls": LeftOut(1, 2), "too_short": LeftOut(), "too_long": LeftOut(3, 12)}
    result = summary(done.kept, done.not_started, forced=True, left_out=left_out)
    said = json.loads(json.dumps(result))
    assert {"rows", "closed_mean", "closed_p95", "idle_ratio", "idle_interval"} <= said.keys()
    keys = {"server", "load", "mean_s", "p95_s", "recomputed_fraction", "agrees"}
    assert all(keys <= row.keys() for row in said["rows"])
    assert said["closed_mean"] == pytest.approx(0.8)
    assert said["idle_ratio"] == said["idle_control"] == 1.0
    assert [row["agrees"] for row in said["rows"]] == [True] * 13
    against = [(one["load"], one["server"]) for one in said["ratios"]]
    assert against == [(x, y) for x in ("pressure", "beyond") for y in ("stock", "reach", "bound")]
    assert all(len(one["rounds"]) == PRESET.rounds for one in said["ratios"])
    assert said["left_out"]["too_long"] == {"sessions": 3, "turns": 12}
    shown = readable(said)
    assert len(shown["jobs"]) == 13
    assert shown["tiered-kv over others"][0]["mean"].endswith(")"), "with its interval"
    assert shown["not_started"]["vllm-simple"] == "vllm-simple wants a GPU"
    assert [row["turns"] for row in shown["left out"]] == [2, 12]


def test_a_summary_of_little_or_nothing_is_still_json() -> None:
    empty = summary([], {}, forced=True)
    assert empty["rows"] == []
    assert empty["closed_mean"] is empty["idle_interval"] is None
    kept = Machine()(KINDS[0], "idle", 0, None)
    failed = replace(kept.run, jobs=(JobDone("a", 0.0, 1.0, (), "refused"),))
    said = summary([replace(kept, run=failed)], {}, forced=True)
    assert said["rows"][0]["mean_s"] is None
    assert "NaN" not in json.dumps(said)
    assert readable(said)["unfinished"][0]["jobs"] == "a (round 1)"


def test_a_run_s_trace_is_kept_with_its_older_files_and_replaces_that_of_an_earlier_try(
    tmp_path: Path,
) -> None:
    scratch, kept = tmp_path / "scratch", tmp_path / "out" / "traces" / "idle-0-tiered"
    scratch.mkdir()
    trace = scratch / "trace.jsonl"
    trace.write_text("newest\n")
    (scratch / "trace.jsonl.1").write_text("older\n")
    kept.mkdir(parents=True)
    (kept / "trace.jsonl.2").write_text("of the run before\n")

    keep_trace(trace, kept)

    assert {file.name: file.read_text() for file in kept.iterdir()} == {
        "trace.jsonl": "newest\n",
        "trace.jsonl.1": "older\n",
    }


def run(*arguments: str) -> int:
    """Run the command, and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        app(list(arguments))
    return int(str(ended.value.code))


def test_the_command_line_knows_presets_hints_and_policies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found: list[tuple[list[Kind], Preset, Workload]] = []

    def measure(kinds: list[Kind], preset: Preset, workload: Workload, *_: object) -> int:
        found.append((kinds, preset, workload))
        return 0

    monkeypatch.setattr("tiered_kv.bench.replay.__main__.measure", measure)
    ours = "tiered_kv.testing.policies:FixedPin"
    words = ("ab", "--synthetic", "--model", "m", "--out", str(tmp_path))
    assert run(*words, "--hints", "session", "--policy", "lru", "--policy", ours) == 0
    kinds, preset, workload = found[0]
    assert {f"tiered-{name}" for name in ("lru", ours)} <= {kind.name for kind in kinds}
    assert preset == PRESETS["cpu"]
    assert (workload.hints, workload.forced, len(workload.jobs)) == (Hints.SESSION, True, 30)
    assert run(*words, "--preset", "tiny", "--rounds", "5", "--free") == 0
    assert found[1][1] == replace(PRESETS["tiny"], rounds=5)
    assert not found[1][2].forced
    assert run(*words, "--policy", "unheard-of") == 2
    assert "unheard-of" in capsys.readouterr().err


def test_kept_runs_are_drawn_from_idle_on_and_from_stock_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    harness(tmp_path, Machine()).run_all()
    drawn: list[Row] = []
    assert run("plot", "--out", str(tmp_path / "none")) == 1
    assert "contains no runs" in capsys.readouterr().err

    def draw(rows: list[Row], folder: Path) -> list[Path]:
        drawn.extend(rows)
        return [folder / "replay.png"]

    monkeypatch.setattr("tiered_kv.bench.replay.__main__.plot", draw)
    assert run("plot", "--json", "--out", str(tmp_path)) == 0
    assert json.loads(capsys.readouterr().out) == {"files": [str(tmp_path / "replay.png")]}
    servers = ["stock", "tiered", "reach", "bound"]
    loads = ["idle", "pressure", "beyond"]
    drawn_of = [(row["load"], row["server"]) for row in drawn]
    assert drawn_of.pop(1) == ("idle", "control")
    assert drawn_of == [(x, y) for x in loads for y in servers]


def held(*blocks: int, handed_over: int = 4) -> Verdict:
    return Verdict(tuple((count, count) for count in blocks), handed_over)


def test_a_pin_holds_if_blocks_grow_stay_and_are_freed() -> None:
    assert held(10, 13, 16, 19, 0).faults == []


@pytest.mark.parametrize(
    ("verdict", "fault"),
    [
        (held(0, 0, 0, 0, 0), "no blocks are held after the first turn"),
        (held(10, 13, 13, 19, 0), "turn 3: 13 blocks held, but 13 after the previous turn"),
        (held(10, 13, 16, 19, 4), "4 blocks are still held after the last turn"),
        (held(10, 13, 16, 19, 0, handed_over=1), "only 1 of 4 pins were handed over"),
        (Verdict(((10, 7), (0, 0)), 1), "turn 1: 10 blocks held, then 7 in the same gap"),
        (Verdict((), 0), "no blocks are held after the first turn"),
    ],
)
def test_a_pin_that_does_not_hold_is_reported_with_the_reason(verdict: Verdict, fault: str) -> None:
    assert fault in verdict.faults
