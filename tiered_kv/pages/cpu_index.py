"""The index: which pages exist, in which state, in which slot.

Mutation is in two phases. ``reserve_all`` gives pages slots while their bytes travel
(absent → SAVING), ``commit_all`` makes them visible (SAVING → CPU) and ``abort`` takes a
slot back. Only a page in state CPU can be read or evicted, and only while nobody
reads it: ``acquire``/``release`` bracket a restore.

Lives on the scheduler thread and takes no locks. Every method is O(1) per page.

Pages that came up from a tier below, until somebody uses them or they are gone.

Whether promotions are worth what they read is told by it. Lives on the scheduler thread, like the
index that owns it.

Rate at which slots of CPU memory are taken.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse, islice, repeat

from tiered_kv.keys import PageKey
from tiered_kv.messages import AdoptedBundle

from .base import EvictionOrder
from .cold_pages import Bundle, ColdPages, cold_place

STAY_EVERY_S = 5.0
"""Least time between two measurements."""


class Turnover:
    """Measures how fast slots are taken.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._measured_at = -math.inf
        self._before = 0
        self._per_s = 0.0

    def per_s(self, taken: int) -> float:
        """Slots a second, smoothed; 0 at first.

        Args:
            taken: slots taken so far.
        """
        now = self._clock()
        if now - self._measured_at >= STAY_EVERY_S:
            rate = (taken - self._before) / (now - self._measured_at)  # 0 at first
            self._per_s += 0.5 * (rate - self._per_s)
            self._before, self._measured_at = taken, now
        return self._per_s


class PromotedPages:
    """Pages that came up and were not restored to VRAM yet.

    Attributes:
        used: pages that were restored so far.
        wasted: pages that were gone from CPU memory before that.
        used_bytes, wasted_bytes: the same in bytes, on one rank.
    """

    def __init__(self) -> None:
        self.used = 0
        self.wasted = 0
        self.used_bytes = 0
        self.wasted_bytes = 0
        self._unused: dict[PageKey, int] = {}  # bytes by page

    def came_up(self, keys: Iterable[PageKey], page_bytes: int) -> None:
        """Pages of that size came up, and are readable."""
        self._unused.update(dict.fromkeys(keys, page_bytes))

    def read(self, keys: Collection[PageKey]) -> None:
        """Pages are restored to VRAM."""
        pages, nbytes = self._leave(keys)
        self.used += pages
        self.used_bytes += nbytes

    def gone(self, keys: Collection[PageKey]) -> None:
        """Pages are no longer in CPU memory."""
        pages, nbytes = self._leave(keys)
        self.wasted += pages
        self.wasted_bytes += nbytes

    def _leave(self, keys: Collection[PageKey]) -> tuple[int, int]:
        if not self._unused:
            return 0, 0
        left = self._unused.keys() & keys
        return len(left), sum(map(self._unused.pop, left))


@dataclass(slots=True)
class _Orphan:
    """A forgotten page whose bytes still travel: its slot is free once they stop."""

    slot: int
    readers: int


