"""Survivors: the pages of a dying segment that are written once more. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiered_kv.keys import PageKey

LIKELY = 0.5
"""Chance of a return that is worth a second write."""
SURVIVING_SHARE = 2
"""One page in this many may survive, so that a segment's death frees at least half a segment."""


def survivors(
    dying: Sequence[PageKey], used: Callable[[PageKey], bool], chance: Callable[[PageKey], float]
) -> tuple[PageKey, ...]:
    """Pages of a dying segment to be written again: those that a waiting job is likely to come
    back for, and those that were used. If they are too many, the likeliest, and of equal ones
    those written last.

    Args:
        dying: the segment's pages, in the order in which they were written.
        used: True if a page was used since it was last written.
        chance: probability that somebody comes back for a page; 0 if unknown.
    """
    chances = {key: chance(key) for key in dying}
    kept = [key for key in dying if used(key) or chances[key] >= LIKELY]
    kept.sort(key=chances.__getitem__)
    chosen = set(kept[len(kept) - min(len(kept), len(dying) // SURVIVING_SHARE) :])
    return tuple(key for key in dying if key in chosen)
