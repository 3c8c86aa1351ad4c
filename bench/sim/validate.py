"""Validation of the simulator: closed forms, conservation, and a real server.

A real server and the simulator get the same jobs at the same times, and a pool of the same size.
What a step costs is fitted to the turns of two runs of made-up jobs of all lengths on stock vLLM,
one job at a time and several concurrently. Then recorded jobs of mini-swe-agent run on every type
of server, really and simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tiered_kv.bench.agents.client import Hints as ReplayHints
from tiered_kv.bench.agents.figures import unequal
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
"""Largest relative error of rounding in a closed form."""
LINK_BYTES_PER_S = 1e9
SHORT_POOL = 16_000
"""Tokens: space for five of the jobs of ``not_conserved``."""
CONSERVING = (
    *("fcfs", "job-fcfs", "autellix", "thunderagent", "lmcache", "continuum", "infercept"),
    *("occupancy", "occupancy+cpu", "occupancy+cpu+ssd", "clairvoyant+cpu", "occupancy-knowing"),
)
"""Servers that must lose nothing."""


BLOCK = 32
POOL_TOKENS = 12_800
BATCHED_TOKENS, MAX_SEQS = 2_048, 64
"""Limits of a step, also of the real server."""
VOCABULARY = 40_000
KV_BYTES = 30 * 2 * 3 * 64 * 2
"""Bytes of a token of SmolLM2-135M: layers, K and V, heads, their size, bf16."""
LINK = 4e9
"""Copies within the same memory, bytes/s."""
CALIBRATION_JOBS, CALIBRATION_TURNS, ALONE = 12, 4, 5
FIRST, ADDED, ANSWER = (200, 3_400), (20, 300), (40, 140)
"""Tokens of calibration jobs. First prompts are spread evenly over their range, and jobs that run
alone have the shortest and the longest; the rest is log-uniform."""
JOBS, TURNS = 12, 6
CALIBRATION_RATE, RATE = 0.5, 0.2
"""Jobs/s. At the second rate, stock vLLM with this pool is about three times as slow as alone."""
CPU_BYTES = 4 * 2**30
UNKNOWN = StepCost(step=0.0, weights=0.0, token=0.0, pair=0.0, kv=0.0, seq=0.0)

SIMULATED = {
    STOCK: server("fcfs"),
    BOUND: server("fcfs"),
    TIERED: server("occupancy-alone+cpu"),
    f"{TIERED}-lru": server("lru+cpu"),
    f"{TIERED}-continuum-fixed": Server("continuum-fixed+cpu", "continuum-fixed", cpu=True),
}
"""Types of servers and what stands for them. All take requests in order of arrival."""
POLICIES = ("lru", "continuum-fixed")


LEAST_OVERHEAD_S = 1e-3


def validate(
    traces: Path, folder: Path, tell: Callable[[str], None], *, resume: bool
) -> dict[str, Any]:
    """Compare the simulator with closed forms and a real server; one JSON object.

    Args:
        folder: keeps the real runs. resume: use those that exist.

    Raises:
        what ``bench.replay`` raises when a server cannot be run or the traces not read.
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
        "mean_error": max(abs(one.error) for one in servers),  # of means, the worst
        "order_equal": equal_orders(pairs),
        "conserved": not lost,
        **forms,
        "lost": lost,
        "servers": [{**asdict(one), "error": one.error} for one in servers],
        "cost": asdict(fitted.cost),
        "overhead_s": fitted.overhead_s,
        "notes": notes,  # the real runs were not evenly measured
    }


# -- closed forms and conservation ------------------------------------------------------


def job_alone_error() -> float:
    """Return the relative error of one job's completion time against the sum of its parts."""
    place = AMPLE.machine()
    (job,) = Source("original", 1).jobs_for(place, 0).jobs
    workload = Workload("alone", (job,), Hints.RIGHT)
    outcome = simulate(place, server("fcfs"), workload, Tiers())
    wanted = expected_alone_s(job, place, workload.block)
    return outcome.jobs[0].took_s / wanted - 1


