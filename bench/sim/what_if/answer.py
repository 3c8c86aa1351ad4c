"""Answer to a what-if question: the jobs of a trace, simulated under two policies."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiered_kv.bench.output import only_result_on_stdout
from tiered_kv.bench.sim.engine.driver import Stalled, simulate
from tiered_kv.bench.sim.engine.metrics import TIERS
from tiered_kv.bench.sim.engine.metrics import TurnRecord as SimulatedTurn
from tiered_kv.bench.sim.servers.servers import Server
from tiered_kv.config import ENV_PREFIX, TierConfig
from tiered_kv.policies import registry
from tiered_kv.sizing.step_cost import StepCost
from tiered_kv.trace.trace_header import TraceHeader
from tiered_kv.trace.turn_record import TurnTokens

from .jobs import LEFT, RecordedJobs, recorded_jobs
from .recording import (
    CPU,
    MOST_TURNS,
    SSD,
    Recording,
    WhatIfError,
    longest_context,
    read_recording,
    recorded_machine,
)

STOCK = "stock"
"""vLLM without a connector."""
OBSERVE = "observe"
"""Connector mode that moves nothing, so that vLLM serves as without the connector."""
MOST_SPAN_S = 10 * 365 * 86_400.0
ALWAYS = (
    "Arrivals, gaps, prompts and answers are assumed to be the same under the other policy. "
    "Clients that wait, give up or change their requests on a slower server are not modelled.",
    "The trace lacks what a policy had learned before it, so both policies start untrained.",
    "Step costs include the recorded connector's own cost. The other policy's cost is unknown.",
    "Only the shared prefixes that turns of the trace found are known.",
)
COMPRESSED = "Compression speeds are assumed. They matter only when CPU memory is full."


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of recorded or simulated jobs.

    Attributes:
        mean_s, p50_s, p95_s: completion times, from a job's first arrival to the end of its last
            turn.
        vram, cpu, ssd, recomputed: fractions of prompt tokens by tier.
        again: tokens recomputed although an earlier turn of the job had computed them.
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
    """Completion times of a job, seconds.

    Attributes:
        job: the client's name for the job; empty for a turn without a job.
        recorded_s: recorded time.
        simulated_s, what_if_s: simulated times under the recorded and the other policy.
    """

    job: str
    recorded_s: float
    simulated_s: float
    what_if_s: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Estimated result of serving the same jobs with another policy.

    Attributes:
        path: the trace.
        recorded_policy, policy: the two compared policies.
        job_order: for the recorded and for the other policy, True if requests are served in job
            order.
        jobs, turns: numbers of simulated jobs and turns.
        recorded, simulated, what_if: figures of the trace, and of the two simulations.
        simulated_over_recorded: ratios that show how accurate the simulation is.
        what_if_over_simulated: ratios of the other policy to the recorded one, both simulated.
        costs: step costs of the engine, seconds; ``error``, their median relative error; and the
            bandwidth ``copy_bytes_per_s``.
        limits: limits of the estimate, one sentence each.
        by_job: completion times of each job.
        bad_lines: number of invalid lines.
        bad: descriptions of the first invalid lines.
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
    """Simulate the jobs of a trace under its own policy and under another policy.

    Args:
        policy: name of a policy, ``module:Class``, or ``stock`` for vLLM without a connector.
        recorded: the policy of the trace, if it is a ``module:Class``; None uses the policy named
            in the trace.
        job_order: True if the other server serves requests in job order (``ContinuumScheduler``);
            None keeps the recorded order.
        most: maximum number of turns to simulate.

    Raises:
        FileNotFoundError: the trace does not exist.
        WhatIfError: the trace lacks data that a simulation needs.
        ConfigError: the policy does not exist.
    """
    recording = read_recording(path, most)
    header = recording.header
    order = header.job_order if job_order is None else job_order
    own = recorded or _recorded_policy(header, policy)
    servers = _server(header, own, header.job_order), _server(header, policy, order)
    place = recorded_machine(recording)
    found = recorded_jobs(recording.turns, header.block_size, longest_context(header))
    if not found.jobs:
        raise WhatIfError(f"no job of {path} fits into the simulated machine")
    if max(one.arrives_s for one in found.workload.jobs) > MOST_SPAN_S:
        raise WhatIfError(f"the jobs of {path} span more than ten years: shorten the trace")
    try:
        with _quiet():
            # The jobs of an outcome, which are sorted by name, are in the order of the workload.
            runs = [
                simulate(place.machine, one, found.workload, place.tiers).jobs for one in servers
            ]
    except Stalled as error:
        raise WhatIfError(f"the simulation of {path} failed: {error}") from error
    was = _figures(
        [job.took_s for job in found.jobs],
        [[turn.tokens for turn in job.turns] for job in found.jobs],
        found,
    )
    simulated, other = (
        _figures([job.took_s for job in jobs], [job.turns for job in jobs], found) for jobs in runs
    )
    return WhatIf(
        path=str(path),
        recorded_policy=own,
        policy=policy,
        job_order=(header.job_order, order and policy != STOCK),
        jobs=len(found.jobs),
        turns=sum(len(job.turns) for job in found.jobs),
        recorded=was,
        simulated=simulated,
        what_if=other,
        simulated_over_recorded=_ratios(simulated, was),
        what_if_over_simulated=_ratios(other, simulated),
        costs={
            **_costs(place.fitted.cost),
            "copy_bytes_per_s": place.machine.link,
            "error": place.fitted.error,
        },
        limits=[*ALWAYS, *place.assumed, *_limits(recording, found, policy)],
        by_job=[
            JobTimes(was.name, was.took_s, one.took_s, other.took_s)
            for was, one, other in zip(found.jobs, *runs, strict=True)
        ],
        bad_lines=recording.bad_lines,
        bad=[str(one) for one in recording.bad],
    )


def _costs(cost: StepCost) -> dict[str, float]:
    """Return the step costs by name, seconds."""
    return {
        "step_s": cost.step + cost.weights,
        "token_s": cost.token,
        "pair_s": cost.pair,
        "request_s": cost.seq,
        "read_s": cost.kv,
    }


def _recorded_policy(header: TraceHeader, asked: str) -> str:
    """Return the policy that served the jobs. A module that only the trace names is not imported.

    Raises:
        WhatIfError: the policy is from another package, and the caller has not named it.
    """
    if header.mode == OBSERVE:
        return STOCK
    if header.policy not in (*registry.POLICIES, asked):
        raise WhatIfError(
            f"the trace was recorded with {header.policy!r:.60}, which is not a "
            "built-in policy: pass --recorded to import it"
        )
    return header.policy


def _server(header: TraceHeader, policy: str, job_order: bool) -> Server:
    """Return the recorded server with the given policy. Only the default policy holds jobs back."""
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
    """Hide the operator's ``TIERED_KV_*`` settings from the simulated servers, and keep vLLM's
    output out of the result, until the block ends.
    """
    names = [name for name in os.environ if name.startswith(ENV_PREFIX)]
    kept = {name: os.environ.pop(name) for name in names}
    try:
        with only_result_on_stdout():
            yield
    finally:
        os.environ.update(kept)


def _figures(
    took: Sequence[float],
    jobs: Sequence[Sequence[SimulatedTurn | TurnTokens]],
    found: RecordedJobs,
) -> Figures:
    """Return the figures of jobs.

    Args:
        took: completion time of each job, seconds.
        jobs: prompt tokens by tier, for each turn of each job.
        found: the recorded jobs, in the same order.
    """
    total = {tier: sum(getattr(turn, tier) for job in jobs for turn in job) for tier in TIERS}
    again = sum(
        max(0, turn.recomputed - asked.added)
        for job, sent in zip(jobs, found.workload.jobs, strict=True)
        for turn, asked in zip(job[1:], sent.turns[1:], strict=True)
    )
    p50, p95 = np.percentile(took, [50, 95]).tolist()
    shares = {tier: count / max(1, sum(total.values())) for tier, count in total.items()}
    return Figures(float(np.mean(took)), p50, p95, **shares, again=again)


def _ratios(figures: Figures, base: Figures) -> dict[str, float]:
    """Return ratios of the times in ``figures`` to the times in ``base``. Ratios to zero are left
    out.
    """
    times = {name: f"{name}_s" for name in ("mean", "p50", "p95")}
    return {
        name: getattr(figures, time_s) / getattr(base, time_s)
        for name, time_s in times.items()
        if getattr(base, time_s) > 0
    }


def _limits(recording: Recording, found: RecordedJobs, policy: str) -> Iterator[str]:
    """Yield the limits of the estimate for this trace, and the parts of the trace that are left
    out, one sentence each.
    """
    header = recording.header
    if header.tiers_bytes.get(CPU):
        yield COMPRESSED
    if header.eviction and header.eviction not in registry.EVICTION:
        yield f"CPU memory evicts pages by the default rule, not by {header.eviction!r:.60}."
    if ":" in policy:
        yield f"{policy} runs unchanged. Its external inputs, if any, are not simulated."
    if recording.cut:
        yield (
            f"Only the first {len(recording.turns):,} turns are simulated, of {len(found.jobs):,} "
            "jobs. The trace continues, so load that was concurrent with the last jobs is missing."
        )
    if recording.left_out:
        yield (
            f"Turns of other engines are left out: {recording.left_out:,}. The simulated "
            f"engine, which started at {header.started:.0f} as replica {header.replica}, has the "
            "most turns."
        )
    yield from (said.format(found.left[name]) for name, said in LEFT.items() if found.left[name])
