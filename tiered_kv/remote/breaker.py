"""Circuit breaker: a server that fails is left alone for a while, longer each time. Pure."""

from __future__ import annotations

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 16.0
"""Seconds without calls after a failure: doubled each time until one works. A call to a server
that does not answer takes a few seconds of a thread that has nothing else to do."""


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
