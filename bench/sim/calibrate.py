"""What a step costs on a machine at hand, fitted to runs of a real server.

What a job alone takes says what prefills and decoding cost: a straight line each. The rest, what
requests cost each other, the simulator finds: it plays the same jobs, and its costs are changed
until every turn's first token and the rest of its answer come after as long as they really did, in
least squares of logarithms.
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


def from_alone(sample: Sample, begin: Machine) -> Machine:
    """``begin`` with what jobs that nobody disturbed say: seconds of a prefill by its tokens and
    pairs, and of a decoded token by its context. A step's own time cannot be told from that of
    reading weights, nor from that of a request: the shares of ``begin`` are kept."""
    prefills, decodes = [], []
    for job in sample.run.jobs:
        for turn in job.turns:
            new = turn.prompt_tokens - turn.cached_tokens
            end = turn.prompt_tokens
            prefills.append((1.0, new, new * (end - new / 2), turn.ttft_s))
            if turn.output_tokens > 1:
                each_s = (turn.latency_s - turn.ttft_s) / (turn.output_tokens - 1)
                decodes.append((1.0, end + turn.output_tokens / 2, each_s))
    first, token, pair = _line(prefills)
    base, kv = _line(decodes)
    old = begin.cost
    scale = base / (old.step + old.weights + old.seq)
    cost = StepCost(old.step * scale, old.weights * scale, token, pair, kv, old.seq * scale)
    return replace(begin, cost=cost, overhead_s=max(1e-3, first - base))


def _line(rows: Sequence[tuple[float, ...]]) -> list[float]:
    """Coefficients of the columns for the last one, none below zero, in relative errors."""
    optimize: Any = importlib.import_module("scipy.optimize")
    table = np.array(rows)
    table /= table[:, -1:]
    scale = table[:, :-1].max(axis=0)
    found, _ = optimize.nnls(table[:, :-1] / scale, table[:, -1])
    return [max(float(one), 1e-12) for one in found / scale]


def _with(place: Machine, values: Array) -> Machine:
    *cost, overhead_s = values.tolist()
    return replace(place, cost=StepCost(*cost), overhead_s=overhead_s)


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
