"""Demotions: which pages go down to a tier, how many at a time, and when a tier is left alone.

A page that is evicted before it is in a lower tier is lost, and a demotion is reported a step
after it was ordered. So pages go down while there is still room. Those that must wait form a
backlog. A tier that others write to as well is doubted when its answers turn out wrong or late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiered_kv.keys import PageKey
from tiered_kv.remote.address import RUN_PAGES


class Waiting(NamedTuple):
    """Pages of one context.

    Attributes:
        runs: the first page of each page's run; empty if their store does not want to know.
    """

    keys: Sequence[PageKey]
    runs: Mapping[PageKey, PageKey]


class Backlog:
    """Pages that wait, first come, first served. Its length is their number."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()
        self._taken = 0  # of the first context
        self._pages = 0

    def __len__(self) -> int:
        return self._pages

    def add(self, waiting: Waiting) -> None:
        """Have more pages wait."""
        if waiting.keys:
            self._waiting.append(waiting)
            self._pages += len(waiting.keys)

    def take(self, most: int) -> Waiting:
        """The first pages, ``most`` of them at most, of one context.

        Raises:
            IndexError: none waits.
        """
        keys, runs = self._waiting[0]
        taken = keys[self._taken : self._taken + most]
        self._taken += len(taken)
        if self._taken == len(keys):
            self._waiting.popleft()
            self._taken = 0
        self._pages -= len(taken)
        return Waiting(taken, runs)

    def clear(self) -> None:
        """Forget all of them."""
        self._waiting.clear()
        self._taken = self._pages = 0


MOST_AHEAD = 4096
"""Pages next in line for eviction that are kept in a tier as well, at most; three quarters of
the slots if that is less. This must be several steps' saves. It does not cost writes: under
pressure every page is evicted, and written, once."""
MOST_DEMOTING = 256
"""Pages under way down at a time, half of those ahead if that is less: they cannot be
evicted, and younger ones would be in their place."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds without demotions after one failed: doubled each time."""


@dataclass(frozen=True, slots=True)
class LookAhead:
    """The look-ahead of a tier: pages that it keeps before they are evicted.

    Attributes:
        window: pages next in line for eviction that are kept in the tier as well.
    """

    window: int

    @classmethod
    def of(cls, num_slots: int, tier_pages: int | None) -> LookAhead:
        """The look-ahead for that many CPU slots above a tier of ``tier_pages`` pages; None if
        it has no known end. At most half of a tier is written ahead."""
        most = MOST_AHEAD if tier_pages is None else min(MOST_AHEAD, tier_pages // 2)
        return cls(max(1, min(num_slots * 3 // 4, most)))

    @property
    def most_demoting(self) -> int:
        """Pages that may be under way down at a time."""
        return min(MOST_DEMOTING, -(-self.window // 2))

    def due(self, *, free: int, num_slots: int, taken: int, looked_at: int, ahead: int) -> bool:
        """True if it is time to look for pages that are about to be evicted.

        Only once half the slots are taken, and after enough were since the last look.

        Args:
            free: free slots. num_slots: all slots.
            taken: slots taken so far. looked_at: slots that were taken at the last look.
            ahead: pages demoted ahead so far; at most as many as slots were taken, or a store
                smaller than the look-ahead would be written over and over.
        """
        roomy = free > num_slots // 2
        return not (roomy or taken - looked_at < self.window // 8 or ahead >= taken)


def next_pause_s(pause_s: float) -> float:
    """Pause after one more failure."""
    return min(2 * pause_s, LONGEST_PAUSE_S)


def last_flush(
    pages: Sequence[tuple[PageKey, int]], stored: Collection[PageKey]
) -> list[tuple[PageKey, int]]:
    """Pages to write before an engine ends, with their places: those that are nowhere else, the
    newest first, since time may be too short for all.

    Args:
        pages: pages in CPU memory and their places, the newest last.
        stored: pages that the tier has.
    """
    newest: dict[PageKey, int] = {}
    for key, slot in reversed(pages):
        newest.setdefault(key, slot)
    return [(key, slot) for key, slot in newest.items() if key not in stored]


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
        """Record that a turn waited for the tier in vain. A single time raises no doubt."""
        if self._late_at is None:
            self._late_at = now
        elif now - self._late_at >= ONE_STALL_S:
            self.failed(now)

    def failed(self, now: float) -> None:
        """Record that the pages it returned were unusable."""
        if not self.rules(now):  # several turns may have waited at once
            self._until = now + self._next_s
            self._next_s = min(2 * self._next_s, LONGEST_DOUBT_S)

    def worked(self) -> None:
        """Record that it returned the requested pages."""
        self._next_s, self._late_at = FIRST_DOUBT_S, None
