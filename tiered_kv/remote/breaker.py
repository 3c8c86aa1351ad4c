"""Circuit breaker: a server that fails is left alone for a while, longer each time; and how long
what it did not take is offered to it again. Pure."""

from __future__ import annotations

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 16.0
"""Seconds without calls after a failure: doubled each time until one works. A call to a server
that does not answer takes a few seconds of a thread that has nothing else to do."""

PATIENCE_S = 10.0
"""Seconds for which writes that a store did not take are tried again. A stall of its machine or of
ours is over by then. Not longer: pages that wait keep their slots in CPU memory."""


class Breaker:
    """One server's breaker. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._closed_until = 0.0
        self._pause_s = FIRST_PAUSE_S

    def lets_through(self, now: float) -> bool:
        """True if a call may be made."""
        return now >= self._closed_until

    def failed(self, now: float) -> None:
        """Take in a call that failed."""
        self._closed_until = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def worked(self) -> None:
        """Take in a call that was answered."""
        self._closed_until, self._pause_s = 0.0, FIRST_PAUSE_S


class Patience:
    """Patience with a store that takes nothing. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._since: float | None = None

    def lasts(self, now: float) -> bool:
        """Take in that it took nothing; true if it is worth another try."""
        if self._since is None:
            self._since = now
        return now - self._since < PATIENCE_S

    def renew(self) -> None:
        """Take in that it took something."""
        self._since = None
