"""Validation of the simulator: closed forms, conservation, and a real server.

A real server and the simulator get the same jobs at the same times, and pools of the same size.
Step costs are fitted to two runs of synthetic jobs on stock vLLM, one with one job at a time and
one with concurrent jobs. The prompts and answers of these jobs have many lengths. Then recorded
jobs of mini-swe-agent run on every server type, both real and simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from tiered_kv.bench.agents.client import Hints as ReplayHints
from tiered_kv.bench.agents.figures import completions, unequal
from tiered_kv.bench.agents.jobs import Job, Turn, arrivals, digest, mini_swe_jobs
from tiered_kv.bench.agents.results import Kept, Run
from tiered_kv.bench.agents.run_files import Ledger
from tiered_kv.bench.agents.sessions import recording
from tiered_kv.bench.replay.kinds import Kind, longest_context, make_kinds, size_for
from tiered_kv.bench.replay.measure import Replay, versions
from tiered_kv.bench.replay.measure import Workload as ReplayWorkload
from tiered_kv.bench.replay.names import BOUND, PRESSURE, STOCK, TIERED
from tiered_kv.bench.servers.model import small_model
from tiered_kv.bench.servers.server_costs import fit_runs
from tiered_kv.bench.sim.engine.driver import simulate
from tiered_kv.bench.sim.engine.machines import Machine, Tiers
from tiered_kv.bench.sim.engine.metrics import Outcome
from tiered_kv.bench.sim.servers.servers import Server, server
from tiered_kv.bench.sim.study.catalogue import AMPLE, TIGHT
from tiered_kv.bench.sim.study.cells import Source
from tiered_kv.bench.sim.workloads.workload import Hints, SimJob, SimTurn, Workload
from tiered_kv.sizing.step_cost import StepCost

EXACT = 1e-6
"""Maximum relative rounding error of a closed form."""
LINK_BYTES_PER_S = 1e9
SHORT_POOL = 16_000
"""Pool size in tokens, which holds five of the jobs of ``not_conserved``."""
CONSERVING = (
    *("fcfs", "job-fcfs", "autellix", "thunderagent", "lmcache", "continuum", "infercept"),
    *("occupancy", "occupancy+cpu", "occupancy+cpu+ssd", "clairvoyant+cpu", "occupancy-knowing"),
)
"""Servers on which conservation is checked."""


BLOCK = 32
POOL_TOKENS = 12_800
BATCHED_TOKENS, MAX_SEQS = 2_048, 64
"""Limits per step, also used on the real server."""
VOCABULARY = 40_000
KV_BYTES = 30 * 2 * 3 * 64 * 2
"""KV bytes per token of SmolLM2-135M: layers, K and V, heads, head size, bf16."""
LINK = 4e9
"""Speed of copies within the same memory, bytes/s."""
CALIBRATION_JOBS, CALIBRATION_TURNS, ALONE = 12, 4, 5
FIRST, ADDED, ANSWER = (200, 3_400), (20, 300), (40, 140)
"""Token ranges of calibration jobs. First prompts are spread evenly over their range, and the jobs
that run alone include the shortest and the longest. All other lengths are log-uniform."""
JOBS, TURNS = 12, 6
CALIBRATION_RATE, RATE = 0.5, 0.2
"""Arrival rates of the calibration jobs and of the recorded jobs, jobs/s. At ``RATE``, jobs on
stock vLLM with this pool take about three times as long as alone."""
CPU_BYTES = 4 * 2**30
UNKNOWN = StepCost(step=0.0, weights=0.0, token=0.0, pair=0.0, kv=0.0, seq=0.0)

SIMULATED = {
    STOCK: server("fcfs"),
    BOUND: server("fcfs"),
    TIERED: server("occupancy-alone+cpu"),
    f"{TIERED}-lru": server("lru+cpu"),
    f"{TIERED}-continuum-fixed": Server("continuum-fixed+cpu", "continuum-fixed", cpu=True),
}
"""Simulated server for each type of real server. All of them serve requests in order of arrival."""
POLICIES = ("lru", "continuum-fixed")


LEAST_OVERHEAD_S = 1e-3


def validate(
    traces: Path, folder: Path, tell: Callable[[str], None], *, resume: bool
) -> dict[str, Any]:
    """Compare the simulator with closed forms and a real server. Returns a JSON object.

    Args:
        traces: folder with recordings.
        folder: folder of the real runs.
        tell: called with the name of each phase.
        resume: reuse existing runs in ``folder``.

    Raises:
        MeasureError, ValueError, OSError: a server cannot run, or the recordings cannot be read.
    """
    tell("closed forms")
    lost = not_conserved()
    forms = {
        "job_alone_error": job_alone_error(),
        "saturated_link_error": saturated_link_error(),
    }
    fitted, servers, notes = compare(recording(traces, "miniswe"), folder, tell, resume=resume)
    pairs = [(one.real_s, one.simulated_s) for one in servers]
    return {
        "mean_error": max(abs(one.error) for one in servers),  # the largest error of a mean time
        "order_equal": equal_orders(pairs),
        "conserved": not lost,
        **forms,
        "lost": lost,
        "servers": [{**asdict(one), "error": one.error} for one in servers],
        "cost": asdict(fitted.cost),
        "overhead_s": fitted.overhead_s,
        "notes": notes,  # reasons why the real runs cannot be compared
    }


# -- closed forms and conservation ------------------------------------------------------


def job_alone_error() -> float:
    """Return the relative error of a single job's completion time against the sum of its parts."""
    place = AMPLE.machine()
    (job,) = Source("original", 1).jobs_for(place, 0).jobs
    workload = Workload("alone", (job,), Hints.RIGHT)
    outcome = simulate(place, server("fcfs"), workload, Tiers())
    wanted = expected_alone_s(job, place, workload.block)
    return outcome.jobs[0].took_s / wanted - 1


