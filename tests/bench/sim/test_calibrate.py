"""Costs of a step are found again in the times of a server that has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tiered_kv.bench.replay.results import JobDone, Run, TurnDone
from tiered_kv.bench.sim.engine.driver import Tiers, simulate
from tiered_kv.bench.sim.engine.machines import Machine
from tiered_kv.bench.sim.servers.servers import server
from tiered_kv.bench.sim.validate import UNKNOWN, calibration_jobs, fit
from tiered_kv.bench.sim.workloads.workload import Hints, SimJob, SimTurn, Workload
from tiered_kv.sizing.step_cost import StepCost

TRUE = StepCost(step=2e-3, weights=15e-3, token=3e-4, pair=2e-7, kv=1.5e-6, seq=8e-4)
PLACE = Machine("here", 200_000, 23_040, 8_192, TRUE, 4e9, batched_tokens=4_096, max_seqs=64)


def played(jobs: tuple[SimJob, ...]) -> Run:
    """A replay's record of a server with those costs."""
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
    again = simulate(found, server("fcfs"), some(some_jobs(14, 0.7)), Tiers()).summary()["mean_s"]
    truth = simulate(PLACE, server("fcfs"), some(some_jobs(14, 0.7)), Tiers()).summary()["mean_s"]
    assert again == pytest.approx(truth, rel=0.05)


def some(jobs: tuple[SimJob, ...]) -> Workload:
    return Workload("known", jobs, Hints.RIGHT)


def test_too_few_turns_say_nothing() -> None:
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
