"""Validation of the simulator: costs fitted to a server's times, and the validation command's
verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tiered_kv.bench.agents.results import JobDone, Run, TurnDone
from tiered_kv.bench.servers.service import ServerError
from tiered_kv.bench.sim.__main__ import app
from tiered_kv.bench.sim.engine.driver import simulate
from tiered_kv.bench.sim.engine.machines import Machine, Tiers
from tiered_kv.bench.sim.servers.servers import server
from tiered_kv.bench.sim.validate import UNKNOWN, calibration_jobs, equal_orders, fit
from tiered_kv.bench.sim.workloads.workload import Hints, SimJob, SimTurn, Workload
from tiered_kv.sizing.step_cost import StepCost

TRUE = StepCost(step=2e-3, weights=15e-3, token=3e-4, pair=2e-7, kv=1.5e-6, seq=8e-4)
PLACE = Machine("here", 200_000, 23_040, 8_192, TRUE, 4e9, batched_tokens=4_096, max_seqs=64)


def played(jobs: tuple[SimJob, ...]) -> Run:
    """Return the run that a replay would record on a server with the costs ``TRUE``."""
    outcome = simulate(PLACE, server("fcfs"), Workload("known", jobs, Hints.RIGHT), Tiers())
    done = []
    for job in outcome.jobs:
        turns = tuple(
            TurnDone(
                turn=number,
                sent_s=turn.asked_s,
                ttft_s=turn.first_s - turn.asked_s,
                latency_s=turn.ended_s - turn.asked_s,
                prompt_tokens=turn.prompt,
                cached_tokens=turn.vram,
                output_tokens=turn.output,
            )
            for number, turn in enumerate(job.turns, 1)
        )
        done.append(JobDone(job.name, job.began_s, job.ended_s, turns))
    return Run("stock", "beside", 0, 0, 1.0, tuple(done), (), {}, 0.0, 0)


def some_jobs(count: int, apart_s: float) -> tuple[SimJob, ...]:
    rng = np.random.default_rng(0)
    jobs = []
    for number in range(count):
        turns, context = [], 0
        for first in np.linspace(100, 4_000, count)[number], 200, 50:
            added, output = int(first), int(rng.integers(30, 120))
            turns.append(SimTurn(context, added, output, 0.1))
            context += added + output
        turns[-1] = replace(turns[-1], gap_s=0.0)
        jobs.append(SimJob(f"job-{number:02}", number * apart_s, tuple(turns)))
    return tuple(jobs)


def test_a_server_s_costs_are_found_in_its_times() -> None:
    found = fit(
        played(some_jobs(8, 100.0)), played(some_jobs(14, 0.7)), replace(PLACE, cost=UNKNOWN)
    )
    cost = found.cost
    assert cost.step + cost.weights == pytest.approx(TRUE.step + TRUE.weights, rel=0.15)
    assert cost.token == pytest.approx(TRUE.token, rel=0.15)
    assert cost.pair == pytest.approx(TRUE.pair, rel=0.25)
    assert cost.kv == pytest.approx(TRUE.kv, rel=0.3)
    busy = Workload("known", some_jobs(14, 0.7), Hints.RIGHT)
    again, truth = (
        simulate(place, server("fcfs"), busy, Tiers()).summary()["mean_s"]
        for place in (found, PLACE)
    )
    assert again == pytest.approx(truth, rel=0.05)


def test_too_few_turns_give_no_costs() -> None:
    one = played(some_jobs(1, 1.0))
    with pytest.raises(ValueError, match="too few"):
        fit(one, one, PLACE)
    failed = replace(one, jobs=(replace(one.jobs[0], error="gone"),))
    with pytest.raises(ValueError, match="gone"):
        fit(failed, one, PLACE)


def test_calibration_jobs_are_of_all_lengths() -> None:
    jobs = calibration_jobs(0)
    firsts = [len(job.turns[0].added) for job in jobs]
    assert min(firsts) == 200
    assert max(firsts) == 3_400
    assert all(turn.gap_s > 0 for job in jobs for turn in job.turns[:-1])
    assert jobs == calibration_jobs(0)


def test_orders_are_equal_where_what_differs_stands_in_its_order() -> None:
    assert equal_orders([(1.0, 10.0), (2.0, 20.0), (2.05, 19.0)]), "near each other is a tie"
    assert not equal_orders([(1.0, 10.0), (2.0, 9.0)])


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("found", "code"), [(0.15, 0), (0.16, 1), (ServerError("it cannot be had"), 1)]
)
def test_the_worst_error_of_a_mean_decides_whether_the_simulator_is_believed(
    found: float | ServerError,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def validate(*_: object, resume: bool) -> dict[str, Any]:
        if isinstance(found, ServerError):
            raise found
        return {"mean_error": found, "order_equal": True, "conserved": True}

    monkeypatch.setattr("tiered_kv.bench.sim.validate.validate", validate)
    assert run("validate", "--json") == code
    said = capsys.readouterr()
    if isinstance(found, ServerError):
        assert said.err == "error: it cannot be had\n"
    else:
        assert json.loads(said.out)["mean_error"] == found


def test_an_unknown_machine_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("run", "--gpu", "abacus") == 2
    assert "abacus is not one of l4-24, " in " ".join(capsys.readouterr().err.split())