def expected_alone_s(job: SimJob, place: Machine, block: int) -> float:
    """Return the expected time of one job alone, seconds: prefills of the tokens that are not in
    the previous turn's full blocks, a step for every further token, and the gaps.
    """
    total, known, cost = 0.0, 0, place.cost
    for turn in job.turns:
        cached = min(known, turn.shared, turn.prompt - 1) // block * block
        for at in range(cached, turn.prompt, place.batched_tokens):
            new = min(place.batched_tokens, turn.prompt - at)
            total += (
                cost.seconds(new, new * (at + new / 2), 0)
                if new > 1
                else cost.seconds(1, 0, at + 1)
            )
        total += sum(cost.seconds(1, 0.0, turn.prompt + said) for said in range(1, turn.output))
        total += turn.gap_s
        known = turn.prompt + turn.output - 1
    return total


def saturated_link_error() -> float:
    """Return the relative error of the time to answer jobs that return together, against the
    restored bytes divided by the link's bandwidth. All KV is in CPU memory, and computing costs
    nothing.
    """
    free = StepCost(step=1e-6, weights=0.0, token=1e-9, pair=0.0, kv=0.0, seq=0.0)
    base = TIGHT.machine()
    place = replace(base, cost=free, link=LINK_BYTES_PER_S, max_seqs=4)
    tokens, away_s, count = 8_000, 400.0, 24
    turns = (SimTurn(0, tokens, 1, away_s), SimTurn(tokens + 1, 63, 1, 0.0))
    jobs = tuple(SimJob(f"job-{n}", 0.0, turns) for n in range(count))
    workload = Workload("link", jobs, Hints.RIGHT)
    outcome = simulate(place, server("lru+cpu"), workload, Tiers())
    back = [job.turns[1] for job in outcome.jobs]
    took = max(turn.ended_s for turn in back) - min(turn.asked_s for turn in back)
    restored = sum(turn.cpu for turn in back) * place.kv_bytes
    return took / (restored / LINK_BYTES_PER_S) - 1


