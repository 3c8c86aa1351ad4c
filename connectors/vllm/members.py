"""What is remembered of a job that has begun, and of its client."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiered_kv.policies.signals import JobKey

KEEPS = 0.98
"""What counts of a client's record after the next job that returned, or did not."""


@dataclass(slots=True)
class Member:
    """A job that has begun.

    Attributes:
        turns: begun. running: of them, now.
        blocks: of its context when its present turn ends, or when its last did; those shared
            with others left out.
        ended: of its context when its last turn ended.
        grown: blocks that its turns have added, the first left out.
        shared: blocks that it found in VRAM when it began.
        family: the first block of what it shares; jobs of one share the same.
        asked, since: when its last turn arrived, and when one last ended.
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
    """What is remembered of a client: of the jobs of one ``cache_salt``.

    Attributes:
        silent: those that may have ended.
    """

    silent: dict[JobKey, Member] = field(default_factory=dict)
    _returned: float = 19.0
    _gone: float = 1.0

    def record(self, *, returned: bool) -> None:
        """A job that was away has returned, or is taken to have ended without a word."""
        self._returned = KEEPS * self._returned + returned
        self._gone = KEEPS * self._gone + (not returned)

    @property
    def goes_on(self) -> float:
        """The chance that a turn that was not said to be the last is not."""
        return self._returned / (self._returned + self._gone)
