"""One run's description, and carrying it out: in processes of their own, each run kept in a file.

A run is told by its cell alone, so the same cell always gives the same figures under the same code,
and one that was kept need not be run again.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import tiered_kv.bench.forecast
import tiered_kv.bench.sim
import tiered_kv.connectors
import tiered_kv.policies
from tiered_kv.bench.sim.engine.machines import Machine, machine
from tiered_kv.bench.sim.servers.servers import server
from tiered_kv.bench.sim.workloads.generate import generate
from tiered_kv.bench.sim.workloads.recorded import coding_agents
from tiered_kv.bench.sim.workloads.workload import Workload

CODING_AGENTS = "coding-agents"
LEFT_OUT = "left_out_"
"""Begin of the names of figures that tell what was left out."""
GIB = 1 << 30
GC_THRESHOLDS = 50_000, 20, 100
"""Python looks for cycles less often than usual: a run makes few, and many objects."""

Summary = Mapping[str, float]


@cache
def code_digest(outside: frozenset[str] = frozenset()) -> str:
    """Digest of what a run's figures depend on beside its cell: our code, and vLLM's version.

    Args:
        outside: names of further modules.
    """
    import vllm

    digest = hashlib.sha256(vllm.__version__.encode())
    simulator = (tiered_kv.bench.sim, tiered_kv.bench.forecast)
    for package in (*simulator, tiered_kv, tiered_kv.policies, tiered_kv.connectors):
        for folder in package.__path__:
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    for name in sorted(outside):
        digest.update(Path(str(importlib.import_module(name).__file__)).read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Place:
    """Hardware, model and the tiers beside VRAM.

    Attributes:
        pool_tokens: of the KV pool; None: what the weights leave.
        batched_tokens, max_seqs, long_prefill: see ``Machine``; 0: its own.
        prefix_caching: False turns it off.
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
    """Source of jobs.

    Attributes:
        workload: name of a generated one, or ``coding-agents``, which are read from ``traces``.
        jobs: how many.
    """

    workload: str
    jobs: int
    traces: str = ""

    def jobs_for(self, place: Machine, seed: int) -> Workload:
        """The jobs of a seed that fit into a machine."""
        generated = self.workload != CODING_AGENTS
        made = (
            generate(self.workload, self.jobs, seed)
            if generated
            else coding_agents(Path(self.traces))
        )
        block = place.block or made.block
        fit = made.that_fit(place.pool_tokens - 2 * place.beside(block), place.max_len)
        if generated:
            return fit
        if not fit.jobs:
            return fit
        # Other sessions of the record for every seed.
        first = seed * self.jobs % len(fit.jobs)
        ring = fit.jobs[first:] + fit.jobs[:first]
        jobs = tuple(
            _named(ring[number % len(ring)], number // len(ring)) for number in range(self.jobs)
        )
        return replace(fit, jobs=jobs)


def _named(job: Any, copy: int) -> Any:
    """A copy under a name of its own, its sub-agents too."""
    if not copy:
        return job
    turns = tuple(
        replace(turn, agents=tuple(_named(agent, copy) for agent in turn.agents))
        for turn in job.turns
    )
    return replace(job, name=f"{job.name}~{copy}", turns=turns)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: what arrives where, how fast.

    Attributes:
        jobs_per_s: arrival rate.
    """

    place: Place
    source: Source
    server: str
    jobs_per_s: float
    seed: int

    @classmethod
    def of(
        cls, place: Place, source: Source, server_name: str, jobs_per_s: float, seed: int
    ) -> Cell:
        """The cell; servers without a tier have the same however large it is.

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
        """Name of its file: another one once the code has changed, ours or that of a policy or
        rule from elsewhere."""
        said = json.dumps([asdict(self), code_digest(server(self.server).outside)], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:24]

    def run(self) -> dict[str, float]:
        """Simulate; returns the outcome's summary, with the sessions and turns left out."""
        from tiered_kv.bench.sim.engine.driver import Tiers, simulate

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


class Bench:
    """Runs cells on so many processes, and keeps what they gave.

    Args:
        folder: of the results; None keeps none.
        tell: told of every cell that is done.
    """

    def __init__(
        self,
        processes: int,
        folder: Path | None,
        tell: Callable[[Cell], None] = lambda _: None,
    ) -> None:
        self._folder = folder
        self._tell = tell
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, context, initializer=_get_ready)

    def run(self, cells: Iterable[Cell]) -> dict[Cell, dict[str, float]]:
        """All of them. Those that are kept are read; an interrupt keeps what was run."""
        wanted = list(dict.fromkeys(cells))
        found: dict[Cell, dict[str, float]] = {}
        for cell in wanted:
            known = self._kept(cell)
            if known is not None:
                found[cell] = known
                self._tell(cell)
        futures = {self._pool.submit(_run, cell): cell for cell in wanted if cell not in found}
        try:
            for future in as_completed(futures):
                cell = futures[future]
                found[cell] = future.result()
                self._keep(cell, found[cell])
                self._tell(cell)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return {cell: found[cell] for cell in wanted}

    def _path(self, cell: Cell) -> Path | None:
        return None if self._folder is None else self._folder / f"{cell.key}.json"

    def _kept(self, cell: Cell) -> dict[str, float] | None:
        path = self._path(cell)
        if path is None or not path.exists():
            return None
        try:
            said = json.loads(path.read_text())
            found: dict[str, float] = said["summary"]
        except (ValueError, KeyError, TypeError):  # it is run again
            return None
        return found

    def _keep(self, cell: Cell, summary: Summary) -> None:
        path = self._path(cell)
        if path is None:
            return
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"cell": asdict(cell), "summary": summary}))
        part.replace(path)

    def close(self) -> None:
        """Stop the processes. Idempotent."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def means(results: Sequence[Summary]) -> dict[str, float]:
    """Mean of each figure over runs."""
    return {name: sum(one[name] for one in results) / len(results) for name in results[0]}


def _get_ready() -> None:
    """In each process, once: what is imported takes longer than a run, and is never garbage."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["OMP_NUM_THREADS"] = "1"
    importlib.import_module("tiered_kv.bench.sim.engine.driver")
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _run(cell: Cell) -> dict[str, float]:
    return cell.run()