def expected_alone_s(job: SimJob, place: Machine, block: int) -> float:
    """Return the time of one job alone: prefills of what no full block of the previous turn holds,
    a step for every further token, and the gaps."""
    total, known = 0.0, 0
    for turn in job.turns:
        cached = min(known, turn.shared, turn.prompt - 1) // block * block
        at = cached
        while at < turn.prompt:
            chunk = min(place.batched_tokens, turn.prompt - at)
            pairs = chunk * (at + chunk / 2) if chunk > 1 else 0.0
            total += place.cost.seconds(chunk, pairs, 0 if chunk > 1 else at + 1)
            at += chunk
        for said in range(1, turn.output):
            total += place.cost.seconds(1, 0.0, turn.prompt + said)
        total += turn.gap_s
        known = turn.prompt + turn.output - 1
    return total


def saturated_link_error() -> float:
    """Relative error of the time in which jobs that return together are answered, against their
    bytes over the link's bandwidth. Everything is in CPU memory, and computing costs nothing."""
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
    """Return losses of tokens, answers or time, a sentence each. Every run checks its blocks and
    orders at its end."""
    place = replace(TIGHT.machine(), pool_tokens=SHORT_POOL)
    workload = Source("original", 24).jobs_for(place, 1).at(4.0, 1)
    lost = []
    for name in CONSERVING:
        outcome = simulate(place, server(name), workload, Tiers(2**30, 2**32))
        lost += [f"{name}: {what}" for what in check(outcome, workload, place)]
    return lost


def check(outcome: Outcome, workload: Workload, place: Machine) -> list[str]:
    """Return what an outcome's records lack of a workload, a sentence each."""
    found = []
    sent = {job.name: job for one in workload.jobs for job in one.everyone()}
    if {job.name for job in outcome.jobs} != set(sent):
        found.append("jobs are missing")
    for record in outcome.jobs:
        job = sent[record.name]
        if [(t.prompt, t.output) for t in record.turns] != [
            (t.prompt, t.output) for t in job.turns
        ]:
            found.append(f"{job.name} said something else")
        if any(min(t.vram, t.cpu, t.ssd, t.recomputed) < 0 for t in record.turns):
            found.append(f"{job.name} found more than its prompt")
        decode_s = sum((t.output - 1) * place.cost.seconds(1, 0, t.prompt) for t in job.turns)
        least = decode_s + math.fsum(t.gap_s for t in job.turns)
        if record.took_s < least * (1 - EXACT):
            found.append(f"{job.name} took {record.took_s:.3f} s, less than {least:.3f} s")
    return found


def equal_orders(pairs: Sequence[tuple[float, float]], apart: float = 0.05) -> bool:
    """True if all figures that really differ by more than ``apart`` are simulated in their order.

    Args:
        pairs: real and simulated figures.
    """
    for real_a, sim_a in pairs:
        for real_b, sim_b in pairs:
            if real_a > real_b * (1 + apart) and sim_a <= sim_b:
                return False
    return True


# -- a real server ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    """One kind of server: mean completion times, seconds."""

    server: str
    real_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        return self.simulated_s / self.real_s - 1


def fit(alone: Run, beside: Run, begin: Machine) -> Machine:
    """Return ``begin`` with the costs found in two runs of a stock server.

    Args:
        alone: one job at a time. beside: several concurrently.

    Raises:
        ValueError: a job did not finish, or there are too few turns.
    """
    for job in (*alone.jobs, *beside.jobs):
        if job.error is not None:
            raise ValueError(f"{job.name} did not finish: {job.error}")
    found = fit_runs(alone, beside)
    return replace(begin, cost=found.cost, overhead_s=max(LEAST_OVERHEAD_S, found.overhead_s))


