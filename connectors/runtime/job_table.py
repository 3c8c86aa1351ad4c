"""Jobs: the turns that belong together, and what was said about them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from tiered_kv.policies.base import JobKey

MAX_JOBS = 65_536
"""Jobs remembered. One that never says it is over is forgotten when this many came after."""


@dataclass(slots=True)
class Job:
    """A job that has been seen.

    Attributes:
        born: when its first turn arrived, or the first after it was taken to have ended, on the
            scheduler half's clock.
        turns: turns arrived so far.
        first_blocks: blocks of the first one's prompt, which other jobs may begin with as well.
        running: ids of its requests that have not finished.
        over: the client said that no turn follows those that are running.
    """

    key: JobKey
    born: float
    turns: int = 0
    first_blocks: int = 0
    running: set[str] = field(default_factory=set)
    over: bool = False


class JobTable:
    """Jobs by key, least recently heard of first. One thread."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[JobKey, Job] = OrderedDict()

    def __len__(self) -> int:
        return len(self._jobs)

    def turn_arrived(self, key: JobKey, request_id: str, now: float) -> Job:
        """The job of a new turn, made if it is the first."""
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = Job(key, now)
            self._forget_old()
        self._jobs.move_to_end(key)
        job.turns += 1
        job.over = False
        job.running.add(request_id)
        return job

    def turn_ended(self, job: Job, request_id: str, *, over: bool) -> None:
        """A turn finished; ``over`` if the client said that none follows."""
        job.running.discard(request_id)
        job.over = job.over or over
        if job.over and not job.running and self._jobs.get(job.key) is job:
            del self._jobs[job.key]

    def _forget_old(self) -> None:
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
