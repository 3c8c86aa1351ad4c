"""Promotions: the pages that come up from the tiers below, for a turn or ahead of one, and the
longest wait for them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiered_kv.keys import PageKey
from tiered_kv.tiers import StoreId

UNKNOWN_WAIT_S = 10.0
"""Longest wait where nothing is known of the time to compute the tokens."""
LOOK_EVERY_S = 0.1
"""Seconds between two looks at pages that a waiting turn lacks, while nothing of them comes."""
TURNS_SHARE = 2
"""One slot in this many may be reserved for turns that have arrived: the others are for saves."""
AHEAD_SHARE = 4
"""One slot in this many may be reserved for promotions that are not due yet."""
PIECES_SHARE = 4
"""One slot in this many may be in use by restores in pieces."""
PIECE_BYTES = 64 << 20
"""Size of a piece of such a restore, bytes, or half of their slots if that is less. A disk reaches
its speed with it, and the copy of the last piece, which nothing goes beside, takes a few
milliseconds."""
IDLE_AHEAD_S = 3600.0
"""An engine that falls idle orders what is due in this time ahead: no hook may run until then."""
STALLED_S = 5.0
"""Seconds after which an order that a turn no longer waits for stops further ones: the store
does not answer, and each would keep CPU slots reserved."""
FORGIVEN = 1.1
"""Factor of a tier's measured bandwidth for each promotion that was refused for want of it."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """Costs of a promotion that is about to be ordered.

    Attributes:
        promote_s: seconds until its pages are in CPU memory, queue included.
        recompute_s: seconds to compute their tokens instead; 0 if unknown.
    """

    promote_s: float
    recompute_s: float

    @property
    def longest_wait_s(self) -> float:
        """Seconds after which the turn computes its tokens instead, from when VRAM has room for it:
        before that it waits anyway.

        It is the time that computing takes. So whatever the disk does, the turn needs at most
        twice that (the ski-rental bound of 2).
        """
        return self.recompute_s or UNKNOWN_WAIT_S


def worth_promoting(promotion: Promotion) -> bool:
    """True unless computing is faster."""
    return not 0 < promotion.recompute_s < promotion.promote_s


def waits_for_slots(promotion: Promotion, *, mine: int, others: int, left_s: float | None) -> bool:
    """True if a turn waits for slots rather than have a part of its pages only. One for which pages
    came up never does: two would wait for each other.

    Args:
        mine: pages that came up for the turn, or are coming.
        others: the same of other turns: their slots are given back.
        left_s: seconds that are left of its longest wait; None if that has not begun.
    """
    return others > 0 and not mine and (left_s is None or promotion.promote_s <= left_s)


def slowest_store(seconds: Mapping[StoreId, float]) -> StoreId:
    """The store without which a promotion that is not worth it is tried again.

    Args:
        seconds: time until the pages of each store are up; they work side by side.
    """
    return max(seconds, key=seconds.__getitem__)


def pages_without(
    store: StoreId, wanted: Sequence[PageKey], fresh: Mapping[StoreId, Sequence[PageKey]]
) -> int:
    """Number of the first pages wanted that come up without a store: those before its first one,
    since a page is of no use without all before it. None if its pages are all on their way.

    Args:
        wanted: pages of a prompt, in order.
        fresh: those that are not on their way yet, by store.
    """
    return wanted.index(fresh[store][0]) if store in fresh else 0


def room_for_turns(num_slots: int, unclaimed: int) -> int:
    """Pages that may be ordered up for turns that have arrived.

    Args:
        num_slots: all slots in CPU memory.
        unclaimed: pages that came up, or are coming, for turns that were not admitted yet.
    """
    return max(1, num_slots // TURNS_SHARE) - unclaimed


def room_for_pieces(num_slots: int) -> int:
    """Slots that restores in pieces may use together.

    Args:
        num_slots: all slots in CPU memory.
    """
    return max(1, num_slots // PIECES_SHARE)


def piece_pages(page_bytes: int, num_slots: int) -> int:
    """Pages of a piece of a restore.

    Args:
        page_bytes: size of a page on one rank, bytes.
        num_slots: all slots in CPU memory.
    """
    return max(1, min(PIECE_BYTES // page_bytes, room_for_pieces(num_slots) // 2))


def room_ahead(num_slots: int, free: int, ahead: int) -> int:
    """Pages that may be ordered up before they are due. Their slots are of no use to anybody until
    then, so nothing is evicted for them.

    Args:
        num_slots: all slots in CPU memory.
        free: free slots.
        ahead: pages on their way up that are not due yet.
    """
    return min(free, num_slots // AHEAD_SHARE - ahead)


def is_stalled(given_up_s: float) -> bool:
    """True if a store that keeps an order gets no further ones.

    Args:
        given_up_s: time since its turn stopped waiting for it, seconds.
    """
    return given_up_s >= STALLED_S


def bandwidth_after_refusal(measured: float, expected: float) -> float:
    """Bandwidth that a tier is taken to have after a promotion from it was refused. Nothing is
    learned from what is not done, so a little of a bad measurement is forgotten.

    Args:
        measured: bandwidth that the refusal went by, bytes per second.
        expected: bandwidth that was expected at the start, bytes per second.
    """
    return max(measured, min(FORGIVEN * measured, expected))
