"""Answer to a question: the jobs of a trace under their own policy and another, both simulated."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiered_kv.bench.output import only_result_on_stdout
from tiered_kv.bench.sim.engine.driver import Stalled, simulate
from tiered_kv.bench.sim.engine.metrics import Outcome
from tiered_kv.bench.sim.servers.servers import Server
from tiered_kv.config import ENV_PREFIX, TierConfig
from tiered_kv.policies import registry
from tiered_kv.trace.trace_header import TraceHeader

from .jobs import RecordedJobs, recorded_jobs
from .limits import limits
from .machine import CPU, SSD, costs_of, longest_context, recorded_machine
from .recording import MOST_TURNS, WhatIfError, read_recording

STOCK = "stock"
"""Name of vLLM without a connector."""
OBSERVE = "observe"
"""Mode of a connector that moves nothing: vLLM served as without it."""
Sources = tuple[int, int, int, int]
"""Tokens of a prompt: from VRAM, CPU memory and SSD, and computed."""
MOST_SPAN_S = 10 * 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of some jobs, recorded or simulated.

    Attributes:
        mean_s, p50_s, p95_s: from a job's first arrival to its last end.
        vram, cpu, ssd, recomputed: shares of prompt tokens by where they came from.
        again: tokens that were computed though an earlier turn of the job had them.
    """

    mean_s: float
    p50_s: float
    p95_s: float
    vram: float
    cpu: float
    ssd: float
    recomputed: float
    again: int


@dataclass(frozen=True, slots=True)
class JobTimes:
    """Times of a job, seconds.

    Attributes:
        job: as its client calls it; empty if it was of none.
        recorded_s: as it was. simulated_s, what_if_s: simulated under its own policy and the other.
    """

    job: str
    recorded_s: float
    simulated_s: float
    what_if_s: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Answer to a question: what if another policy had served these jobs.

    Attributes:
        recorded_policy, policy: the two that are compared.
        job_order: True if requests go in the order of their jobs, under the recorded and the other.
        recorded, simulated, what_if: figures of the trace, and of its simulations.
        simulated_over_recorded: ratios that tell how far the simulation can be believed.
        what_if_over_simulated: ratios of the other policy to the recorded one, both simulated.
        costs: of a step of the engine, seconds; ``error`` is their median relative error.
        limits: what this cannot know, a sentence each.
    """

    path: str
    recorded_policy: str
    policy: str
    job_order: tuple[bool, bool]
    jobs: int
    turns: int
    recorded: Figures
    simulated: Figures
    what_if: Figures
    simulated_over_recorded: dict[str, float]
    what_if_over_simulated: dict[str, float]
    costs: dict[str, float]
    limits: list[str]
    by_job: list[JobTimes]
    bad_lines: int
    bad: list[str]


def what_if(
    path: Path,
    policy: str,
    *,
    recorded: str | None = None,
    job_order: bool | None = None,
    most: int = MOST_TURNS,
) -> WhatIf:
    """Simulate the jobs of a trace under its own policy and under another one.

    Args:
        recorded: the trace's own policy, where that is a ``module:Class``; None: as the trace says.
        policy: name of a policy, ``module:Class``, or ``stock`` for vLLM without a connector.
        job_order: True if the other server takes requests in the order of their jobs
            (``ContinuumScheduler``); None: as the recorded one does.
        most: turns that are simulated.

    Raises:
        FileNotFoundError: there is no such trace.
        WhatIfError: the trace does not hold what a simulation needs.
        ConfigError: there is no such policy.
    """
    recording = read_recording(path, most)
    header = recording.header
    order = header.job_order if job_order is None else job_order
    own = recorded or _recorded_policy(header, policy)
    servers = _server(header, own, header.job_order), _server(header, policy, order)
    place = recorded_machine(recording)
    found = recorded_jobs(recording.turns, header.block_size, longest_context(header))
    if not found.jobs:
        raise WhatIfError(f"no job of {path} fits into the simulator: nothing can be simulated")
    if max(one.arrives_s for one in found.workload.jobs) > MOST_SPAN_S:
        raise WhatIfError(f"jobs of {path} lie more than ten years apart: cut the trace")
    try:
        with _quiet():
            outcomes = [
                simulate(place.machine, one, found.workload, place.tiers) for one in servers
            ]
    except Stalled as error:
        raise WhatIfError(f"the simulation of {path} comes to a halt: {error}") from error
    figures = [_simulated(one, found) for one in outcomes]
    was = _recorded(found)
    times = [_times(one) for one in outcomes]
    return WhatIf(
        path=str(path),
        recorded_policy=own,
        policy=policy,
        job_order=(header.job_order, order and policy != STOCK),
        jobs=len(found.jobs),
        turns=sum(len(job.turns) for job in found.jobs),
        recorded=was,
        simulated=figures[0],
        what_if=figures[1],
        simulated_over_recorded=_ratios(figures[0], was),
        what_if_over_simulated=_ratios(figures[1], figures[0]),
        costs={
            **costs_of(place.fitted.cost),
            "copy_bytes_per_s": place.machine.link,
            "error": place.fitted.error,
        },
        limits=limits(recording, place, found, policy),
        by_job=[
            JobTimes(job.name, job.took_s, *both)
            for job, *both in zip(found.jobs, *times, strict=True)
        ],
        bad_lines=recording.bad_lines,
        bad=[str(one) for one in recording.bad],
    )


def _recorded_policy(header: TraceHeader, asked: str) -> str:
    """The policy that served the jobs. A trace is no reason to import a module.

    Raises:
        WhatIfError: it is of another package, and the caller has not named it.
    """
    if header.mode == OBSERVE:
        return STOCK
    if header.policy not in (*registry.POLICIES, asked):
        raise WhatIfError(
            f"the trace was recorded under {header.policy!r:.60}, which is no policy of this "
            "package: name it with --recorded, and it is imported"
        )
    return header.policy


def _server(header: TraceHeader, policy: str, job_order: bool) -> Server:
    """The recorded server, with a policy. Only the default one holds jobs."""
    if policy == STOCK:
        return Server(STOCK)
    registry.policy(policy)
    return Server(
        policy,
        policy,
        cpu=bool(header.tiers_bytes.get(CPU, 0)),
        ssd=SSD in header.tiers_bytes,
        in_job_order=job_order,
        open=header.admission == "off" and header.policy == TierConfig().policy,
        eviction=header.eviction if header.eviction in registry.EVICTION else None,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the operator's settings out of the simulated servers, and what vLLM prints out of the
    result."""
    names = [name for name in os.environ if name.startswith(ENV_PREFIX)]
    kept = {name: os.environ.pop(name) for name in names}
    try:
        with only_result_on_stdout():
            yield
    finally:
        os.environ.update(kept)


