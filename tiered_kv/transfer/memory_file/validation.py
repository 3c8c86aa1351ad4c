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
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tiered_kv.keys import PageKey
from tiered_kv.machine import CORES
from tiered_kv.messages import AdoptedBundle, AdoptedPages

from .lasting_memory import LastingMemory
from .memory_format import SlotHeader

logger = logging.getLogger(__name__)

NICE = 10
"""Niceness of the thread."""


@dataclass(frozen=True, slots=True)
class LandedPage:
    """A page whose bytes are in its slot.

    Attributes:
        nbytes: size of the page.
        saved: time at which the scheduler knew it whole on every rank, nanoseconds since 1970.
    """

    slot: int
    key: PageKey
    nbytes: int
    saved: int


class Validation:
    """The thread. All methods are called by the worker's thread.

    Args:
        memory: must not be closed before this.
    """

    def __init__(self, memory: LastingMemory) -> None:
        self._memory = memory
        self._queue: deque[tuple[LandedPage, int]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="tiered-kv-validate", daemon=True)
        self._thread.start()

    def landed(self, pages: Iterable[LandedPage]) -> None:
        """Take pages that have landed and are known to be right on every rank. Their slots hold
        them still."""
        tickets = [(page, self._memory.ticket(page.slot)) for page in pages]
        with self._changed:
            self._queue.extend(tickets)
            self._changed.notify()

    def wait_idle(self, timeout: float) -> bool:
        """Wait until every page is done; False if that took more than so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._busy), timeout)

    def close(self, budget_s: float = 0.0) -> int:
        """End the thread. Idempotent.

        Args:
            budget_s: time for what waits, seconds.

        Returns:
            Number of pages that were not done.
        """
        self.wait_idle(budget_s)
        with self._changed:
            self._ending = True
            left = len(self._queue)
            self._queue.clear()
            self._changed.notify()
        self._thread.join()
        return left

    def _run(self) -> None:
        with suppress(OSError):
            os.sched_setaffinity(0, CORES)  # whatever core the engine's thread is bound to
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (one := self._next()) is not None:
            try:
                self._validate(*one)
            except Exception:  # a page that is not found again is no reason to stop
                logger.exception("a page in CPU memory cannot be validated")

    def _next(self) -> tuple[LandedPage, int] | None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or self._ending)
            if not self._queue:
                return None
            self._busy = True
            return self._queue.popleft()

    def _validate(self, page: LandedPage, ticket: int) -> None:
        memory = self._memory
        if memory.ticket(page.slot) != ticket:
            return
        digest = memory.digest(page.slot, page.nbytes)
        header = SlotHeader(page.key, page.nbytes, page.saved, digest)
        memory.validate(page.slot, ticket, header)


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
