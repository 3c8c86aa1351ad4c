"""The index of CPU memory: the state and the slot of every page.

Pages are added in two phases. ``reserve_all`` allocates slots to pages while their bytes are copied
(MISSING → BEING_WRITTEN). ``commit_all`` makes the pages readable (BEING_WRITTEN → RESIDENT), and
``abort`` frees a slot again. Only readable pages can be read or evicted, and a page that a copy
reads is not evicted. ``acquire`` and ``release`` bracket a restore.

All code runs on the scheduler thread, and takes no locks. Every method is O(1) per page.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, filterfalse, islice, repeat
from operator import not_
from typing import TypeVar, cast

import numpy as np

from tiered_kv.keys import PageKey
from tiered_kv.messages import AdoptedBundle

from .base import EvictionOrder, PageState
from .cold_pages import Bundle, ColdPages

T = TypeVar("T")

SPARED_SHARE = 4
"""At most one slot in ``SPARED_SHARE`` may hold a page that an eviction passes over because no
lower tier has it yet."""
SPARED_AT_ONCE = 4096
"""Maximum number of pages that one eviction passes over, which takes about a millisecond, however
large CPU memory is."""
STAY_EVERY_S = 5.0
"""Minimum time between two measurements of the rate at which slots are allocated, seconds."""


class Turnover:
    """Measures the rate at which slots are allocated.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._measured_at = -math.inf
        self._before = 0
        self._per_s = 0.0

    def per_s(self, taken: int) -> float:
        """Measure the smoothed rate at which slots are allocated, and return it, slots per second;
        0 at first.

        Args:
            taken: slots allocated so far.
        """
        now = self._clock()
        if now - self._measured_at >= STAY_EVERY_S:
            rate = (taken - self._before) / (now - self._measured_at)  # 0 in the first call
            self._per_s += 0.5 * (rate - self._per_s)
            self._before, self._measured_at = taken, now
        return self._per_s


class PromotedPages:
    """Promoted pages that have not yet been restored to VRAM.

    Attributes:
        used: promoted pages that were restored so far.
        wasted: promoted pages that left CPU memory before they were restored.
        used_bytes, wasted_bytes: sizes of these pages on one rank, bytes.
    """

    def __init__(self) -> None:
        self.used = 0
        self.wasted = 0
        self.used_bytes = 0
        self.wasted_bytes = 0
        self._unused: dict[PageKey, int] = {}  # bytes by page

    def came_up(self, keys: Iterable[PageKey], page_bytes: int) -> None:
        """Record that pages were promoted and are readable. Each has ``page_bytes`` bytes on one
        rank."""
        self._unused.update(dict.fromkeys(keys, page_bytes))

    def read(self, keys: Collection[PageKey]) -> None:
        """Record that pages are being restored to VRAM. The promoted pages among them count as
        used."""
        pages, nbytes = self._leave(keys)
        self.used += pages
        self.used_bytes += nbytes

    def gone(self, keys: Collection[PageKey]) -> None:
        """Record that pages are no longer in CPU memory. The promoted pages among them that were
        never restored count as wasted."""
        pages, nbytes = self._leave(keys)
        self.wasted += pages
        self.wasted_bytes += nbytes

    def _leave(self, keys: Collection[PageKey]) -> tuple[int, int]:
        if not self._unused:
            return 0, 0
        left = self._unused.keys() & keys
        return len(left), sum(map(self._unused.pop, left))


