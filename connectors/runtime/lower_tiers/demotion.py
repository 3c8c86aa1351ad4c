"""Demotions: which pages are demoted to a tier, how many at a time, and when a tier is paused.

A page that is evicted before a lower tier has it is lost, and a demotion is reported a step after
it was ordered. So pages are demoted while there are still free slots. Pages whose demotion must
wait form a backlog. A tier to which other engines also write is not queried for a while after its
replies were wrong or late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import NamedTuple

from tiered_kv.keys import PageKey
from tiered_kv.remote.address import RUN_PAGES


class Waiting(NamedTuple):
    """Pages of one context that wait for demotion.

    Attributes:
        runs: first page of each page's run (``RUN_PAGES`` consecutive pages of a context, which a
            store keeps together); empty if the store does not use runs.
    """

    keys: Sequence[PageKey]
    runs: Mapping[PageKey, PageKey]


class Backlog:
    """Pages waiting for demotion, first come, first served. ``len`` returns the number of pages."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()
        self._taken = 0  # number of pages of the first context already taken
        self._pages = 0

    def __len__(self) -> int:
        return self._pages

    def add(self, waiting: Waiting) -> None:
        """Add pages to the backlog."""
        if waiting.keys:
            self._waiting.append(waiting)
            self._pages += len(waiting.keys)

    def take(self, most: int) -> Waiting:
        """Remove the first pages of the first waiting context, at most ``most``, and return them.

        Raises:
            IndexError: the backlog is empty.
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
        """Forget all waiting pages."""
        self._waiting.clear()
        self._taken = self._pages = 0


MOST_AHEAD = 4096
"""Maximum number of pages next in line for eviction that are also kept in a tier; three quarters of
the slots, or half of the tier's pages, if that is less. The number must cover the saves of several
steps. Early demotion costs no extra writes: under pressure, every page is evicted, and thus
written, once."""
MOST_DEMOTING = 256
"""Maximum number of pages being demoted; half of ``LookAhead.window`` if that is less. Pages being
demoted cannot be evicted, so with more of them, younger pages would be evicted in their place."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Time without demotions after a first failure, and its maximum, seconds. The time doubles with
each further failure."""


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Early demotion: how many pages are copied to a tier before they are evicted.

    Attributes:
        window: number of pages next in line for eviction that are also kept in the tier.
    """

    window: int

    @classmethod
    def of(cls, num_slots: int, tier_pages: int | None) -> LookAhead:
        """Return the look-ahead for that many CPU slots above a tier of ``tier_pages`` pages (None
        without a known limit). At most half of a tier is written in advance."""
        most = MOST_AHEAD if tier_pages is None else min(MOST_AHEAD, tier_pages // 2)
        return cls(max(1, min(num_slots * 3 // 4, most)))

    @property
    def most_demoting(self) -> int:
        """Maximum number of pages being demoted at a time."""
        return min(MOST_DEMOTING, -(-self.window // 2))

    def due(self, *, free: int, num_slots: int, taken: int, looked_at: int, ahead: int) -> bool:
        """True if it is time to search for pages that are about to be evicted.

        Requires that at least half of the slots are taken, and that slots for an eighth of the
        window have been allocated since the last search.

        Args:
            free: number of free slots.
            num_slots: total number of slots.
            taken: slots allocated so far, slots of evicted pages included.
            looked_at: value of ``taken`` at the last search.
            ahead: pages demoted in advance so far. No further pages are demoted in advance once
                this number reaches ``taken``; otherwise a store smaller than the look-ahead would
                be rewritten over and over.
        """
        roomy = free > num_slots // 2
        return not (roomy or taken - looked_at < self.window // 8 or ahead >= taken)


def next_pause_s(pause_s: float) -> float:
    """Return the pause after a further failure, seconds. ``pause_s`` is the previous pause."""
    return min(2 * pause_s, LONGEST_PAUSE_S)


def last_flush(
    pages: Sequence[tuple[PageKey, int]], stored: Collection[PageKey]
) -> list[tuple[PageKey, int]]:
    """Return the pages to write before an engine stops, with their slots: pages that the tier
    lacks, newest first, because time may be too short for all of them.

    Args:
        pages: pages in CPU memory and their slots, newest last.
        stored: pages that the tier has.
    """
    newest: dict[PageKey, int] = {}
    for key, slot in reversed(pages):
        newest.setdefault(key, slot)
    return [(key, slot) for key, slot in newest.items() if key not in stored]


FIRST_DOUBT_S, LONGEST_DOUBT_S = 1.0, 16.0
"""Time for which a tier that sent no replies, or bad pages, is not queried: initial value and
maximum, seconds. The time doubles with each further failure. After that time, one turn queries the
tier again, which may delay that turn's first token by a tenth without any benefit."""
ONE_STALL_S = 1.0
"""Late replies within this time, in seconds, count as one incident. The cause may be a busy
machine. The tier stays trusted, because its turns waited only for hundredths of a second."""
WAITING_SHARE = 2
"""One slot in ``WAITING_SHARE`` may hold a page that waits to be written for other engines. Further
pages are not queued, because they would be evicted before they are written."""


def most_waiting(num_slots: int) -> int:
    """Maximum number of pages that may wait to be written for other engines.

    Args:
        num_slots: total number of slots in CPU memory.
    """
    return max(1, num_slots // WAITING_SHARE)


def runs_of(keys: Sequence[PageKey]) -> dict[PageKey, PageKey]:
    """Return the first page of each page's run.

    Args:
        keys: consecutive pages of a context, of one group, from the start of a run.
    """
    firsts = chain.from_iterable(repeat(first, RUN_PAGES) for first in keys[::RUN_PAGES])
    return dict(zip(keys, firsts, strict=False))


class Doubt:
    """Tracks whether a tier is worth querying. Times are on one clock, in seconds."""

    def __init__(self) -> None:
        self._until = float("-inf")
        self._next_s = FIRST_DOUBT_S
        self._late_at: float | None = None

    def rules(self, now: float) -> bool:
        """True if the tier is not to be queried."""
        return now < self._until

    def late(self, now: float) -> None:
        """Record that a turn waited for the tier without receiving its reply in time. A single late
        reply raises no doubt."""
        if self._late_at is None:
            self._late_at = now
        elif now - self._late_at >= ONE_STALL_S:
            self.failed(now)

    def failed(self, now: float) -> None:
        """Record that the tier returned unusable pages."""
        if not self.rules(now):  # several turns may have waited concurrently
            self._until = now + self._next_s
            self._next_s = min(2 * self._next_s, LONGEST_DOUBT_S)

    def worked(self) -> None:
        """Record that the tier answered a lookup in time, or returned the requested pages."""
        self._next_s, self._late_at = FIRST_DOUBT_S, None
