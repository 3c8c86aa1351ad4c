"""Sharing: the pages that engines leave for each other, and trust in a tier that others write to.
Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.keys import PageKey
from tiered_kv.remote.rendezvous import RUN_PAGES

FIRST_DOUBT_S, LONGEST_DOUBT_S = 1.0, 16.0
"""Seconds for which a tier that gave no answers, or bad pages, is not asked: doubled each time.
Then one turn tries it, whose first token may be a tenth later for nothing."""
ONE_STALL_S = 1.0
"""Answers that are late within so many seconds are late for one reason. It may be a busy machine,
which costs the tier no trust: its turns waited for hundredths of a second."""
WAITING_SHARE = 2
"""One slot in this many may hold a page that waits to be written for others. More are not: they
would be evicted before."""


def most_waiting(num_slots: int) -> int:
    """Pages that may wait to be written.

    Args:
        num_slots: all slots in CPU memory.
    """
    return max(1, num_slots // WAITING_SHARE)


def runs_of(keys: Sequence[PageKey]) -> dict[PageKey, PageKey]:
    """The first page of each page's run.

    Args:
        keys: pages of a context from its beginning, of one group.
    """
    return {key: keys[at // RUN_PAGES * RUN_PAGES] for at, key in enumerate(keys)}


class Doubt:
    """Doubt in one tier: whether it is worth asking. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._until = float("-inf")
        self._next_s = FIRST_DOUBT_S
        self._late_at: float | None = None

    def rules(self, now: float) -> bool:
        """True if the tier is not to be asked."""
        return now < self._until

    def late(self, now: float) -> None:
        """Take in that a turn waited for it in vain: once is no reason for doubt."""
        if self._late_at is None:
            self._late_at = now
        elif now - self._late_at >= ONE_STALL_S:
            self.failed(now)

    def failed(self, now: float) -> None:
        """Take in that what it gave was of no use."""
        if not self.rules(now):  # several turns may have waited at once
            self._until = now + self._next_s
            self._next_s = min(2 * self._next_s, LONGEST_DOUBT_S)

    def worked(self) -> None:
        """Take in that it gave what it was asked for."""
        self._next_s, self._late_at = FIRST_DOUBT_S, None


def mostly_failed(failed: int, pages: int) -> bool:
    """True if an order that brought pages up was for nothing.

    Args:
        failed: pages of it that did not come.
    """
    return 2 * failed > pages
