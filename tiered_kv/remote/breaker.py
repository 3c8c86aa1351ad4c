"""Circuit breaker: a server that fails is left alone for a while, longer each time; how long what
it did not take is offered to it again; and how often its trouble is logged."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 16.0
"""Seconds without calls after a failure: doubled each time until one works. A call to a server
that does not answer takes a few seconds of a thread that has nothing else to do."""

PATIENCE_S = 10.0
"""Seconds for which writes that a store did not take are tried again. A stall of its machine or of
ours is over by then. Not longer: pages that wait keep their slots in CPU memory."""

REMINDER_S = 600.0
"""Seconds after which the same trouble may be logged again."""
MOST_COMPLAINTS = 8
"""Different sentences that are logged in this time: some hold an address, or a number."""


class Breaker:
    """Breaker of one server, or of one kind of calls to it. Times are of one clock, in seconds."""

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


class Complaint:
    """One kind of trouble: logged when it begins, when it becomes another one, and when it is over;
    not each time if it comes and goes. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._is_logged = False
        self._logged: dict[str, float] = {}

    def begins(self, what: str, now: float) -> bool:
        """Record trouble. True if it should be logged."""
        logged = self._logged = {
            said: at for said, at in self._logged.items() if now - at < REMINDER_S
        }
        if what in logged or len(logged) >= MOST_COMPLAINTS:
            return False
        logged[what] = now
        self._is_logged = True
        return True

    def ends(self) -> bool:
        """Record that all went well. True if the end of trouble should be logged."""
        logged, self._is_logged = self._is_logged, False
        return logged


class LoggedBreaker(Breaker):
    """Breaker that logs when calls begin to fail, and when they work again.

    Args:
        place: what is called, which may be any text.
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
        """Log trouble, but not each time.

        Args:
            kind: kind of the trouble, if not each reason is one of its own.
        """
        if self._complaint.begins(reason if kind is None else kind, now):
            logger.warning(self._failing, self._place, reason)

    def worked(self) -> None:
        super().worked()
        if self._complaint.ends():
            logger.info(self._working, self._place)
