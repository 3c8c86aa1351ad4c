"""The load: jobs begin as they arrive, or as soon as another ends, and play their turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from tiered_kv.bench.replay.results import JobDone, TurnDone
from tiered_kv.bench.sim.workloads.workload import SimJob, SimTurn

from .chat_client import Asked, ChatClient
from .conversation import Conversation
from .filler import filler
from .live_jobs import copied, copies


class Arriving(Enum):
    """Way in which jobs begin."""

    JPS = "jps"
    """Poisson arrivals, so many jobs a second."""
    SESSIONS = "sessions"
    """A number of live jobs: another begins when one ends."""


@dataclass(frozen=True, slots=True)
class Load:
    """A load on a server.

    Attributes:
        level: jobs a second, or live sessions.
        seconds: for so long jobs begin; those that have begun are played to their end.
    """

    arriving: Arriving
    level: float
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.arriving.value} {self.level:g}"


@dataclass(frozen=True, slots=True)
class Material:
    """Material for what jobs say.

    Attributes:
        nonce: of one run. No prompt of it shares its beginning with one of another run, or the
            second run of a server would find the first one's pages.
        words_per_token: of the text that is made up.
        texts: by a job's name, the text that each turn adds, where a recording has it.
    """

    nonce: str
    words_per_token: float
    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def added(self, job: SimJob, at: int) -> str:
        """Text that a turn adds to its job's context; copies of a job say something else."""
        texts = self.texts.get(job.name) or self.texts.get(copied(job.name))
        if texts is not None:
            said = texts[at]
            return said if job.turns[at].shared else f"{self.nonce} {job.name} {said}"
        turn = job.turns[at]
        # What jobs share stands first, and is the same for all of them in one run.
        shared = job.prefix_tokens if at == 0 and job.prefix else 0
        parts = [
            self._words(f"{self.nonce}/{job.prefix}", shared),
            self._words(f"{self.nonce}/{job.name}/{at}", turn.added - shared),
        ]
        return " ".join(part for part in parts if part) or self.nonce

    def _words(self, key: str, tokens: int) -> str:
        return filler(key, round(tokens * self.words_per_token))


@dataclass(frozen=True, slots=True)
class Played:
    """Jobs of a run, and the sub-agents that they started, in order of their beginnings.

    Attributes:
        tells_cached: the server told what it had of prompts.
    """

    jobs: tuple[JobDone, ...]
    agents: tuple[JobDone, ...]
    tells_cached: bool


class LivePlayer:
    """Plays jobs against one server, once."""

    def __init__(
        self,
        client: ChatClient,
        material: Material,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._material = material
        self._on_turn = on_turn
        self._began = time.perf_counter()
        self._jobs: list[JobDone] = []
        self._agents: list[JobDone] = []
        self._tells_cached = False

    async def play(self, jobs: tuple[SimJob, ...], load: Load, seed: int) -> Played:
        """Play a load to its end. A job that fails ends with its error; the others go on."""
        self._began = time.perf_counter()
        order = np.random.default_rng([seed, 2]).permutation(len(jobs))
        line = copies(tuple(jobs[at] for at in order))
        if load.arriving is Arriving.JPS:
            starts = arrivals_s(load.level, load.seconds, seed)
            waiting = zip(starts, line, strict=False)
            await _all(self._later(at_s, job) for at_s, job in waiting)
        else:
            await _all(self._one_by_one(line, load.seconds) for _ in range(round(load.level)))
        return Played(_by_begin(self._jobs), _by_begin(self._agents), self._tells_cached)

    def _now_s(self) -> float:
        return time.perf_counter() - self._began

    async def _later(self, at_s: float, job: SimJob) -> None:
        await asyncio.sleep(at_s - self._now_s())
        self._jobs.append(await self.job(job))

    async def _one_by_one(self, line: Iterator[SimJob], seconds: float) -> None:
        while True:
            self._jobs.append(await self.job(next(line)))
            if self._now_s() >= seconds:
                return

    async def job(self, job: SimJob) -> JobDone:
        """Play one job now."""
        began_s = self._now_s()
        turns: list[TurnDone] = []
        error = None
        talk = Conversation()
        for at, turn in enumerate(job.turns):
            if at:
                before = job.turns[at - 1]
                talk.keep(turn.shared / (before.prompt + before.output))
            talk.ask(self._material.added(job, at))
            try:
                turns.append(await self._turn(job, at, turn, talk))
            except Exception as failure:
                error = f"turn {at + 1}: {failure!r}"
                break
            agents = await asyncio.gather(*map(self.job, turn.agents))
            self._agents.extend(agents)
            await asyncio.sleep(turn.gap_s)
        return JobDone(job.name, began_s, self._now_s(), tuple(turns), error)

    async def _turn(self, job: SimJob, at: int, turn: SimTurn, talk: Conversation) -> TurnDone:
        sent_s = self._now_s()
        last = at + 1 == len(job.turns)
        named = f"{self._material.nonce}-{job.name}"
        asked = Asked(named, last, max(1, turn.output), turn.tool, turn.tool_name)
        told = await self._client.turn(talk, asked)
        talk.answered(told.text)
        self._tells_cached |= told.cached is not None
        self._on_turn()
        return TurnDone(
            turn=at + 1,
            sent_s=sent_s,
            ttft_s=told.first_s,
            latency_s=told.last_s,
            prompt_tokens=told.prompt_tokens,
            cached_tokens=told.cached or 0,
            output_tokens=told.output_tokens,
        )


def arrivals_s(jobs_per_s: float, seconds: float, seed: int) -> list[float]:
    """Beginnings of jobs, a Poisson process from 0 on, all before ``seconds``.

    One seed gives the same process at every rate, only closer together.
    """
    rng = np.random.default_rng([seed, 1])
    times = [0.0]
    while times[-1] < seconds:
        times.append(times[-1] + float(rng.exponential(1 / jobs_per_s)))
    return times[:-1]


def _by_begin(jobs: Iterable[JobDone]) -> tuple[JobDone, ...]:
    return tuple(sorted(jobs, key=lambda job: (job.began_s, job.name)))


async def _all(parts: Iterable[Coroutine[None, None, None]]) -> None:
    """Run parts until all are done; if this is cancelled, so are they."""
    async with asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(part)