class PageIndex:
    """Pages of the CPU tier.

    Args:
        num_slots: capacity of the CPU pool in pages; 0 means no CPU tier.
        eviction: chooses the readable page to evict.
        clock: monotonic seconds.

    Attributes:
        evictions: pages evicted so far.
        taken: slots allocated so far, slots of evicted pages included.
        cold: pages that are compressed or being compressed.
        promoted: pages promoted from a lower tier.
        spared: number of pages that evictions have passed over so far, because a lower tier
            should receive them first.
        unsaved: filters the given pages, and returns the pages that a lower tier lacks and would
            accept; None without lower tiers.
        on_evicted: called with the pages that are evicted.
        on_changed: called with pages that may have become readable or missing, after each change
            except ``adopt``; None if nothing observes the index.
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
        self.spared = 0
        self.unsaved: Callable[[Sequence[PageKey]], Sequence[PageKey]] | None = None
        self._eviction = eviction
        self._clock = clock
        self._ranked_at = -math.inf
        self._turnover = Turnover(clock)
        # Slots by page, one table per state, so that all pages of an order move together.
        self._being_written: dict[PageKey, int] = {}
        self._resident: OrderedDict[PageKey, int] = OrderedDict()
        self.cold = ColdPages()
        self.promoted = PromotedPages()
        self.on_evicted: Callable[[Sequence[PageKey]], None] | None = None
        self.on_changed: Callable[[Collection[PageKey]], None] | None = None
        # Copies in flight that read a slot. The slot of a forgotten page becomes free with its last
        # copy.
        self._readers = np.zeros(num_slots, np.int32)
        self._reads = self._readers.data  # faster for one slot
        self._reading = 0
        self._forgotten: set[tuple[PageKey, int]] = set()  # while being written
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._resident) + len(self._being_written) + len(self.cold.pages)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Number of references to pages, by copies in flight and by holders; 0 in an idle
        engine."""
        readers = self._reading + sum(one.readers for one in self.cold.bundles)
        return readers + len(self._being_written) + len(self._forgotten)

    def limit(self, num_slots: int) -> None:
        """Limit the pool to its first ``num_slots`` slots. Must be called before any page is added.

        Raises:
            ValueError: the index has pages.
        """
        if len(self._free) < self.num_slots:
            raise ValueError("the pool cannot be limited while its slots are in use")
        self.num_slots = min(self.num_slots, num_slots)
        self._free = list(range(self.num_slots - 1, -1, -1))

    def adopt(self, pages: Mapping[PageKey, int], bundles: Iterable[AdoptedBundle] = ()) -> None:
        """Adopt the pages of a previous engine, oldest first, with their slots, and the bundles of
        that engine. Pages and bundles in slots beyond ``num_slots`` are ignored. Must be called
        after ``limit``, and before any page is added. No page and no slot may occur twice."""
        kept = {key: slot for key, slot in pages.items() if slot < self.num_slots}
        for bundle in bundles:
            if max(bundle.slots) < self.num_slots:
                self.cold.begin(bundle.keys, bundle.slots)
                self.cold.finish(bundle.slots[0], len(bundle.slots))
        taken = {*kept.values(), *self.cold.slots}
        self._free = [slot for slot in self._free if slot not in taken]
        self._resident.update(kept)
        self._eviction.added_all([*self.cold.pages, *kept])

    # -- states -----------------------------------------------------------------

    def state(self, key: PageKey) -> PageState:
        """Return the state of a page."""
        if key in self._resident:
            return PageState.RESIDENT
        return PageState.BEING_WRITTEN if key in self._being_written else self.cold.state(key)

    def states(self, keys: Sequence[PageKey]) -> list[PageState]:
        """Return the state of each page. Fast if all are resident, or all are being written."""
        if all(map(self._resident.__contains__, keys)):
            return [PageState.RESIDENT] * len(keys)
        if all(map(self._being_written.__contains__, keys)):
            return [PageState.BEING_WRITTEN] * len(keys)
        return [*map(self.state, keys)]

    @property
    def readable(self) -> Callable[[PageKey], bool]:
        """Return a predicate that is True for readable pages and faster than ``state`` for many
        pages. It is valid until the index changes."""
        resident, cold = self._resident, self.cold.readable
        return (lambda key: key in resident or key in cold) if cold else resident.__contains__

    def unreadable(self, keys: Iterable[PageKey]) -> list[PageKey]:
        """Return the pages that are not readable, in the same order."""
        left = filterfalse(self._resident.__contains__, keys)
        cold = self.cold.readable
        return [*filterfalse(cold.__contains__, left)] if cold else [*left]

    def readable_prefix(self, keys: Sequence[PageKey], start: int, stop: int) -> int:
        """Return the end of the run of readable pages that starts at ``start``, at most
        ``stop``."""
        for at in range(start, stop, 256):
            part = keys[at : min(at + 256, stop)]
            if left := self.unreadable(part):
                return at + part.index(left[0])
        return max(start, stop)

    def missing(self, pages: Mapping[PageKey, T]) -> Mapping[PageKey, T]:
        """Return the missing pages among ``pages``, with their values, in the same order."""
        present = (self._resident.keys(), self._being_written.keys(), self.cold.pages)
        if all(not keys or keys.isdisjoint(pages) for keys in present):
            return pages
        left: Iterable[PageKey] = pages
        for keys in present:
            if keys:
                left = filterfalse(keys.__contains__, left)
        return {key: pages[key] for key in left}

    def lacks(self, keys: Sequence[PageKey]) -> list[bool]:
        """Return True for each page that is not resident."""
        return [*map(not_, map(self._resident.__contains__, keys))]

    def place(self, key: PageKey) -> int | None:
        """Return the place of a readable page: its slot, or the ``cold_place`` of its bundle.
        Returns None if the page is not readable."""
        slot = self._resident.get(key)
        return slot if slot is not None else self.cold.place(key)

    # -- saving -----------------------------------------------------------------

    def reserve_all(self, keys: Sequence[PageKey]) -> list[int]:
        """Allocate slots for pages that are about to be written (MISSING → BEING_WRITTEN), evicting
        other pages if necessary.

        Args:
            keys: distinct missing pages.

        Returns:
            A slot for each of the first pages; fewer than ``keys`` if all other slots are in use.
        """
        count = len(keys)
        slots = self._free[len(self._free) - count :] if count <= len(self._free) else self._free[:]
        del self._free[len(self._free) - len(slots) :]
        if len(slots) < count:
            slots += self._evict(count - len(slots))
        self.taken += len(slots)
        self._being_written.update(zip(keys, slots, strict=False))
        return slots

    def commit_all(self, keys: Sequence[PageKey], slots: Sequence[int]) -> Sequence[PageKey]:
        """Make pages readable (BEING_WRITTEN → RESIDENT), because they are complete on every rank.

        Returns:
            The pages that became readable. Pages that were forgotten in the meantime stay missing,
            and their slots become free.

        Raises:
            ValueError: a page was not reserved in this slot.
        """
        being_written = self._being_written
        reserved = list(map(being_written.pop, keys, repeat(None)))
        if reserved != list(slots):  # some were forgotten, and perhaps reserved again
            pages = list(zip(keys, slots, reserved, strict=True))
            for key, slot, now in pages:
                if now != slot:
                    self._bury(key, slot)
                    if now is not None:
                        being_written[key] = now
            keys = [key for key, slot, now in pages if now == slot]
            slots = [slot for _, slot, now in pages if now == slot]
        self._resident.update(zip(keys, slots, strict=True))
        self._eviction.added_all(keys)
        if self.on_changed is not None:
            self.on_changed(keys)
        return keys

    def abort(self, key: PageKey, slot: int) -> None:
        """Free the slot of a page whose copy failed on some rank (BEING_WRITTEN → MISSING).

        Raises:
            ValueError: the page was not reserved in this slot.
        """
        if self._being_written.get(key) != slot:
            self._bury(key, slot)
            return
        del self._being_written[key]
        self._free.append(slot)
        if self.on_changed is not None:
            self.on_changed((key,))

    # -- reading ----------------------------------------------------------------

    def acquire(self, key: PageKey) -> int:
        """Keep a readable page in its ``place`` until ``release``. Returns the place.

        Raises:
            KeyError: the page is not readable; the message has its state.
        """
        slot = self._resident.get(key)
        if slot is not None:
            self._reads[slot] += 1
            self._reading += 1
            return slot
        if (place := self.cold.acquire(key)) is None:
            raise KeyError(f"a page that is {self.state(key).value} cannot be read")
        return place

    def release(self, key: PageKey, place: int, *, used: bool = True) -> None:
        """End one read of a page. The last reader of a forgotten page frees its slot.

        Args:
            place: place that ``acquire`` returned.
            used: False if the page was only copied to SSD, which is no evidence of its value.

        Raises:
            ValueError: no read of a page at this place has been started.
        """
        self.release_all((key,), (place,), used)

    def acquire_all(self, keys: Sequence[PageKey]) -> list[int]:
        """Call ``acquire`` for each page, and return the places. If a page is not readable, raises
        KeyError and acquires none."""
        places = list(map(self._resident.get, keys))
        if None in places:
            for unreadable in self.unreadable(keys):
                self.acquire(unreadable)  # raises
            self._count_readers([slot for slot in places if slot is not None], 1)
            pairs = zip(keys, places, strict=True)
            cold = iter(self.cold.acquire_all([key for key, slot in pairs if slot is None]))
            return [next(cold) if slot is None else slot for slot in places]
        slots = cast("list[int]", places)
        self._count_readers(slots, 1)
        return slots

    def release_all(self, keys: Sequence[PageKey], slots: Sequence[int], used: bool = True) -> None:
        """Call ``release`` for each page."""
        if not slots:
            return
        hot, hot_slots = keys, slots
        if min(slots) < 0:
            warm = [slot >= 0 for slot in slots]
            hot, hot_slots = list(compress(keys, warm)), list(compress(slots, warm))
        self._count_readers(hot_slots, -1)
        if len(hot) < len(keys):
            for place, copies in Counter(slot for slot in slots if slot < 0).items():
                self._free += self.cold.release(place, copies)
        owners = list(map(self._resident.get, hot))
        if owners != list(hot_slots):  # some were forgotten in the meantime
            pages = list(zip(hot, hot_slots, owners, strict=True))
            left = {slot: self._reads[slot] for _, slot, owner in pages if slot != owner}
            self._free += [slot for slot, readers in left.items() if not readers]
            hot = [key for key, slot, owner in pages if slot == owner]
        if not used:
            return
        if len(hot_slots) == len(keys):
            self._eviction.touched_all(hot)
        else:
            self.touch(keys)

    def _count_readers(self, slots: Sequence[int], more: int) -> None:
        """Add ``more`` readers to each slot.

        Raises:
            ValueError: a slot would have fewer than 0 readers. In this case nothing changes.
        """
        if not slots:
            return
        places = np.fromiter(slots, np.intp, len(slots))
        if len(set(slots)) == len(slots):  # ``np.add.at`` takes 20 times as long
            self._readers[places] += more
        else:
            np.add.at(self._readers, places, more)
        if more < 0 and self._readers[places].min() < 0:
            np.add.at(self._readers, places, -more)
            raise ValueError("a page was released without being acquired")
        self._reading += more * len(slots)

    def least_valuable(self, among: int) -> Iterator[PageKey]:
        """Yield the first ``among`` pages in eviction order, except resident pages being read."""
        order = islice(self._in_order(), among)
        parts = iter(lambda: [*islice(order, 256)], [])
        return chain.from_iterable(map(self._without_readers, parts))

    def _without_readers(self, keys: Sequence[PageKey]) -> Iterator[PageKey]:
        slots = [*map(self._resident.get, keys)]
        if None in slots:
            reads, pairs = self._reads, zip(keys, slots, strict=True)
            return (key for key, slot in pairs if slot is None or not reads[slot])
        return compress(keys, (self._readers[np.asarray(slots, np.intp)] == 0).tolist())

    @property
    def superseded(self) -> Callable[[PageKey], bool]:
        """Return a predicate that is True for superseded pages, which are evicted first."""
        return self._eviction.superseded

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Mark pages as used, in the order in which they are given: the last page is evicted last.
        Skips pages that are missing or being written."""
        there = self._resident.__contains__
        if cold := self.cold.pages:
            keys = list(keys)
            there = {*filter(there, keys), *filter(cold.__contains__, keys)}.__contains__
        self._eviction.touched_all([*filter(there, keys)])

    # -- forgetting -------------------------------------------------------------

    def forget(self, key: PageKey) -> None:
        """Make a page missing, whatever its state. If a copy still reads or writes the page's slot,
        the slot becomes free after that copy. A missing page is ignored."""
        if key in self._being_written:
            self._forgotten.add((key, self._being_written.pop(key)))
            if self.on_changed is not None:
                self.on_changed((key,))
            return
        if key in self._resident:
            slot = self._resident.pop(key)
            if not self._reads[slot]:
                self._free.append(slot)
        elif key in self.cold.pages:
            self._free += self.cold.forget(key)
        else:
            return
        self._gone((key,))

    def forget_all(self, keys: Sequence[PageKey]) -> None:
        """Call ``forget`` for each page."""
        resident = [*filter(self._resident.__contains__, keys)]
        slots = [*map(self._resident.pop, resident)]
        self._free += [slot for slot in slots if not self._reads[slot]]
        self._gone(resident)
        for key in keys if len(resident) < len(keys) else ():
            self.forget(key)

    def clear(self) -> None:
        """Forget every page."""
        for key in [*self._being_written, *self._resident, *self.cold.pages]:
            self.forget(key)

    # -- compressing --------------------------------------------------------------

    def oldest_raw(self, among: int) -> list[list[PageKey]]:
        """Return the pages that no copy reads, among the ``among`` pages that became resident
        first, in stretches that are contiguous in a context. Pages of no known context are left
        out, and moved behind all other pages."""
        reads = self._reads
        first = [key for key, slot in islice(self._resident.items(), among) if not reads[slot]]
        stretches = self._eviction.stretches(first)
        in_context = set(chain.from_iterable(stretches))
        for key in filterfalse(in_context.__contains__, first):
            self._resident.move_to_end(key)
        return stretches

    def pack(self, keys: Sequence[PageKey]) -> list[int]:
        """Start to compress resident pages that no copy reads (RESIDENT → BEING_COMPRESSED).
        Returns the pages' slots, which stay allocated until ``packed`` is called. Raises KeyError
        if a page is not resident."""
        slots = [self._resident.pop(key) for key in keys]
        self.cold.begin(keys, slots)
        return slots

    def packed(self, first_slot: int, kept: int) -> None:
        """Record that the pages of a bundle were compressed into its first ``kept`` slots
        (BEING_COMPRESSED → COMPRESSED), or were lost, if ``kept`` is 0 (→ MISSING).

        Raises:
            ValueError: no bundle with this first slot is being compressed.
        """
        lost, free = self.cold.finish(first_slot, kept)
        self._free += free
        self._gone(lost)

    def stay_s(self) -> float:
        """Return the time that a page stays in CPU memory at the current rate of allocations,
        seconds; inf while no page is evicted."""
        per_s = self._turnover.per_s(self.taken)
        if not per_s or (self._free and not self.cold.compressed):
            return math.inf
        return len(self) / per_s

    # -- inside -----------------------------------------------------------------

    def _in_order(self) -> Iterator[PageKey]:
        """Yield every page that is RESIDENT, BEING_COMPRESSED or COMPRESSED, in eviction order."""
        order, now = self._eviction, self._clock()
        if now - self._ranked_at >= order.rank_every_s:
            self._ranked_at = now
            order.rank(now, self.stay_s())
        return iter(order)

    def _evict(self, count: int) -> list[int]:
        """Evict the least valuable pages that no copy reads. Returns at most ``count`` slots. Cold
        pages are evicted with their whole bundle."""
        reads, cold, resident = self._reads, self.cold, self._resident
        victims, bundles, found = list[PageKey](), dict[Bundle, None](), 0
        order = self._saved_first(self._in_order())
        while found < count and (first := [*islice(order, min(count - found, 256))]):
            places = [*map(resident.get, first)]
            if None not in places and not self._readers[np.asarray(places, np.intp)].any():
                victims += first
                found += len(first)
                continue
            for key, slot in zip(first, places, strict=True):
                if found >= count:
                    break
                if slot is not None:
                    if not reads[slot]:
                        victims.append(key)
                        found += 1
                elif (bundle := cold.droppable(key)) is not None and bundle not in bundles:
                    bundles[bundle] = None
                    found += len(bundle.slots)
        slots = list(map(resident.pop, victims))
        for bundle in bundles:
            victims += bundle.keys
            slots += cold.drop(bundle)
        self._gone(victims)
        self.evictions += len(victims)
        if self.on_evicted is not None:
            self.on_evicted(victims)
        self._free += slots[count:]
        return slots[:count]

    def _saved_first(self, order: Iterator[PageKey]) -> Iterator[PageKey]:
        """Yield the pages of an eviction order, but pass over unsaved pages at first.

        A forecast may make pages the least valuable before a lower tier has received them. They are
        yielded after all saved pages, or once ``SPARED_AT_ONCE`` pages or
        ``num_slots // SPARED_SHARE`` were passed over. The rest of the order then follows
        unchanged, so the order holds even if the tier is slow.
        """
        if self.unsaved is None:
            return order
        return chain.from_iterable(self._in_two_passes(order, self.unsaved))

    def _in_two_passes(
        self, order: Iterator[PageKey], unsaved: Callable[[Sequence[PageKey]], Sequence[PageKey]]
    ) -> Iterator[Iterable[PageKey]]:
        left = min(self.num_slots // SPARED_SHARE, SPARED_AT_ONCE)
        spared, bundled = list[PageKey](), self.cold.with_mates
        while left > 0 and (first := [*islice(order, 256)]):
            cold = self.cold.compressed > 0
            lacking = unsaved([*bundled(first)] if cold else first)
            # Superseded pages come first, and no lower tier needs them.
            if cold or self.superseded(first[0]):
                lacking = [*filterfalse(self.superseded, lacking)]
            if not lacking:
                yield first
                continue
            if len(lacking) == len(first) and not cold:
                later = first[:left]
            else:
                lacking_pages = {*bundled(lacking)} if cold else {*lacking}
                later = [*filter(lacking_pages.__contains__, first)][:left]
            left -= len(later)
            self.spared += len(later)
            spared += later
            if len(later) < len(first):
                yield filterfalse({*later}.__contains__, first)
        yield spared
        yield order

    def _gone(self, keys: Sequence[PageKey]) -> None:
        """Update the counts and the eviction order after pages became unreadable, and call
        ``on_changed``."""
        self.promoted.gone(keys)
        self._eviction.removed_all(keys)
        if self.on_changed is not None:
            self.on_changed(keys)

    def _bury(self, key: PageKey, slot: int) -> None:
        """Finish the write of a page that was forgotten in the meantime, and free its slot. Raises
        ValueError if the page was never reserved in this slot."""
        if (key, slot) not in self._forgotten:
            raise ValueError("a page was completed without being reserved")
        self._forgotten.remove((key, slot))
        self._free.append(slot)

    def check_integrity(self) -> None:
        """Raise AssertionError if a slot does not have exactly one owner, or if the states of
        pages, the eviction order or the numbers of readers are inconsistent."""
        read = set(self._readers.nonzero()[0].tolist()).difference(self._resident.values())
        orphans = [*read, *(slot for _, slot in self._forgotten)]
        used = [*self._being_written.values(), *self._resident.values(), *orphans, *self.cold.slots]
        assert sorted(used + self._free) == list(range(self.num_slots)), "slots lost or shared"
        states = [*self._being_written, *self._resident, *self.cold.pages]
        assert len(set(states)) == len(states), "a page in two states"
        assert set(self._in_order()) == {*self._resident, *self.cold.pages}, (
            "pages not in the order"
        )
        assert (self._readers >= 0).all(), "released too often"
        assert self._readers.sum() == self._reading, "readers are miscounted"
        self.cold.check_integrity()