def compare(
    traces: Path, folder: Path, tell: Callable[[str], None], *, resume: bool
) -> tuple[Machine, list[Compared], list[str]]:
    """Run everything for real, then simulate it; see ``validate``.

    Returns:
        The fitted machine, the servers, and reasons to doubt the real runs.
    """
    from transformers import AutoTokenizer

    model = small_model()
    known = calibration_jobs(seed=0)
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    recorded = mini_swe_jobs(
        traces, tokenizer, count=JOBS, turns=TURNS, seed=0, longest=longest_context(POOL_TOKENS)
    )
    jobs = recorded.jobs

    plan = {"jobs": digest(jobs), "known": digest(known), "versions": versions()}
    ledger = Ledger(folder / "real", plan, resume=resume)
    kept = []
    for load, rate, some in (("alone", None, known[:ALONE]), ("beside", CALIBRATION_RATE, known)):
        tell(f"calibration, {load}")
        (stock,) = _kinds(some, [STOCK], model)
        kept.append(_real(stock, some, rate, load, folder, ledger))
    fitted = fit(kept[0].run, kept[1].run, _machine(known))

    kinds = _kinds(jobs, list(SIMULATED), model)
    compared = []
    for kind in kinds:
        tell(kind.name)
        kept.append(_real(kind, jobs, RATE, PRESSURE, folder, ledger))
        run = kept[-1].run
        pool = (kind.options.kv_blocks or 0) * BLOCK
        place = replace(fitted, pool_tokens=pool, max_len=kind.options.max_model_len or 0)
        work = _simulated(jobs, arrivals(len(jobs), RATE, 0))
        outcome = simulate(place, SIMULATED[kind.name], work, Tiers(cpu=CPU_BYTES))
        real_s = [job.completion_s for job in run.jobs if job.error is None]
        if len(real_s) < len(jobs):
            raise ValueError(f"{kind.name} finished {len(real_s)} of {len(jobs)} jobs")
        mean_s = sum(real_s) / len(real_s)
        compared.append(Compared(kind.name, mean_s, outcome.summary()["mean_s"]))
    return fitted, compared, unequal(kept)


def calibration_jobs(seed: int) -> list[Job]:
    """Create jobs of random tokens whose prompts and answers have all lengths."""
    rng = np.random.default_rng(seed)

    def tokens(bounds: tuple[int, int]) -> tuple[int, ...]:
        return noise(int(np.exp(rng.uniform(*np.log(bounds)))))

    def noise(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(VOCABULARY, size=count).tolist())

    firsts = np.linspace(*FIRST, ALONE).astype(int).tolist()
    firsts += np.linspace(*FIRST, CALIBRATION_JOBS - ALONE).astype(int).tolist()
    jobs = []
    for number in range(CALIBRATION_JOBS):
        turns = []
        for at in range(CALIBRATION_TURNS):
            added = tokens(ADDED) if at else noise(firsts[number])
            gap_s = 0.1 if at + 1 < CALIBRATION_TURNS else 0.0
            turns.append(Turn(added, tokens(ANSWER), gap_s))
        jobs.append(Job(f"calibration-{number:02}", "", tuple(turns)))
    return jobs


def _kinds(jobs: Sequence[Job], names: Sequence[str], model: Path) -> list[Kind]:
    contexts = [job.context for job in jobs]
    made = make_kinds(model, size_for(contexts, POOL_TOKENS), policies=POLICIES, own_scheduler=True)
    limits = (
        f"--max-num-batched-tokens={BATCHED_TOKENS}",
        f"--max-num-seqs={MAX_SEQS}",
    )
    return [
        replace(
            kind,
            options=replace(kind.options, extra_args=(*kind.options.extra_args, *limits)),
        )
        for kind in made
        if kind.name in names
    ]


def _real(
    kind: Kind, jobs: Sequence[Job], rate: float | None, load: str, folder: Path, ledger: Ledger
) -> Kept:
    found = ledger.get(load, 0, kind.name)
    if not isinstance(found, Kept):
        workload = ReplayWorkload(tuple(jobs), len(jobs), 0, ReplayHints.KV_PARAMS, forced=True)
        found = Replay(workload, folder)(kind, load, 0, rate)
        ledger.put(load, 0, kind.name, found)
    return found


def _simulated(jobs: Sequence[Job], starts_s: Sequence[float]) -> Workload:
    """Convert replayed jobs into jobs for the simulator."""
    made = []
    for job, start_s in zip(jobs, starts_s, strict=True):
        turns, context = [], 0
        for turn in job.turns:
            turns.append(SimTurn(context, len(turn.added), len(turn.answer), turn.gap_s))
            context += len(turn.added) + len(turn.answer)
        made.append(SimJob(job.name, start_s, tuple(turns)))
    return Workload("replayed", tuple(made), Hints.RIGHT, BLOCK)


def _machine(jobs: Sequence[Job]) -> Machine:
    longest = max(job.context for job in jobs)
    return Machine(
        "this machine",
        POOL_TOKENS,
        KV_BYTES,
        longest + 2 * BLOCK,
        UNKNOWN,
        LINK,
        batched_tokens=BATCHED_TOKENS,
        max_seqs=MAX_SEQS,
        overhead_s=0.01,
    )
