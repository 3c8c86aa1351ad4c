"""What a step costs on a machine at hand, fitted to runs of a real server.

The simulator plays the same jobs; its costs are changed until every turn's first token and the
rest of its answer come after as long as they really did, in least squares of logarithms.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.replay.results import Run
from bench.sim.driver import Tiers, simulate
from bench.sim.machines import Machine, StepCost
from bench.sim.servers import server
from bench.sim.workload import Workload

Array = NDArray[np.float64]

DIFF_STEP = 0.05
"""Change of a logarithm by which slopes are found: steps of the scheduler make smaller ones
jump."""
EVALUATIONS = 14
"""Times that slopes are found, at most."""
SHORTEST_S = 1e-3


@dataclass(frozen=True, slots=True)
class Sample:
    """What a stock server did with jobs.

    Attributes:
        workload: the jobs, beginning when they really did.
    """

    workload: Workload
    run: Run


def fit(samples: Sequence[Sample], begin: Machine) -> Machine:
    """``begin`` with the costs, and a request's overhead, that fit the samples best."""
    optimize: Any = importlib.import_module("scipy.optimize")
    wanted = np.concatenate([_real(sample) for sample in samples])

    def misses(logs: Array) -> Array:
        place = _with(begin, np.exp(logs))
        played = np.concatenate([_played(sample, place) for sample in samples])
        missed: Array = played - wanted
        return missed

    start = np.log([*astuple(begin.cost), begin.overhead_s])
    found = optimize.least_squares(
        misses, start, diff_step=DIFF_STEP, max_nfev=EVALUATIONS, loss="soft_l1", x_scale=0.5
    )
    return _with(begin, np.exp(found.x))


def _with(place: Machine, values: Array) -> Machine:
    step, weights, token, pair, kv, overhead_s = values.tolist()
    return replace(place, cost=StepCost(step, weights, token, pair, kv), overhead_s=overhead_s)


def _real(sample: Sample) -> Array:
    times = []
    for job in sorted(sample.run.jobs, key=lambda one: one.name):
        if job.error is not None:
            raise ValueError(f"{job.name} did not finish: {job.error}")
        for turn in job.turns:
            times += [turn.ttft_s, turn.latency_s - turn.ttft_s]
    return _logs(times)


def _played(sample: Sample, place: Machine) -> Array:
    outcome = simulate(place, server("fcfs"), sample.workload, Tiers())
    times = []
    for job in outcome.jobs:
        for turn in job.turns:
            first_s = turn.first_s - turn.asked_s + place.overhead_s / 2
            times += [first_s, turn.ended_s - turn.asked_s - first_s]
    return _logs(times)


def _logs(times: Sequence[float]) -> Array:
    logs: Array = np.log(np.maximum(times, SHORTEST_S))
    return logs