def _times(outcome: Outcome) -> list[float]:
    """Completion times in the order of the workload, whose names are in order."""
    return [job.took_s for job in outcome.jobs]


def _simulated(outcome: Outcome, found: RecordedJobs) -> Figures:
    sources = [
        [(turn.vram, turn.cpu, turn.ssd, turn.recomputed) for turn in job.turns]
        for job in outcome.jobs
    ]
    return _figures(_times(outcome), sources, found)


def _recorded(found: RecordedJobs) -> Figures:
    sources = [
        [
            (one.vram, one.cpu, one.ssd, one.recomputed)
            for one in (turn.tokens for turn in job.turns)
        ]
        for job in found.jobs
    ]
    return _figures([job.took_s for job in found.jobs], sources, found)


def _figures(
    took: Sequence[float], sources: Sequence[Sequence[Sources]], found: RecordedJobs
) -> Figures:
    """Figures of jobs.

    Args:
        took: time of each job, seconds.
        sources: of each job's turns.
    """
    vram = cpu = ssd = recomputed = again = 0
    for job, sent in zip(sources, found.workload.jobs, strict=True):
        for number, (turn, asked) in enumerate(zip(job, sent.turns, strict=True)):
            vram, cpu, ssd = vram + turn[0], cpu + turn[1], ssd + turn[2]
            recomputed += turn[3]
            again += max(0, turn[3] - asked.added) if number else 0
    tokens = max(1, vram + cpu + ssd + recomputed)
    p50, p95 = np.percentile(took, [50, 95]).tolist()
    return Figures(
        mean_s=float(np.mean(took)),
        p50_s=p50,
        p95_s=p95,
        vram=vram / tokens,
        cpu=cpu / tokens,
        ssd=ssd / tokens,
        recomputed=recomputed / tokens,
        again=again,
    )


def _ratios(figures: Figures, base: Figures) -> dict[str, float]:
    """Ratios of times; those over nothing are left out."""
    pairs = {
        "mean": (figures.mean_s, base.mean_s),
        "p50": (figures.p50_s, base.p50_s),
        "p95": (figures.p95_s, base.p95_s),
    }
    return {name: one / other for name, (one, other) in pairs.items() if other > 0}
