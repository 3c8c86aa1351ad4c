"""Validation of saved pages: a thread hashes what has landed, and makes its slots valid.

It yields to everything else on the machine. A page that is overwritten before its turn comes is
not hashed. A page that it has not come to when the process is killed is not found again.

Pages that all ranks have from before.

A page of the index has one slot on every rank, and one save. Ranks die at different moments, so
that one may hold a page that another has just overwritten, or holds from an earlier save. A save
that failed on one rank may have left nonsense on the others, which computed with what that one
gave them. So a page counts only where every rank has the same key in the same slot from the same
settlement. A compressed page counts where every rank has it in a bundle with the same first slot.
Of the slots of its order each rank fills as many as it needs, in their order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import wait

from tiered_kv.keys import PageKey
from tiered_kv.machine import run_beside
from tiered_kv.messages import AdoptedBundle, AdoptedPages

from .lasting_memory import LandedPage, LastingMemory

logger = logging.getLogger(__name__)

NICE = 10
"""Niceness of the thread."""


class Validation:
    """Hashes pages that have landed, on a thread of low priority, and makes their slots valid.
    Called by the worker's thread.

    Args:
        memory: must not be closed before this.

    Attributes:
        ending: set once no further page is hashed.
    """

    def __init__(self, memory: LastingMemory) -> None:
        self._memory = memory
        self._thread = run_beside("validate", 1, NICE)
        self.ending = threading.Event()

    def landed(self, pages: Iterable[LandedPage]) -> None:
        """Queue pages that have landed and are known to be right on every rank. Their slots still
        hold them."""
        tickets = [(page, self._memory.ticket(page.slot)) for page in pages]
        self._thread.submit(self._validate, tickets)

    def _validate(self, pages: Sequence[tuple[LandedPage, int]]) -> None:
        for page, ticket in pages:
            if self.ending.is_set():
                return
            try:
                self._memory.hash_and_validate(page, ticket)
            except Exception:  # a page that is not found again is no reason to stop
                logger.exception("a page in CPU memory cannot be validated")

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every queued page is done; False if that takes longer."""
        return bool(wait([self._thread.submit(int)], timeout_s).done)

    def close(self, budget_s: float = 0.0) -> None:
        """End the thread. Idempotent. Pages that are not done by then are not found again.

        Args:
            budget_s: time for the pages that are still queued, seconds.
        """
        if not self.ending.is_set():
            self.wait_idle(budget_s)
            self.ending.set()
            self._thread.shutdown()


def agreed(ranks: Sequence[AdoptedPages]) -> dict[PageKey, int]:
    """Slots of the pages that every rank has, the one saved longest ago first. Of two slots with
    one key, the one that was saved last.

    Args:
        ranks: pages of every rank of the engine.
    """
    if not ranks:
        return {}
    first, *others = (set(zip(one.saved, one.slots, one.keys, strict=True)) for one in ranks)
    found = dict[PageKey, int]()
    for _, slot, key in sorted(first.intersection(*others)):
        found.pop(key, None)  # to the end, where the newest are
        found[key] = slot
    return found


def agreed_bundles(ranks: Sequence[AdoptedPages]) -> list[AdoptedBundle]:
    """Bundles of the pages that every rank has compressed, the one of the oldest pages first, with
    the slots of the rank that needs the most. Of two bundles with one page, the newer one has it;
    of a bundle and a slot with one page, the slot.

    Args:
        ranks: pages of every rank of the engine.
    """
    if not ranks:
        return []
    first, *others = ({one.slots[0]: one for one in rank.bundles} for rank in ranks)
    found = [
        bundle
        for place, one in first.items()
        if all(place in bundles for bundles in others)
        and (bundle := _common([one, *(bundles[place] for bundles in others)])) is not None
    ]
    found.sort(key=lambda bundle: max(bundle.saved))
    seen, kept = set(agreed(ranks)), list[AdoptedBundle]()
    for bundle in reversed(found):
        pages = [
            pair for pair in zip(bundle.keys, bundle.saved, strict=True) if pair[0] not in seen
        ]
        if pages:
            keys, saved = zip(*pages, strict=True)
            kept.append(AdoptedBundle(bundle.slots, keys, saved))
            seen.update(keys)
    return kept[::-1]


def _common(ranks: Sequence[AdoptedBundle]) -> AdoptedBundle | None:
    """Common pages of bundles that begin in one slot, one of each rank; None if there are none, or
    if the bundles are not of one order."""
    slots = max((one.slots for one in ranks), key=len)
    if any(slots[: len(one.slots)] != one.slots for one in ranks):
        return None
    first, *others = (dict(zip(one.keys, one.saved, strict=True)) for one in ranks)
    pages = [pair for pair in first.items() if all(one.get(pair[0]) == pair[1] for one in others)]
    if not pages:
        return None
    keys, saved = zip(*pages, strict=True)
    return AdoptedBundle(slots, keys, saved)
