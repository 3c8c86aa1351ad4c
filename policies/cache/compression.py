"""Compression of CPU memory: how many pages turn cold, and when. Pure.

Pages that have waited for longest turn cold once free slots are few. All that is lost by it is the
time to decode them, so it comes before any eviction.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_PAGES, MOST_PAGES = 4, 32
BUNDLE_BYTES = 64 << 20
"""Pages that are compressed together, as many as that. What their records leave of the last slot
is lost, half a slot of 20 on average; but a bundle goes as a whole."""
FREE_SHARE = 8
"""One slot in this many is kept free for saves, or as many as were taken at once lately if that is
less; as far as compressing can."""
FORGETS = 0.98
"""Share of what was taken at once that is still remembered one look later."""
MOST_PACKING = 8
"""Bundles under way at a time. Their pages cannot be read meanwhile."""
LOOKED_AT = 4 * MOST_PACKING * MOST_PAGES
"""Pages that are looked at for that, at most."""
STAGING_SHARE, MOST_STAGING = 16, 32
"""One slot in this many is kept for pages that are decoded, up to so many: half of them are copied
while the other half is filled."""
LEAST_RATIO = 1.3
"""Ratio from which pages are compressed. A bundle of 32 pages of fp16 or fp8 saves 5 or 6 slots,
and takes as long to decode as one of bf16, which saves 10."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Pages to compress now.

    Attributes:
        bundles: number of bundles, at most.
        among: the pages that have been in CPU memory for longest, from which they are taken.
    """

    bundles: int
    among: int


NOTHING = Packing(0, 0)


def staging_slots(num_slots: int) -> int:
    """Slots that are kept for pages which are decoded on their way to VRAM; 0 if there are too few
    to compress any.

    Args:
        num_slots: all slots.
    """
    return min(MOST_STAGING, num_slots // STAGING_SHARE // 2 * 2)


def bundle_pages(page_bytes: int) -> int:
    """Number of pages that are compressed together.

    Args:
        page_bytes: size of a page on one rank, bytes.
    """
    return max(LEAST_PAGES, min(MOST_PAGES, BUNDLE_BYTES // page_bytes))


def bundles_of(pages: int, most: int) -> list[int]:
    """Sizes of the bundles that a stretch of a context is cut into, in its order. What is left of
    it waits for more.

    Args:
        pages: length of the stretch.
        most: pages of a bundle (``bundle_pages``). The last one may have half as many.
    """
    whole, rest = divmod(pages, most)
    return [most] * whole + [rest] * (rest >= max(LEAST_PAGES, most // 2))


def packing(*, num_slots: int, free: int, burst: int, raw: int, under_way: int) -> Packing:
    """Say what to compress now.

    Args:
        num_slots: all slots. free: free ones.
        burst: slots that were taken at once lately.
        raw: readable pages that are not compressed.
        under_way: bundles under way.
    """
    wanted = max(1, min(burst, num_slots // FREE_SHARE))
    if free >= wanted or not raw or under_way >= MOST_PACKING:
        return NOTHING
    return Packing(MOST_PACKING - under_way, min(raw, LOOKED_AT))


def burst(taken: int, before: int) -> int:
    """Slots that were taken at once lately.

    Args:
        taken: slots that were taken since the last look.
        before: what this gave at the last look.
    """
    return max(taken, int(FORGETS * before))


def worth_compressing(page_bytes: int, stored_bytes: int) -> bool:
    """True if pages of a kind are compressed.

    Args:
        page_bytes: size of a page. stored_bytes: its size when it is encoded.
    """
    return page_bytes >= LEAST_RATIO * stored_bytes
