"""Runs every load on every running server, in rounds. Each run is stored when it ends."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from tiered_kv.bench.agents.paired import drawn_order
from tiered_kv.bench.agents.player import OnTurn
from tiered_kv.bench.agents.results import Kept, Run
from tiered_kv.bench.agents.run_files import Ledger
from tiered_kv.bench.sim.workloads.workload import SimJob

from .live_jobs import LiveJobs, Unit, copies, fitting
from .servers import NONCE_BYTES, LiveError, Sizes, Target, since
from .texts import Texts

SAMPLE_CHARACTERS = 4_000
"""Length of the sample of recorded text whose tokens each server counts, characters."""
MARGIN = 0.95
"""Fraction of a server's context limit that jobs may use, because text sizes are estimates."""


class Arriving(Enum):
    """Rule for the start times of jobs."""

    JPS = "jps"
    """Poisson arrivals, at a rate in jobs per second."""
    SESSIONS = "sessions"
    """A fixed number of concurrent jobs: when one ends, another starts."""


@dataclass(frozen=True, slots=True)
class Load:
    """A load on a server.

    Attributes:
        arriving: how jobs start.
        level: jobs per second, or number of concurrent jobs.
        seconds: duration of the period in which jobs start. All jobs are played to their end.
    """

    arriving: Arriving
    level: float
    seconds: float

    @property
    def name(self) -> str:
        """Name of the load in the results. ``level_of`` parses it."""
        return f"{self.arriving.value} {self.level:g}"


def level_of(load: str) -> tuple[str, float]:
    """Parse the name of a load. Returns the value of ``Load.arriving``, and the level.

    Raises:
        ValueError: ``load`` is not the name of a load.
    """
    how, _, level = load.partition(" ")
    return Arriving(how).value, float(level)


@dataclass(slots=True, kw_only=True)
class Rounds:
    """Runs of several loads on several servers.

    Attributes:
        targets: the servers.
        jobs: jobs to play. ``prepare`` truncates them to the limits of all servers.
        rounds: number of runs per server and load.
        seed: seed of the arrivals, of the order of jobs, and of the order of servers.
        scale: factor for all sizes.
        turns: maximum turns per job; None means all.
        longest: maximum context length, tokens; None uses only the servers' limits.
        report: called with the name of each run before it starts.
    """

    targets: Sequence[Target]
    loads: Sequence[Load]
    jobs: LiveJobs
    rounds: int
    seed: int
    scale: float
    turns: int | None
    longest: int | None
    ledger: Ledger
    report: Callable[[str], None]
    on_turn: OnTurn
    _runs: list[Run] = field(init=False, default_factory=list)
    _sizes: dict[str, Sizes] = field(init=False, default_factory=dict)

    @property
    def total(self) -> int:
        """Total number of runs."""
        return len(self.targets) * len(self.loads) * self.rounds

    @property
    def runs(self) -> list[Run]:
        """Completed runs, sorted by load, by round, and by the order of ``targets``."""
        loads = [load.name for load in self.loads]
        names = [target.name for target in self.targets]
        return sorted(
            self._runs,
            key=lambda run: (loads.index(run.load), run.round, names.index(run.server)),
        )

    def prepare(self) -> None:
        """Measure text sizes on each server, truncate the jobs to the limits of all servers, and
        play the first two turns of one job on each server as a warm-up.

        Raises:
            LiveError: a server cannot be measured, or does not finish the warm-up.
            ValueError: no job fits.
        """
        sample = " ".join(
            text for job in self.jobs.jobs for text in self.jobs.texts.get(job.name, ())
        )[:SAMPLE_CHARACTERS]
        for target in self.targets:
            self._sizes[target.name] = asyncio.run(target.measure_sizes(sample))
        sizes = self._sizes.values()
        limits = [MARGIN * one.longest for one in self.targets if one.longest is not None]
        if self.longest is not None:
            limits.append(float(self.longest))
        per_unit = self.scale
        if self.jobs.unit is Unit.CHARACTERS:
            per_unit *= max(one.tokens_a_character for one in sizes)
        most_turns = max(len(job.turns) for job in self.jobs.jobs)
        messages = 2 * min(self.turns or most_turns, most_turns)
        spare = messages * max(one.tokens_a_message for one in sizes)
        self.jobs = fitting(
            self.jobs,
            tokens_per_unit=per_unit,
            most_tokens=int(min(limits) - spare) if limits else None,
            turns=self.turns,
        )
        job = self.jobs.jobs[0]
        first = replace(job, turns=tuple(replace(one, gap_s=0.0) for one in job.turns[:2]))
        alone = Load(Arriving.SESSIONS, 1, 0)
        for target in self.targets:
            (done,) = asyncio.run(self._play(target, alone, 0, (first,))).jobs
            if done.error is not None:
                raise LiveError(f"{target.name} did not finish the warm-up job: {done.error}")

    def run_all(self) -> None:
        """Measure every load on every server, in every round. Runs that the ledger already has are
        not repeated. After an interrupt, completed runs are kept.

        Raises:
            LiveError: a server finished no job of a run.
            RunFileError: a stored run cannot be read.
        """
        for load in self.loads:
            for number in range(self.rounds):
                for target in drawn_order(self.targets, self.seed, number):
                    self._runs.append(self._one(target, load, number))

    def _one(self, target: Target, load: Load, number: int) -> Run:
        def measure() -> Kept:
            self.report(f"{load.name}, round {number + 1}, {target.name}")
            before = target.counts()
            run = asyncio.run(self._play(target, load, number, self.jobs.jobs))
            if not run.finished:
                raise LiveError(f"{target.name} finished no job: {run.jobs[0].error}")
            return Kept(replace(run, counts=since(before, target.counts())))

        found = self.ledger.get_or_measure(load.name, number, target.name, measure)
        if isinstance(found, str):
            raise LiveError(found)
        return found.run

    async def _play(self, target: Target, load: Load, number: int, jobs: tuple[SimJob, ...]) -> Run:
        nonce, seed = secrets.token_hex(NONCE_BYTES), self.seed + number
        recorded = self.jobs.texts if self.scale == 1 else {}
        texts = Texts(nonce, self._sizes[target.name].words_per_token, recorded)
        order = np.random.default_rng([seed, 2]).permutation(len(jobs))
        line = map(texts.job, copies(tuple(jobs[at] for at in order)))
        async with target.player(nonce, self.on_turn) as player:
            if load.arriving is Arriving.JPS:
                starts = arrivals_s(load.level, load.seconds, seed)
                done = await player.arriving(zip(starts, line, strict=False))
            else:
                done = await player.live(line, round(load.level), load.seconds)
            agents = sorted(player.agents, key=lambda job: (job.began_s, job.name))
            rate = len(done) / max(job.ended_s for job in done)
            return Run(
                target.name,
                load.name,
                number,
                seed,
                load.level if load.arriving is Arriving.JPS else rate,
                done,
                agents=tuple(agents),
                reports_cached=player.reports_cached,
            )


def arrivals_s(jobs_per_s: float, seconds: float, seed: int) -> list[float]:
    """Return the start times of jobs before ``seconds``: a Poisson process that starts at 0.

    With the same seed, the arrivals at different rates differ only by a time factor.
    """
    rng = np.random.default_rng([seed, 1])
    times = [0.0]
    while times[-1] < seconds:
        times.append(times[-1] + float(rng.exponential(1 / jobs_per_s)))
    return times[:-1]
