"""Circuit breaker: a failing server is not called during a pause, which grows with each failure.
The module also limits for how long refused writes are retried, and how often failures are logged.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 16.0
"""First and longest pause without calls after a failure, seconds. The pause doubles until a call
succeeds. A call to a server that does not answer occupies a background thread for a few seconds."""

PATIENCE_S = 10.0
"""Time for which writes that a store did not accept are retried, seconds. The time is long enough
for a stall of this machine or of the store's machine to end. It is not longer, because waiting
pages keep their slots in CPU memory."""

REMINDER_S = 600.0
"""Time after which the same failure may be logged again, seconds."""
MOST_COMPLAINTS = 8
"""Maximum number of different messages logged in ``REMINDER_S`` seconds, because some messages
contain an address or a number."""


class Breaker:
    """Circuit breaker of one server, or of one type of calls to it. All times are from one clock,
    in seconds."""

    def __init__(self) -> None:
        self._closed_until = 0.0
        self._pause_s = FIRST_PAUSE_S

    def lets_through(self, now: float) -> bool:
        """True if a call may be made."""
        return now >= self._closed_until

    def failed(self, now: float) -> None:
        """Record a failed call."""
        self._closed_until = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def worked(self) -> None:
        """Record an answered call."""
        self._closed_until, self._pause_s = 0.0, FIRST_PAUSE_S


class Patience:
    """Retry limit for a store that accepts no writes. All times are from one clock, in seconds."""

    def __init__(self) -> None:
        self._since: float | None = None

    def lasts(self, now: float) -> bool:
        """Record that the store accepted no page of a write. Returns True if another attempt should
        be made."""
        if self._since is None:
            self._since = now
        return now - self._since < PATIENCE_S

    def renew(self) -> None:
        """Record that the store accepted a page."""
        self._since = None


class Complaint:
    """Decides when one type of failure is logged: when it starts, changes and ends, but not each
    time if it recurs frequently. All times are from one clock, in seconds."""

    def __init__(self) -> None:
        self._is_logged = False
        self._logged: dict[str, float] = {}

    def begins(self, what: str, now: float) -> bool:
        """Record a failure, described by ``what``. Returns True if it should be logged."""
        logged = self._logged = {
            said: at for said, at in self._logged.items() if now - at < REMINDER_S
        }
        if what in logged or len(logged) >= MOST_COMPLAINTS:
            return False
        logged[what] = now
        self._is_logged = True
        return True

    def ends(self) -> bool:
        """Record a success. Returns True if the end of a failure should be logged."""
        logged, self._is_logged = self._is_logged, False
        return logged


class LoggedBreaker(Breaker):
    """Circuit breaker that logs when calls start to fail, and when they work again.

    Args:
        place: the called service; any object whose text names it.
        failing: message, with ``%s`` for the place and for the reason.
        working: message, with ``%s`` for the place.
    """

    def __init__(self, place: object, failing: str, working: str) -> None:
        super().__init__()
        self._place = place
        self._failing = failing
        self._working = working
        self._complaint = Complaint()

    def complain(self, reason: str, now: float, kind: str | None = None) -> None:
        """Log a failure, unless it was logged recently.

        Args:
            kind: type of the failure; None if each reason is a separate type.
        """
        if self._complaint.begins(reason if kind is None else kind, now):
            logger.warning(self._failing, self._place, reason)

    def worked(self) -> None:
        super().worked()
        if self._complaint.ends():
            logger.info(self._working, self._place)
