"""Demotion ahead of eviction, and at the end: the pages that go down, and how many at a time. Pure.

A page that is evicted before it is in a lower tier is lost, and a demotion is reported a step
after it was ordered. So pages go down while there is still room.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tiered_kv.keys import PageKey

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
