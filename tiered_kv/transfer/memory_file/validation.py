"""Validation of saved pages: a thread hashes landed pages and validates their slots.

The thread runs at low priority. A page that is overwritten before it is hashed is skipped. A page
that is not hashed before the process is killed is not found again.

The module also determines the pages that all ranks have from a previous engine.

In the index, a page has the same slot on every rank, and one save. Ranks die at different moments,
so one rank may hold a page that another rank has just overwritten, or holds from an earlier save. A
save that failed on one rank may have left wrong data on the other ranks, which computed with the
output of that rank. So a page counts only if every rank has the same key in the same slot with the
same save time. A compressed page counts if every rank has it, with the same save time, in a bundle
with the same first slot. Each rank fills only the first slots of the order to compress the pages,
as many slots as it needs.
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
    """Hashes landed pages on a thread of low priority, and validates their slots. Called by the
    worker's thread.

    Args:
        memory: memory of the slots; must not be closed before this object.

    Attributes:
        ending: set once no further page is hashed.
    """

    def __init__(self, memory: LastingMemory) -> None:
        self._memory = memory
        self._thread = run_beside("validate", 1, NICE)
        self.ending = threading.Event()

    def landed(self, pages: Iterable[LandedPage]) -> None:
        """Queue pages that have landed and are known to be right on every rank. The slots of these
        pages must still contain them."""
        tickets = [(page, self._memory.ticket(page.slot)) for page in pages]
        self._thread.submit(self._validate, tickets)

    def _validate(self, pages: Sequence[tuple[LandedPage, int]]) -> None:
        for page, ticket in pages:
            if self.ending.is_set():
                return
            try:
                self._memory.hash_and_validate(page, ticket)
            except Exception:  # one page that cannot be validated must not stop the others
                logger.exception(
                    "a page in CPU memory cannot be validated, so the next engine will not find it"
                )

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every queued page is hashed or skipped. Returns False on timeout."""
        return bool(wait([self._thread.submit(int)], timeout_s).done)

    def close(self, budget_s: float = 0.0) -> None:
        """Stop the thread. Idempotent. Pages that are not hashed by then are not found again.

        Args:
            budget_s: time for the pages that are still queued, seconds.
        """
        if not self.ending.is_set():
            self.wait_idle(budget_s)
            self.ending.set()
            self._thread.shutdown()


def agreed(ranks: Sequence[AdoptedPages]) -> dict[PageKey, int]:
    """Return the slot of each uncompressed page that every rank has, oldest first. If two slots
    have the same key, the slot that was saved last counts.

    Args:
        ranks: pages of every rank of the engine.
    """
    if not ranks:
        return {}
    first, *others = (set(zip(one.saved, one.slots, one.keys, strict=True)) for one in ranks)
    found = dict[PageKey, int]()
    for _, slot, key in sorted(first.intersection(*others)):
        found.pop(key, None)  # moved to the end, since the newest are last
        found[key] = slot
    return found


def agreed_bundles(ranks: Sequence[AdoptedPages]) -> list[AdoptedBundle]:
    """Return bundles of the pages that every rank has compressed, oldest first, with the slots of
    the rank that needs the most slots. A page in two bundles belongs to the newer bundle. A page in
    both a bundle and a slot belongs to the slot.

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
    """Return the pages that one bundle of each rank has in common. All bundles have the same first
    slot. Returns None if no page is common, or if the bundles do not belong to the same order."""
    slots = max((one.slots for one in ranks), key=len)
    if any(slots[: len(one.slots)] != one.slots for one in ranks):
        return None
    first, *others = (dict(zip(one.keys, one.saved, strict=True)) for one in ranks)
    pages = [pair for pair in first.items() if all(one.get(pair[0]) == pair[1] for one in others)]
    if not pages:
        return None
    keys, saved = zip(*pages, strict=True)
    return AdoptedBundle(slots, keys, saved)