def not_conserved() -> list[str]:
    """Simulate jobs on each server, and return the tokens, answers or time that were lost, one
    sentence each. Every run also checks its blocks and orders at the end.
    """
    place = replace(TIGHT.machine(), pool_tokens=SHORT_POOL)
    workload = Source("original", 24).jobs_for(place, 1).at(4.0, 1)
    tiers = Tiers(2**30, 2**32)
    return [
        f"{name}: {lost}"
        for name in CONSERVING
        for lost in check(simulate(place, server(name), workload, tiers), workload, place)
    ]


def check(outcome: Outcome, workload: Workload, place: Machine) -> Iterator[str]:
    """Yield the differences between a workload and the records of its outcome, one sentence
    each.
    """
    sent = {job.name: job for one in workload.jobs for job in one.everyone()}
    if {job.name for job in outcome.jobs} != set(sent):
        yield "jobs are missing"
    for record in outcome.jobs:
        job = sent[record.name]
        if [(t.prompt, t.output) for t in record.turns] != [
            (t.prompt, t.output) for t in job.turns
        ]:
            yield f"{job.name} has turns that differ from the workload's"
        if any(min(t.vram, t.cpu, t.ssd, t.recomputed) < 0 for t in record.turns):
            yield f"{job.name} found more tokens than its prompt has"
        least = sum(
            (t.output - 1) * place.cost.seconds(1, 0, t.prompt) + t.gap_s for t in job.turns
        )
        if record.took_s < least * (1 - EXACT):
            yield f"{job.name} took {record.took_s:.3f} s, less than {least:.3f} s"


def equal_orders(pairs: Sequence[tuple[float, float]], apart: float = 0.05) -> bool:
    """Return True if the simulation puts every two servers in the right order whose real figures
    differ by more than ``apart``.

    Args:
        pairs: real and simulated figures of each server.
        apart: relative difference.
    """
    return all(
        simulated > other
        for real, simulated in pairs
        for other_real, other in pairs
        if real > other_real * (1 + apart)
    )


# -- a real server ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    """Mean completion times of one server type, real and simulated, seconds."""

    server: str
    real_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        return self.simulated_s / self.real_s - 1


def fit(alone: Run, beside: Run, begin: Machine) -> Machine:
    """Return ``begin`` with the costs fitted to two runs of a stock server.

    Args:
        alone: run with one job at a time.
        beside: run with concurrent jobs.

    Raises:
        ValueError: a job did not finish, or there are too few turns.
    """
    _check_finished(alone)
    _check_finished(beside)
    found = fit_runs(alone, beside)
    return replace(begin, cost=found.cost, overhead_s=max(LEAST_OVERHEAD_S, found.overhead_s))


def _check_finished(run: Run) -> None:
    for job in run.jobs:
        if job.error is not None:
            raise ValueError(f"{job.name} did not finish on {run.server}: {job.error}")


