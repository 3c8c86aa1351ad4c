"""Cells: single runs of a server on a machine, carried out in processes and stored in files.

A cell describes its run completely: with the same code, the same cell yields the same figures.
Therefore a stored result is reused instead of repeating the run.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import multiprocessing
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import tiered_kv.bench.sim
import tiered_kv.connectors
import tiered_kv.policies
from tiered_kv.bench.sim.engine.machines import GIB, Machine, Tiers, machine
from tiered_kv.bench.sim.servers.servers import server
from tiered_kv.bench.sim.workloads.generate import generate
from tiered_kv.bench.sim.workloads.recorded import coding_agents
from tiered_kv.bench.sim.workloads.workload import SimJob, Workload

CODING_AGENTS = "coding-agents"
FAMILIES = "families"
"""Name of the workload of coding agents that start sub-agents."""
RECORDED = (CODING_AGENTS, FAMILIES)
LEFT_OUT = "left_out_"
"""Prefix of the figures that count sessions and turns left out of a workload."""
GC_THRESHOLDS = 50_000, 20, 100
"""Thresholds that make Python's cycle collector run rarely, because a run has few cycles and many
objects."""

Summary = Mapping[str, float]
Key = TypeVar("Key", bound=Hashable)


@cache
def code_digest(outside: frozenset[str] = frozenset()) -> str:
    """Return a digest of the code that a run depends on: this project and vLLM's version.

    Args:
        outside: names of further modules to include.
    """
    import vllm

    digest = hashlib.sha256(vllm.__version__.encode())
    for package in (tiered_kv.bench.sim, tiered_kv, tiered_kv.policies, tiered_kv.connectors):
        for folder in package.__path__:
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    for name in sorted(outside):
        digest.update(Path(str(importlib.import_module(name).__file__)).read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Place:
    """Hardware, model and the tiers below VRAM.

    Attributes:
        pool_tokens: size of the KV pool; None uses the VRAM that the weights leave free.
        batched_tokens, max_seqs, long_prefill: see ``Machine``; 0 uses the machine's defaults.
    """

    gpu: str
    model: str
    ranks: int = 1
    pool_tokens: int | None = None
    cpu_gib: float = 64.0
    ssd_gib: float = 512.0
    batched_tokens: int = 0
    max_seqs: int = 0
    long_prefill: int = 0
    prefix_caching: bool = True

    def machine(self) -> Machine:
        """Return the machine to simulate.

        Raises:
            ValueError: unknown GPU or model, or the model does not fit.
        """
        made = machine(self.gpu, self.model, ranks=self.ranks, pool_tokens=self.pool_tokens)
        return replace(
            made,
            batched_tokens=self.batched_tokens or made.batched_tokens,
            max_seqs=self.max_seqs or made.max_seqs,
            long_prefill=self.long_prefill,
            prefix_caching=self.prefix_caching,
        )

    @property
    def name(self) -> str:
        return f"{self.gpu}x{self.ranks}" if self.ranks > 1 else self.gpu


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a run's jobs.

    Attributes:
        workload: name of a generated workload, or one of ``RECORDED``.
        jobs: number of jobs.
        traces: file of the recorded sessions; empty for generated workloads.
    """

    workload: str
    jobs: int
    traces: str = ""

    def jobs_for(self, place: Machine, seed: int) -> Workload:
        """Return the jobs for a seed, without jobs that do not fit on the machine. ``FAMILIES`` has
        only jobs that start sub-agents.
        """
        made = self.workload not in RECORDED
        every = (
            generate(self.workload, self.jobs, seed) if made else coding_agents(Path(self.traces))
        )
        apart = place.beside(place.block or every.block)
        fit = every.that_fit(place.pool_tokens - 2 * apart, place.max_len)
        if self.workload == FAMILIES:
            families = (job for job in fit.jobs if any(turn.agents for turn in job.turns))
            fit = replace(fit, jobs=tuple(families))
        if made or not fit.jobs:
            return fit
        # Each seed starts at a different session of the recording.
        first, count = seed * self.jobs, len(fit.jobs)
        numbers = range(self.jobs)
        jobs = (_copied(fit.jobs[(first + at) % count], at // count) for at in numbers)
        return replace(fit, jobs=tuple(jobs))


def _copied(job: SimJob, copy: int) -> SimJob:
    """Rename a copy of a job and its sub-agents. Copy 0 is the job itself."""
    if not copy:
        return job
    turns = (
        replace(turn, agents=tuple(_copied(agent, copy) for agent in turn.agents))
        for turn in job.turns
    )
    return replace(job, name=f"{job.name}~{copy}", turns=tuple(turns))


@dataclass(frozen=True, slots=True)
class Cell:
    """A single run: a server on a machine, its jobs, and their arrival rate."""

    place: Place
    source: Source
    server: str
    jobs_per_s: float
    seed: int

    @classmethod
    def of(
        cls, place: Place, source: Source, server_name: str, jobs_per_s: float, seed: int
    ) -> Cell:
        """Return the cell of a run. Sizes of tiers that the server lacks are set to 0, so that they
        do not distinguish cells.

        Raises:
            ValueError: there is no such server.
        """
        tiers = server(server_name)
        place = replace(
            place,
            cpu_gib=place.cpu_gib if tiers.cpu else 0.0,
            ssd_gib=place.ssd_gib if tiers.ssd else 0.0,
        )
        return cls(place, source, server_name, jobs_per_s, seed)

    @property
    def key(self) -> str:
        """Name of the result's file, without its suffix. It changes with the code, including the
        code of a policy or eviction rule from another package.
        """
        said = json.dumps([asdict(self), code_digest(server(self.server).outside)], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:24]

    def run(self) -> dict[str, float]:
        """Simulate the run. Returns the outcome's summary, and counts of sessions and turns left
        out.

        Raises:
            ValueError: no job fits on the machine.
        """
        from tiered_kv.bench.sim.engine.driver import simulate

        place = self.place.machine()
        workload = self.source.jobs_for(place, self.seed)
        if not workload.jobs:
            raise ValueError(f"no job of {self.source.workload} fits into {self.place.name}")
        tiers = Tiers(self.place.cpu_gib * GIB, self.place.ssd_gib * GIB)
        timed = workload.at(self.jobs_per_s, self.seed)
        outcome = simulate(place, server(self.server), timed, tiers)
        left_out = {
            f"{LEFT_OUT}{reason}_{what}": float(count)
            for reason, one in workload.left_out.items()
            for what, count in asdict(one).items()
        }
        return {**outcome.summary(), "dropped": float(workload.dropped), **left_out}

    def result(self, folder: Path) -> Summary:
        """Return this cell's result from the folder. If the folder does not have it, simulate the
        run and store its result.
        """
        path = folder / f"{self.key}.json"
        if not path.exists():
            part = path.with_suffix(".part")
            part.write_text(json.dumps({"cell": asdict(self), "summary": self.run()}))
            part.replace(path)
        found: Summary = json.loads(path.read_text())["summary"]
        return found


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs cells in separate processes.

    Attributes:
        folder: folder of the results.
        on_done: called with every cell once its result exists.
    """

    processes: Executor
    folder: Path
    on_done: Callable[[Cell], None]

    def run(self, wanted: Mapping[Key, Sequence[Cell]]) -> dict[Key, list[Summary]]:
        """Run the cells of each key, or read their stored results. Completed runs are kept after an
        interrupt.
        """
        cells = dict.fromkeys(cell for some in wanted.values() for cell in some)
        futures = {self.processes.submit(cell.result, self.folder): cell for cell in cells}
        found = dict[Cell, Summary]()
        try:
            for future in as_completed(futures):
                found[futures[future]] = future.result()
                self.on_done(futures[future])
        finally:
            for future in futures:
                future.cancel()
        return {key: [found[cell] for cell in some] for key, some in wanted.items()}


@contextmanager
def running(
    processes: int, folder: Path, on_done: Callable[[Cell], None] = lambda _: None
) -> Iterator[Bench]:
    """Start worker processes that run up to ``processes`` cells concurrently; see ``Bench``."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_prepare_process) as pool:
        yield Bench(pool, folder, on_done)


def means(results: Sequence[Summary]) -> dict[str, float]:
    """Return the mean of each figure over runs."""
    return {name: sum(one[name] for one in results) / len(results) for name in results[0]}


def _prepare_process() -> None:
    """Import vLLM once per process, because the import takes longer than a run, and exclude its
    objects from garbage collection.
    """
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["OMP_NUM_THREADS"] = "1"
    importlib.import_module("tiered_kv.bench.sim.engine.driver")
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
