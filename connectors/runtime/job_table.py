"""Jobs: the turns that belong together, and what was said about them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from tiered_kv.policies.base import JobKey

MAX_JOBS = 65_536
"""Jobs remembered. Of more, the least recently heard of is forgotten: it never said it was over."""


@dataclass(slots=True)
class Job:
    """A job that has been seen. Written by ``JobTable``.

    Attributes:
        started_at: arrival of its first turn, or of the first after it was taken to have ended;
            seconds on the scheduler's clock.
        first_blocks: blocks of its first prompt, which other jobs may begin with as well.
        turns: turns arrived so far.
        running: ids of its requests that have not finished.
        over: True if the client said that no turn follows those that are running.
    """

    key: JobKey
    started_at: float
    first_blocks: int
    turns: int = 0
    running: set[str] = field(default_factory=set)
    over: bool = False


class JobTable:
    """Jobs by key, least recently heard of first. One thread."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[JobKey, Job] = OrderedDict()

    def __len__(self) -> int:
        return len(self._jobs)

    def turn_arrived(self, key: JobKey, request_id: str, now: float, blocks: int) -> Job:
        """The job of a new turn, made if it is the first.

        Args:
            blocks: blocks of its prompt.
        """
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = Job(key, now, blocks)
            self._forget_old()
        self._jobs.move_to_end(key)
        job.turns += 1
        job.over = False
        job.running.add(request_id)
        return job

    def turn_ended(self, job: Job, request_id: str, *, over: bool) -> None:
        """End a turn; ``over`` if the client said that none follows."""
        job.running.discard(request_id)
        job.over = job.over or over
        if job.over and not job.running and self._jobs.get(job.key) is job:
            del self._jobs[job.key]

    def turn_lost(self, job: Job, request_id: str) -> None:
        """Forget a turn whose end could not be handled: it would run for ever."""
        job.running.discard(request_id)

    def begin_anew(self, job: Job, now: float) -> None:
        """Give the job the youngest place: its room went to others, and so did its place."""
        job.started_at = now

    def oldest_first(self) -> list[JobKey]:
        """Keys of the jobs, by when they began."""
        return sorted(self._jobs, key=lambda key: self._jobs[key].started_at)

    def _forget_old(self) -> None:
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
