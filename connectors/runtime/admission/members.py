"""Records of jobs that have started, and of their clients."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from tiered_kv.policies.base import JobKey
from tiered_kv.policies.jobs.silence import ReturnRate

MOST_SILENT = 1024
"""Jobs of a client remembered that may have ended, and clients. The one longest away, or unheard
of, is forgotten first."""
SILENT_OF_ALL = 8192
"""Jobs remembered that may have ended, shared equally by the clients: a client can invent names
for as many others as it likes."""


@dataclass(slots=True)
class ActiveJob:
    """A job that has started.

    Attributes:
        turns: number of turns started.
        running: number of turns that run now.
        blocks: unshared blocks of its context at the end of the present turn, or of the last.
        shared: number of blocks that it found in VRAM when it started.
        family: hash of the first block that it shares; jobs of one family share the same.
        asked: arrival of its last turn, seconds.
        since: end of the turn that ended last, seconds.
        ended: unshared blocks of its context when its last turn ended.
        grown: number of blocks that its turns have added, the first left out.
    """

    turns: int
    running: int
    blocks: float
    shared: int
    family: bytes
    asked: float
    since: float
    ended: float = 0.0
    grown: float = 0.0


@dataclass(slots=True)
class Scope:
    """A client: the jobs of one ``cache_salt``.

    Attributes:
        silent: those that may have ended.
        returns: how often they return.
    """

    silent: dict[JobKey, ActiveJob] = field(default_factory=dict)
    returns: ReturnRate = field(default_factory=ReturnRate)


class Scopes:
    """The clients that were heard of last."""

    def __init__(self) -> None:
        self._by_salt: OrderedDict[str, Scope] = OrderedDict()

    def __getitem__(self, salt: str) -> Scope:
        return self._by_salt[salt]

    def of(self, job: JobKey) -> Scope:
        """The job's client; it has been heard of now."""
        scope = self._by_salt.setdefault(job.salt, Scope())
        self._by_salt.move_to_end(job.salt)
        if len(self._by_salt) > MOST_SILENT:
            self._by_salt.popitem(last=False)
        return scope

    def add_silent(self, job: JobKey, member: ActiveJob) -> None:
        """Remember a job that may have ended, and forget those of its client that have been away
        for longest, if they are more than its share."""
        silent = self.of(job).silent
        silent[job] = member
        most = max(1, min(MOST_SILENT, SILENT_OF_ALL // len(self._by_salt)))
        while len(silent) > most:
            del silent[next(iter(silent))]