class PageIndex:
    """Pages of the CPU tier.

    Args:
        num_slots: capacity of the CPU pool in pages; 0 means no CPU tier.
        eviction: chooses which readable page makes room.
        clock: monotonic seconds.

    Attributes:
        evictions: pages evicted so far.
        taken: slots given out so far, evicted ones included.
        cold: pages that are kept compressed.
        promoted: pages that came up from a tier below.
        on_evicted: told of pages that are evicted.
    """

    def __init__(
        self,
        num_slots: int,
        eviction: EvictionOrder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_slots = num_slots
        self.evictions = 0
        self.taken = 0
        self._eviction = eviction
        self._clock = clock
        self._ranked_at = -math.inf
        self._turnover = Turnover(clock)
        # Slots by page. Kept apart by state, so that whole orders move at once.
        self._saving: dict[PageKey, int] = {}
        self._cpu: OrderedDict[PageKey, int] = OrderedDict()
        self.cold = ColdPages()
        self.promoted = PromotedPages()
        self.on_evicted: Callable[[Sequence[PageKey]], None] | None = None
        self._readers: dict[PageKey, int] = {}
        self._orphans: dict[PageKey, list[_Orphan]] = {}
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._cpu) + len(self._saving) + len(self.cold.pages)

    @property
    def raw_pages(self) -> int:
        """Number of readable pages that are not compressed."""
        return len(self._cpu)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Number of references on pages: copies under way, and holders. 0 in an idle engine."""
        orphans = chain.from_iterable(self._orphans.values())
        readers = sum(self._readers.values()) + sum(one.readers for one in self.cold.bundles)
        return readers + len(self._saving) + sum(one.readers for one in orphans)

    def limit(self, num_slots: int) -> None:
        """Use the first ``num_slots`` slots only. Before the first page.

        Raises:
            ValueError: there are pages.
        """
        if len(self._free) < self.num_slots:
            raise ValueError("slots are in use")
        self.num_slots = min(self.num_slots, num_slots)
        self._free = list(range(self.num_slots - 1, -1, -1))

    def adopt(self, pages: Mapping[PageKey, int], bundles: Iterable[AdoptedBundle] = ()) -> None:
        """Take over pages with their slots, and compressed ones, oldest first. After ``limit``,
        before any page. No page is there twice, nor any slot."""
        kept = {key: slot for key, slot in pages.items() if slot < self.num_slots}
        for bundle in bundles:
            if max(bundle.slots) < self.num_slots:
                self.cold.adopt(bundle.keys, bundle.slots)
        taken = {*kept.values(), *self.cold.slots}
        self._free = [slot for slot in self._free if slot not in taken]
        self._cpu.update(kept)
        self._eviction.added_all([*self.cold.pages, *kept])

    def holds(self, key: PageKey, slot: int) -> bool:
        """True if the page is readable in that slot, and not compressed."""
        return self._cpu.get(key) == slot

    def readable(self, key: PageKey) -> bool:
        """True if the page is in CPU memory, whole."""
        return key in self._cpu or key in self.cold

    @property
    def is_readable(self) -> Callable[[PageKey], bool]:
        """``readable`` for many pages at once: a test that is good until the next change."""
        return self.readable if self.cold else self._cpu.__contains__

    def held(self, key: PageKey) -> bool:
        """True if the page is readable, or will be once it is compressed."""
        return key in self._cpu or key in self.cold.pages

    def known(self, key: PageKey) -> bool:
        """True if the page is readable or moving. A copy that brings it here may still fail, so
        this only means that another copy cannot be ordered now."""
        return key in self._cpu or key in self._saving or key in self.cold.pages

    def moving(self, key: PageKey) -> bool:
        """True if the page is being copied to CPU memory, or compressed there. It becomes readable
        unless that fails."""
        return key in self._saving or self.being_packed(key)

    def place(self, key: PageKey) -> int | None:
        """Return the place where ``acquire`` would hold the page; None if it is not readable."""
        if key in self.cold:
            return cold_place(self.cold.first_slot(key))
        return self._cpu.get(key)

    def unknown(self, pages: Mapping[PageKey, int]) -> Mapping[PageKey, int]:
        """The pages that are not known, with their values, in the same order."""
        places = (self._cpu.keys(), self._saving.keys(), self.cold.pages)
        if all(place.isdisjoint(pages) for place in places):
            return pages
        return {key: it for key, it in pages.items() if not self.known(key)}

    def resident_prefix(self, keys: Sequence[PageKey], start: int, stop: int) -> int:
        """End of the run of readable pages that begins at ``start``, at most ``stop``."""
        there = self.is_readable
        for at in range(start, stop, 256):
            part = keys[at : min(at + 256, stop)]
            if not all(map(there, part)):
                return at + next(i for i, key in enumerate(part) if not there(key))
        return max(start, stop)

    # -- saving -----------------------------------------------------------------

    def reserve_all(self, keys: Sequence[PageKey]) -> list[int]:
        """absent → SAVING: slots for pages about to be saved, evicting if need be.

        Args:
            keys: distinct, and none of them known.

        Returns:
            A slot for each of the first pages; fewer where all others are read or written.
        """
        count = len(keys)
        slots = self._free[len(self._free) - count :] if count <= len(self._free) else self._free[:]
        del self._free[len(self._free) - len(slots) :]
        if len(slots) < count:
            slots += self._evict(count - len(slots))
        self.taken += len(slots)
        self._saving.update(zip(keys, slots, strict=False))
        return slots

    def commit_all(self, keys: Sequence[PageKey], slots: Sequence[int]) -> int:
        """SAVING → CPU: the bytes are whole on every rank; returns how many are readable now.

        Pages forgotten meanwhile stay so; their slots are free again.
        """
        saving = self._saving
        reserved = [saving.pop(key, None) for key in keys]
        if reserved != list(slots):  # some were forgotten, and perhaps reserved again
            pages = list(zip(keys, slots, reserved, strict=True))
            for key, slot, now in pages:
                if now != slot:
                    self._bury(key, slot)
                    if now is not None:
                        saving[key] = now
            keys = [key for key, slot, now in pages if now == slot]
            slots = [slot for _, slot, now in pages if now == slot]
        self._cpu.update(zip(keys, slots, strict=True))
        self._eviction.added_all(keys)
        return len(keys)

    def abort(self, key: PageKey, slot: int) -> None:
        """SAVING → absent: the copy failed somewhere."""
        if self._saving.get(key) != slot:
            self._bury(key, slot)
            return
        del self._saving[key]
        self._free.append(slot)

    # -- reading ----------------------------------------------------------------

    def acquire(self, key: PageKey) -> int:
        """Place of a readable page, which stays put until ``release``: its slot, or, of a cold
        page, ``cold_place`` of its bundle.

        Raises:
            KeyError: it is absent.
            ValueError: it is on its way.
        """
        if key in self._saving:
            raise ValueError("page is saving, not readable")
        if key in self.cold:
            return cold_place(self.cold.acquire(key))
        slot = self._cpu[key]
        self._readers[key] = self._readers.get(key, 0) + 1
        return slot

    def release(self, key: PageKey, slot: int, *, used: bool = True) -> None:
        """One reader less. A page forgotten while read gives its slot back with the last.

        Args:
            used: False if it was only copied to SSD, which is no sign of its value.
        """
        if slot < 0:
            self._free += self.cold.release(cold_place(slot))
            if used and (key in self.cold.pages or key in self._cpu):
                self._eviction.touched(key)
            return
        if self._cpu.get(key) != slot or key not in self._readers:
            self._bury(key, slot)
            return
        self._readers[key] -= 1
        if self._readers[key] == 0:
            del self._readers[key]
        if used:
            self._eviction.touched(key)

    def acquire_all(self, keys: Sequence[PageKey]) -> list[int]:
        """``acquire`` for each page; either for all of them or, if it raises, for none."""
        try:
            slots = list(map(self._cpu.__getitem__, keys))
        except KeyError:
            for lacking in filterfalse(self.readable, keys):
                self.acquire(lacking)  # says what is wrong
            return [self.acquire(key) for key in keys]
        readers, once = self._readers, dict.fromkeys(keys, 1)
        if len(once) == len(keys) and readers.keys().isdisjoint(once):
            readers.update(once)
        else:
            readers.update((key, readers.get(key, 0) + 1) for key in keys)
        return slots

    def release_all(self, keys: Sequence[PageKey], slots: Sequence[int], used: bool = True) -> None:
        """``release`` for each page."""
        counts = list(map(self._readers.pop, keys, repeat(0)))
        if counts.count(1) == len(keys) and list(map(self._cpu.get, keys)) == list(slots):
            self._eviction.touched_all(keys if used else ())
        else:  # of others too, or forgotten meanwhile
            self._readers.update((key, n) for key, n in zip(keys, counts, strict=True) if n)
            for key, slot in zip(keys, slots, strict=True):
                self.release(key, slot, used=used)

    def least_valuable(self, among: int) -> Iterator[PageKey]:
        """The first ``among`` pages to be evicted, in that order, but for those in use."""
        readers = self._readers
        return (key for key in islice(self._in_order(), among) if key not in readers)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Mark pages as used, least valuable first: the last one is evicted last."""
        cpu, cold = self._cpu, self.cold.pages
        self._eviction.touched_all([key for key in keys if key in cpu or key in cold])

    # -- forgetting -------------------------------------------------------------

    def forget(self, key: PageKey) -> None:
        """Any state → absent. A slot still being read or written is freed when that ends."""
        if key in self._saving:
            self._orphans.setdefault(key, []).append(_Orphan(self._saving.pop(key), 1))
        elif key in self._readers:
            self._gone((key,))
            orphan = _Orphan(self._cpu.pop(key), self._readers.pop(key))
            self._orphans.setdefault(key, []).append(orphan)
        elif key in self._cpu:
            self._gone((key,))
            self._free.append(self._cpu.pop(key))
        elif key in self.cold.pages:
            self._gone((key,))
            self._free += self.cold.forget(key)

    def clear(self) -> None:
        """Forget every page."""
        for key in [*self._saving, *self._cpu, *self.cold.pages]:
            self.forget(key)

    # -- compressing --------------------------------------------------------------

    def oldest_raw(self, among: int) -> list[list[PageKey]]:
        """Pages that nobody reads of the first ``among`` that got slots of their own, in stretches
        that follow each other in a context. Those of no known context are looked at last the next
        time."""
        readers = self._readers
        first = list(islice(self._cpu, among))
        stretches = self._eviction.stretches([key for key in first if key not in readers])
        known = readers.keys() | set(chain.from_iterable(stretches))
        for key in first:
            if key not in known:
                self._cpu.move_to_end(key)
        return stretches

    def pack(self, keys: Sequence[PageKey]) -> list[int]:
        """CPU → PACKING: pages that nobody reads; gives their slots, which stay put until
        ``packed``."""
        slots = [self._cpu.pop(key) for key in keys]
        self.cold.begin(keys, slots)
        return slots

    @property
    def packing(self) -> int:
        """Pages that are being compressed: they cannot be read, for a few milliseconds."""
        return len(self.cold.pages) - len(self.cold)

    def being_packed(self, key: PageKey) -> bool:
        """True if the page is being compressed."""
        return key in self.cold.pages and key not in self.cold

    def packed(self, first_slot: int, kept: int) -> None:
        """PACKING → COLD, in the first ``kept`` slots; → absent if that is 0."""
        lost, free = self.cold.finish(first_slot, kept)
        self._free += free
        self._gone(lost)

    def stay_s(self) -> float:
        """Seconds that a page stays here at the present rate; infinite while none is evicted."""
        per_s = self._turnover.per_s(self.taken)
        if not per_s or (self._free and not self.cold):
            return math.inf
        return len(self) / per_s

    # -- inside -----------------------------------------------------------------

    def _in_order(self) -> Iterator[PageKey]:
        """Every readable page, the first to be evicted first."""
        order, now = self._eviction, self._clock()
        if now - self._ranked_at >= order.rank_every_s:
            self._ranked_at = now
            order.rank(now, self.stay_s())
        yield from order

    def _evict(self, count: int) -> list[int]:
        """Slots of the least valuable pages that nobody reads, at most ``count``. Cold pages go
        with their bundles."""
        readers, cold, cpu = self._readers, self.cold, self._cpu
        victims, bundles, found = list[PageKey](), dict[Bundle, None](), 0
        for key in self._in_order():
            if found >= count:
                break
            if key in cpu:
                if key not in readers:
                    victims.append(key)
                    found += 1
            elif (bundle := cold.droppable(key)) is not None and bundle not in bundles:
                bundles[bundle] = None
                found += len(bundle.slots)
        slots = [cpu.pop(key) for key in victims]
        for bundle in bundles:
            victims += bundle.keys
            slots += cold.drop(bundle)
        self._gone(victims)
        self.evictions += len(victims)
        if self.on_evicted is not None:
            self.on_evicted(victims)
        self._free += slots[count:]
        return slots[:count]

    def _gone(self, keys: Sequence[PageKey]) -> None:
        """Pages are no longer readable."""
        self.promoted.gone(keys)
        for key in keys:
            self._eviction.removed(key)

    def _bury(self, key: PageKey, slot: int) -> None:
        """A copy of a forgotten page has ended."""
        orphans = self._orphans.get(key, [])
        orphan = next((orphan for orphan in orphans if orphan.slot == slot), None)
        if orphan is None:
            raise ValueError("a page was completed or released that nobody reserved or acquired")
        orphan.readers -= 1
        if orphan.readers == 0:
            orphans.remove(orphan)
            self._free.append(slot)
            if not orphans:
                del self._orphans[key]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot has exactly one owner."""
        orphans = [orphan.slot for orphans in self._orphans.values() for orphan in orphans]
        used = [*self._saving.values(), *self._cpu.values(), *orphans, *self.cold.slots]
        assert sorted(used + self._free) == list(range(self.num_slots)), "slots lost or shared"
        states = [*self._saving, *self._cpu, *self.cold.pages]
        assert len(set(states)) == len(states), "a page in two states"
        assert set(self._in_order()) == {*self._cpu, *self.cold.pages}, "pages not in the order"
        assert self._readers.keys() <= self._cpu.keys(), "an absent page is being read"
        assert all(count > 0 for count in self._readers.values()), "released too often"
        self.cold.check_integrity()
