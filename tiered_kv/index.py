"""The index: which pages exist, in which state, in which slot.

Mutation is in two phases. ``reserve`` gives a page a slot while its bytes travel
(absent → SAVING), ``commit`` makes it visible (SAVING → CPU) and ``abort`` takes the
slot back. Only a page in state CPU can be read or evicted, and only while nobody
reads it: ``acquire``/``release`` bracket a restore.

Lives on the scheduler thread and takes no locks. Nothing blocks; every method is
O(1) per page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tiered_kv.keys import PageKey


class EvictionOrder(Protocol):
    """Order of the evictable pages: told of each page that becomes or ceases to be one.

    Every method is O(1), runs on the scheduler thread and does not raise for a page
    that was added before. ``tiered_kv.policies.eviction`` holds the implementations.
    """

    def added(self, key: PageKey) -> None:
        """The page can be evicted from now on; it counts as just used."""

    def removed(self, key: PageKey) -> None:
        """The page can no longer be evicted: it is being read, or gone."""

    def touched(self, key: PageKey) -> None:
        """The page was used."""

    def victim(self) -> PageKey | None:
        """The page to evict next; does not mutate. None if there is none."""

    def __iter__(self) -> Iterator[PageKey]:
        """Every evictable page, next victim first."""


class PageState(Enum):
    SAVING = "saving"
    CPU = "cpu"


@dataclass(slots=True)
class _Page:
    state: PageState
    slot: int
    readers: int = 0


class PageIndex:
    """Pages of the CPU tier.

    Args:
        num_slots: capacity of the CPU pool in pages; 0 means no CPU tier.
        eviction: chooses which readable page makes room.
    """

    def __init__(self, num_slots: int, eviction: EvictionOrder) -> None:
        self.num_slots = num_slots
        self.evictions = 0
        self._eviction = eviction
        self._pages: dict[PageKey, _Page] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        # Pages forgotten while their bytes still travel: the slot is free once they stop.
        self._orphans: dict[PageKey, list[_Page]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def state(self, key: PageKey) -> PageState | None:
        page = self._pages.get(key)
        return page.state if page else None

    def known(self, key: PageKey) -> bool:
        """True if the page exists or is on its way: it need not be saved again."""
        return key in self._pages

    def resident_prefix(self, keys: Sequence[PageKey], start: int, stop: int) -> int:
        """End of the run of readable pages that begins at ``start``, at most ``stop``."""
        pages, readable = self._pages, PageState.CPU
        for i in range(start, stop):
            page = pages.get(keys[i])
            if page is None or page.state is not readable:
                return i
        return max(start, stop)

    # -- saving -----------------------------------------------------------------

    def reserve(self, key: PageKey) -> int | None:
        """absent → SAVING: a slot for a page about to be saved, evicting if need be.

        Returns None when no slot can be had (all are being read or written).
        """
        if key in self._pages:
            raise ValueError("a page is reserved once: it is already saved or on its way")
        slot = self._free.pop() if self._free else self._evict()
        if slot is not None:
            self._pages[key] = _Page(PageState.SAVING, slot)
        return slot

    def commit(self, key: PageKey, slot: int) -> bool:
        """SAVING → CPU: the bytes are whole on every rank.

        Returns False if the page was forgotten meanwhile; its slot is then free again.
        """
        page = self._pages.get(key)
        if page is None or page.slot != slot or page.state is not PageState.SAVING:
            self._bury(key, slot)
            return False
        page.state = PageState.CPU
        self._eviction.added(key)
        return True

    def abort(self, key: PageKey, slot: int) -> None:
        """SAVING → absent: the copy failed somewhere."""
        page = self._pages.get(key)
        if page is None or page.slot != slot or page.state is not PageState.SAVING:
            self._bury(key, slot)
            return
        del self._pages[key]
        self._free.append(slot)

    # -- reading ----------------------------------------------------------------

    def acquire(self, key: PageKey) -> int:
        """Slot of a readable page, which stays put until ``release``."""
        page = self._pages[key]
        if page.state is not PageState.CPU:
            raise ValueError(f"page is {page.state.value}, not readable")
        if page.readers == 0:
            self._eviction.removed(key)
        page.readers += 1
        return page.slot

    def release(self, key: PageKey, slot: int) -> None:
        """One reader less. A page forgotten while read gives its slot back with the last."""
        page = self._pages.get(key)
        if page is None or page.slot != slot:
            self._bury(key, slot)
            return
        page.readers -= 1
        if page.readers == 0:
            self._eviction.added(key)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Mark pages as used, least valuable first: the last one is evicted last."""
        pages, touched = self._pages, self._eviction.touched
        for key in keys:
            page = pages.get(key)
            if page is not None and page.state is PageState.CPU and page.readers == 0:
                touched(key)

    # -- forgetting -------------------------------------------------------------

    def forget(self, key: PageKey) -> None:
        """Any state → absent. A slot still being read or written is freed when that ends."""
        page = self._pages.pop(key, None)
        if page is None:
            return
        if page.state is PageState.CPU and page.readers == 0:
            self._eviction.removed(key)
            self._free.append(page.slot)
        else:
            self._orphans.setdefault(key, []).append(page)

    def clear(self) -> None:
        """Forget every page."""
        for key in list(self._pages):
            self.forget(key)

    # -- inside -----------------------------------------------------------------

    def _evict(self) -> int | None:
        victim = self._eviction.victim()
        if victim is None:
            return None
        self._eviction.removed(victim)
        self.evictions += 1
        return self._pages.pop(victim).slot

    def _bury(self, key: PageKey, slot: int) -> None:
        orphans = self._orphans.get(key, [])
        for orphan in orphans:
            if orphan.slot == slot:
                orphan.readers -= 1
                if orphan.readers <= 0:
                    orphans.remove(orphan)
                    if not orphans:
                        del self._orphans[key]
                    self._free.append(slot)
                return
        raise ValueError("a page was completed or released that nobody reserved or acquired")

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot has exactly one owner."""
        orphans = [page for pages in self._orphans.values() for page in pages]
        used = [page.slot for page in self._pages.values()] + [page.slot for page in orphans]
        assert sorted(used + self._free) == list(range(self.num_slots)), "slots lost or shared"
        evictable = {
            key
            for key, page in self._pages.items()
            if page.state is PageState.CPU and page.readers == 0
        }
        assert set(self._eviction) == evictable, "eviction order and pages disagree"
        assert all(page.readers >= 0 for page in self._pages.values()), "released too often"
