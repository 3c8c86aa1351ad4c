"""The simulator against a real server: calibrated on one trace, compared on another.

Both get the same jobs at the same times, and a pool of the same size. What a step costs is fitted
to the turns of two runs of made-up jobs of all lengths on stock vLLM, one without and one with
others beside; then recorded jobs of mini-swe-agent are run on every kind of server, really and
simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tiered_kv.bench.replay.ab import digest, unequal
from tiered_kv.bench.replay.jobs import Job, Turn, arrivals, mini_swe_jobs
from tiered_kv.bench.replay.kinds import Kind, longest_context, make_kinds, size_for
from tiered_kv.bench.replay.ledger import Kept, Ledger
from tiered_kv.bench.replay.measure import Replay, versions
from tiered_kv.bench.replay.measure import Workload as ReplayWorkload
from tiered_kv.bench.replay.names import BOUND, PRESSURE, STOCK, TIERED
from tiered_kv.bench.replay.play.drive import Hints as ReplayHints
from tiered_kv.bench.servers.model import small_model
from tiered_kv.bench.sim.engine.driver import Tiers, simulate
from tiered_kv.bench.sim.engine.machines import Machine
from tiered_kv.bench.sim.servers.servers import Server, server
from tiered_kv.bench.sim.workloads.workload import Hints, SimJob, SimTurn, Workload
from tiered_kv.sizing.step_cost import StepCost

from .calibrate import fit

BLOCK = 32
POOL_TOKENS = 12_800
BATCHED_TOKENS, MAX_SEQS = 2_048, 64
"""Told to the real server as well."""
VOCABULARY = 40_000
KV_BYTES = 30 * 2 * 3 * 64 * 2
"""Bytes of a token of SmolLM2-135M: layers, K and V, heads, their size, bf16."""
LINK = 4e9
"""Bytes a second of copies between two places of the same memory."""
CALIBRATION_JOBS, CALIBRATION_TURNS, ALONE = 12, 4, 5
FIRST, ADDED, ANSWER = (200, 3_400), (20, 300), (40, 140)
"""Tokens of calibration jobs. First prompts are spread evenly over their range, the shortest and
the longest among those that run alone; the rest is log-uniform."""
JOBS, TURNS = 12, 6
CALIBRATION_RATE, RATE = 0.5, 0.2
"""Jobs a second. Of the second, stock vLLM with this pool is about three times as slow as alone."""
CPU_BYTES = 4 * 2**30
UNKNOWN = StepCost(step=0.0, weights=0.0, token=0.0, pair=0.0, kv=0.0, seq=0.0)

SIMULATED = {
    STOCK: server("fcfs"),
    BOUND: server("fcfs"),
    TIERED: server("occupancy-alone+cpu"),
    f"{TIERED}-lru": server("lru+cpu"),
    f"{TIERED}-continuum-fixed": Server("continuum-fixed+cpu", "continuum-fixed", cpu=True),
}
"""The kinds of servers, and what stands for them: all take requests in the order they come."""
POLICIES = ("lru", "continuum-fixed")


@dataclass(frozen=True, slots=True)
class Compared:
    """One kind of server: mean completion times, seconds."""

    server: str
    real_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        return self.simulated_s / self.real_s - 1


def compare(
    traces: Path, folder: Path, tell: Callable[[str], None], *, resume: bool
) -> tuple[Machine, list[Compared], list[str]]:
    """Run everything for real, then simulate it.

    Args:
        folder: keeps the real runs. resume: take those that are there.

    Returns:
        The machine that was fitted, the servers, and reasons to doubt the real runs.

    Raises:
        what ``bench.replay`` raises when a server cannot be run or the traces not read.
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
    """Jobs of random tokens whose prompts and answers are of all lengths."""
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
    """The same jobs for the simulator."""
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
