"""Jobs: the turns that belong together, and what was said about them.

The notebook tells of jobs that an earlier engine knew: how many turns each has had, and since when.
A job is noted at the end of every turn. One that its client names is looked up when it comes back;
names and salts are noted as digests. One that was inferred is found by its prompt, so all of these
are taken over at once, but for those with a salt, which may be a secret.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count, islice
from operator import attrgetter

from tiered_kv.policies.base import Decision, JobKey
from tiered_kv.policies.jobs.lineage import Lineage
from tiered_kv.storage.notebook import Fact, NoNotebook

MAX_JOBS = 65_536
"""Jobs remembered. Of more, the least recently heard of is forgotten: it never said it was over."""

_NUMBER = attrgetter("number")


@dataclass(slots=True)
class Job:
    """A job that has been seen. Written by ``JobTable``.

    Attributes:
        number: 1 for the first job that was seen; a job that was forgotten gets another.
        started_at: arrival of its first turn, or of the first after it was taken to have ended;
            seconds on the scheduler's clock.
        first_blocks: blocks of its first prompt, which other jobs may begin with as well.
        turns: turns arrived so far.
        running: ids of its requests that have not finished.
        over: True if the client said that no turn follows those that are running.
        decided: the decision of its last gap that is over, without the forecast; None before.
    """

    key: JobKey
    number: int
    started_at: float
    first_blocks: int
    turns: int = 0
    running: set[str] = field(default_factory=set)
    over: bool = False
    decided: Decision | None = None


class JobTable:
    """Jobs by key, least recently heard of first. One thread.

    Attributes:
        on_forgotten: called with the key of each job that is forgotten.
    """

    def __init__(self) -> None:
        self.on_forgotten: Callable[[JobKey], None] = lambda _: None
        self._jobs: OrderedDict[JobKey, Job] = OrderedDict()
        self._listed: list[Job] = []  # by number
        self._salted: dict[str, dict[JobKey, None]] = {}  # those with a salt, by name
        self._count = count(1)

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, key: JobKey) -> Job | None:
        """The job of that key; None if there is none."""
        return self._jobs.get(key)

    def turn_arrived(self, key: JobKey, request_id: str, now: float, blocks: int) -> Job:
        """The job of a new turn, made if it is the first.

        Args:
            blocks: blocks of its prompt.
        """
        job = self._jobs.get(key)
        if job is None:
            job = self._enter(Job(key, next(self._count), now, blocks))
        self._jobs.move_to_end(key)
        job.turns += 1
        job.over = False
        job.running.add(request_id)
        return job

    def adopt(self, key: JobKey, now: float, blocks: int, turns: int) -> Job:
        """The job of that key, made if there is none, as one that has had so many turns.

        Args:
            blocks: blocks of its context.
        """
        job = self._jobs.get(key)
        if job is None:
            job = self._enter(Job(key, next(self._count), now, blocks))
        self._jobs.move_to_end(key)
        job.turns, job.over = turns, False
        return job

    def turn_ended(self, job: Job, request_id: str, *, over: bool) -> None:
        """End a turn; ``over`` if the client said that none follows."""
        job.running.discard(request_id)
        job.over = job.over or over
        if job.over and not job.running and self._jobs.get(job.key) is job:
            self._forget(job)

    def turn_lost(self, job: Job, request_id: str) -> None:
        """Forget a turn whose end could not be handled: it would run for ever."""
        job.running.discard(request_id)

    def gap_ended(self, job: Job, decision: Decision) -> None:
        """Keep what was decided for a gap that is over."""
        job.decided = replace(decision, forecast=None)

    def begin_anew(self, job: Job, now: float) -> None:
        """Give the job the youngest place: its room went to others, and so did its place."""
        job.started_at = now

    def named(self, name: str, most: int) -> list[Job]:
        """Jobs of that name, at most so many: the one without a salt first."""
        keys = (JobKey("", name), *islice(self._salted.get(name, ()), most))
        return [self._jobs[key] for key in keys if key in self._jobs][:most]

    def after(self, number: int, most: int) -> list[Job]:
        """The first jobs, at most so many, that were seen after the one with that number. Takes no
        longer where there are more."""
        at = bisect_right(self._listed, number, key=_NUMBER)
        return self._listed[at : at + most]

    def _enter(self, job: Job) -> Job:
        self._jobs[job.key] = job
        self._listed.append(job)
        if job.key.salt:
            self._salted.setdefault(job.key.name, {})[job.key] = None
        if len(self._jobs) > MAX_JOBS:
            self._forget(next(iter(self._jobs.values())))
        return job

    def _forget(self, job: Job) -> None:
        del self._jobs[job.key]
        del self._listed[bisect_left(self._listed, job.number, key=_NUMBER)]
        if job.key.salt:
            named = self._salted[job.key.name]
            del named[job.key]
            if not named:
                del self._salted[job.key.name]
        self.on_forgotten(job.key)


logger = logging.getLogger(__name__)

NOTE_PREFIX = "job "


class KnownJobs:
    """Notes jobs, and brings them back. One thread.

    Args:
        notebook: has what the engine before noted.
        jobs, lineage: receive jobs that come back.
        clock: monotonic seconds, those of ``jobs``. wall: seconds since the epoch.
    """

    def __init__(
        self,
        notebook: NoNotebook,
        jobs: JobTable,
        lineage: Lineage,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._notebook = notebook
        self._jobs = jobs
        self._lineage = lineage
        self._clock = clock
        self._wall = wall
        self._away = notebook.facts(NOTE_PREFIX)
        for name, fact in list(self._away.items()):
            if "lineage" in fact:
                del self._away[name]
                self._bring_inferred_back(fact)

    def find(self, key: JobKey) -> None:
        """Bring a job back that its client has named, if an engine before knew it."""
        fact = self._away.pop(_name(key), None) if self._away else None
        if fact is not None:
            self._bring_back(key, fact)

    def note(self, job: Job) -> None:
        """Note a job, one of whose turns has ended."""
        age_s = self._clock() - job.started_at
        fact: dict[str, object] = {
            "turns": job.turns,
            "blocks": job.first_blocks,
            "started": self._wall() - age_s,
        }
        if not job.key.salt and (last := self._lineage.dump(job.key)) is not None:
            fact["lineage"] = last
        self._notebook.note(_name(job.key), fact)

    def forget(self, key: JobKey) -> None:
        """Strike out a job that is over."""
        self._notebook.strike(_name(key))

    def _bring_inferred_back(self, fact: Fact) -> None:
        try:
            key = self._lineage.load(fact["lineage"])
        except ValueError as error:
            logger.info("a job that was noted is not used: %s", error)
            return
        self._bring_back(key, fact)

    def _bring_back(self, key: JobKey, fact: Fact) -> None:
        match fact:
            case {"turns": int(turns), "blocks": int(blocks), "started": int() | float() as at}:
                age_s = max(0.0, self._wall() - at)
                self._jobs.adopt(key, self._clock() - age_s, max(0, blocks), max(0, turns))
            case _:
                logger.info("a job that was noted is not used: its numbers are none")


def _name(key: JobKey) -> str:
    said = f"{len(key.salt)} {key.salt}{key.name}"
    return NOTE_PREFIX + sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:32]