def compare(
    traces: Path, folder: Path, tell: Callable[[str], None], *, resume: bool
) -> tuple[Machine, list[Compared], list[str]]:
    """Run all jobs on real servers, then simulate them; see ``validate``.

    Args:
        traces: file with the recorded sessions.

    Returns:
        The fitted machine, the servers, and reasons why the real runs cannot be compared.
    """
    from transformers import AutoTokenizer

    model = small_model()
    known = calibration_jobs(seed=0)
    jobs = mini_swe_jobs(
        traces,
        AutoTokenizer.from_pretrained(str(model)),
        count=JOBS,
        turns=TURNS,
        seed=0,
        longest=longest_context(POOL_TOKENS),
    ).jobs
    plan = {"jobs": digest(jobs), "known": digest(known), "versions": versions()}
    ledger = Ledger(folder / "real", plan, resume=resume)
    kept = list[Kept]()

    def real(kind: Kind, some: Sequence[Job], rate: float | None, load: str) -> Run:
        tell(f"{kind.name}, {load}")
        workload = ReplayWorkload(tuple(some), len(some), 0, ReplayHints.KV_PARAMS, forced=True)
        measure = partial(Replay(workload, folder), kind, load, 0, rate)
        found = ledger.get_or_measure(load, 0, kind.name, measure)
        if isinstance(found, str):
            raise ValueError(f"{kind.name} did not start: {found}")
        kept.append(found)
        return found.run

    few = known[:ALONE]
    alone = real(_kinds(few, model)[STOCK], few, None, "alone")
    beside = real(_kinds(known, model)[STOCK], known, CALIBRATION_RATE, "beside")
    longest = max(job.context for job in known)
    unknown = Machine(
        "this machine",
        POOL_TOKENS,
        KV_BYTES,
        longest + 2 * BLOCK,
        UNKNOWN,
        LINK,
        batched_tokens=BATCHED_TOKENS,
        max_seqs=MAX_SEQS,
    )
    fitted = fit(alone, beside, unknown)

    compared = []
    work = _simulated(jobs, arrivals(len(jobs), RATE, 0))
    for name, kind in _kinds(jobs, model).items():
        run = real(kind, jobs, RATE, PRESSURE)
        _check_finished(run)
        pool = (kind.options.kv_blocks or 0) * BLOCK
        place = replace(fitted, pool_tokens=pool, max_len=kind.options.max_model_len or 0)
        outcome = simulate(place, SIMULATED[name], work, Tiers(cpu=CPU_BYTES))
        real_s = sum(completions(run)) / len(jobs)
        compared.append(Compared(name, real_s, outcome.summary()["mean_s"]))
    return fitted, compared, unequal(kept)


def calibration_jobs(seed: int) -> list[Job]:
    """Create jobs of random tokens. Their prompts and answers cover the ranges ``FIRST``, ``ADDED``
    and ``ANSWER``.
    """
    rng = np.random.default_rng(seed)

    def tokens(bounds: tuple[int, int]) -> tuple[int, ...]:
        return noise(int(np.exp(rng.uniform(*np.log(bounds)))))

    def noise(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(VOCABULARY, size=count).tolist())

    firsts = np.linspace(*FIRST, ALONE).astype(int).tolist()
    firsts += np.linspace(*FIRST, CALIBRATION_JOBS - ALONE).astype(int).tolist()
    gaps_s = [0.1] * (CALIBRATION_TURNS - 1) + [0.0]
    return [
        Job(
            f"calibration-{number:02}",
            "",
            tuple(
                Turn(tokens(ADDED) if at else noise(first), tokens(ANSWER), gap_s)
                for at, gap_s in enumerate(gaps_s)
            ),
        )
        for number, first in enumerate(firsts)
    ]


def _kinds(jobs: Sequence[Job], model: Path) -> dict[str, Kind]:
    """Return the server types in ``SIMULATED``, sized for these jobs, by name."""
    sizing = size_for([job.context for job in jobs], POOL_TOKENS)
    limits = (f"--max-num-batched-tokens={BATCHED_TOKENS}", f"--max-num-seqs={MAX_SEQS}")
    return {
        kind.name: replace(
            kind,
            options=replace(kind.options, extra_args=(*kind.options.extra_args, *limits)),
        )
        for kind in make_kinds(model, sizing, policies=POLICIES, own_scheduler=True)
        if kind.name in SIMULATED
    }


def _simulated(jobs: Sequence[Job], starts_s: Sequence[float]) -> Workload:
    """Convert replayed jobs into jobs for the simulator."""
    made = []
    for job, start_s in zip(jobs, starts_s, strict=True):
        ends = accumulate(len(turn.added) + len(turn.answer) for turn in job.turns)
        turns = tuple(
            SimTurn(context, len(turn.added), len(turn.answer), turn.gap_s)
            for context, turn in zip((0, *ends), job.turns, strict=False)
        )
        made.append(SimJob(job.name, start_s, turns))
    return Workload("replayed", tuple(made), Hints.RIGHT, BLOCK)
