"""The conformance suite of page indexes with compressed pages."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tiered_kv.keys import PageKey
from tiered_kv.pages.base import PageState
from tiered_kv.pages.cold_pages import cold_place
from tiered_kv.pages.cpu_index import PageIndex

from .index import ALL, CheckedIndex

A, B, C, D, E = ALL
MORE = tuple(PageKey(name.encode() * 20) for name in "FGHIJ")


class ColdIndexConformance:
    """Conformance suite of page indexes with compressed pages. Create a subclass, name it ``Test…``
    and define ``make_index``.

    No test depends on which of several evictable pages is evicted.
    """

    def make_index(self, num_slots: int) -> PageIndex:
        """Return an empty index with that many slots."""
        raise NotImplementedError

    @pytest.fixture
    def index(self) -> CheckedIndex:
        """An index with four slots."""
        return CheckedIndex(self.make_index(4))

    def cold(self, index: CheckedIndex, *keys: PageKey, kept: int) -> list[int]:
        """Save pages and compress them together.

        Args:
            kept: number of slots that the compressed pages occupy.

        Returns:
            The former slots of the pages.
        """
        index.put(*keys)
        slots: list[int] = index.pack(keys)
        index.packed(slots[0], kept)
        return slots

    # -- packing ------------------------------------------------------------------

    def test_a_page_goes_through_every_state(self, index: CheckedIndex) -> None:
        states, places = [index.state(A)], [index.place(A)]
        slot = index.reserve(A)
        for step in (
            lambda: index.commit(A, slot),
            lambda: index.pack([A]),
            lambda: index.packed(slot, 1),
        ):
            states.append(index.state(A))
            places.append(index.place(A))
            step()
        assert [*states, index.state(A)] == list(PageState)
        assert [*places, index.place(A)] == [None, None, slot, None, cold_place(slot)]
        assert [state.readable for state in PageState] == [False, False, True, False, True]
        assert [state.moving for state in PageState] == [False, True, False, True, False]

        index.forget(A)
        assert index.state(A) is PageState.MISSING

    def test_packed_pages_are_read_from_where_they_are_and_free_slots(
        self, index: CheckedIndex
    ) -> None:
        slots = index.put(A, B, C)
        assert index.pack([C, A, B]) == [slots[2], slots[0], slots[1]]
        index.packed(slots[2], 2)

        assert index.free_slots == 2
        assert index.readable_prefix([A, B, C, D], 0, 4) == 3
        assert {index.acquire(key) for key in (A, B, C)} == {cold_place(slots[2])}
        assert (len(index), index.cold.compressed, index.cold.being_compressed) == (3, 3, 0)
        for key in (A, B, C):
            index.release(key, cold_place(slots[2]))
        assert index.free_slots == 2

    def test_a_page_that_is_being_compressed_is_not_missing_and_cannot_be_read(
        self, index: CheckedIndex
    ) -> None:
        slots = index.put(A, B)
        index.pack([A, B])

        assert index.state(A) is index.state(B) is PageState.BEING_COMPRESSED
        assert (len(index), index.cold.being_compressed, index.free_slots) == (2, 2, 2)
        assert dict(index.missing({A: 1, C: 2, B: 3})) == {C: 2}
        assert index.readable_prefix([A, B], 0, 2) == 0
        for keys in ([A], [A, B]):
            with pytest.raises(KeyError, match="being compressed"):
                index.acquire_all(keys)

        index.packed(slots[0], 1)
        assert index.state(A) is PageState.COMPRESSED
        assert index.acquire_all([A, B]) == [cold_place(slots[0])] * 2

    def test_nothing_is_acquired_if_one_page_is_being_packed(self, index: CheckedIndex) -> None:
        self.cold(index, A, kept=1)
        index.put(B, C)
        index.pack([C])
        with pytest.raises(KeyError, match="being compressed"):
            index.acquire_all([A, B, C])
        index.put(D)
        index.reserve_all([E, MORE[0], MORE[1]])
        assert index.evictions == 3, "the failed call acquired no page"

    def test_pages_that_do_not_shrink_keep_their_slots(self, index: CheckedIndex) -> None:
        self.cold(index, A, B, kept=2)
        assert index.free_slots == 2
        index.forget(A)
        assert index.free_slots == 2, "a bundle keeps its slots until its last page is forgotten"
        index.forget(B)
        assert index.free_slots == 4

    def test_pages_whose_packing_failed_are_gone(self, index: CheckedIndex) -> None:
        self.cold(index, A, B, kept=0)
        assert (len(index), index.free_slots, index.evictions) == (0, 4, 0)
        assert index.state(A) is PageState.MISSING
        index.put(A, B, C, D)

    def test_a_page_in_a_bundle_is_not_packed_again(self, index: CheckedIndex) -> None:
        self.cold(index, A, B, kept=1)
        with pytest.raises(KeyError):
            index.pack([A])

    def test_what_nobody_packs_is_not_packed(self, index: CheckedIndex) -> None:
        (first, *_) = self.cold(index, A, B, kept=1)
        for slot in (first, first + 1):
            with pytest.raises(ValueError, match="that was not"):
                index.packed(slot, 1)

    def test_what_nobody_acquired_is_not_released(self, index: CheckedIndex) -> None:
        slots = self.cold(index, A, B, kept=1)
        for slot in slots:
            with pytest.raises(ValueError, match="without being"):
                index.release(A, cold_place(slot))

    # -- forgetting -----------------------------------------------------------------

    def test_a_bundle_forgotten_while_it_is_packed_keeps_its_slots_until_then(
        self, index: CheckedIndex
    ) -> None:
        slots = index.put(A, B, C, D)
        index.pack(ALL[:4])
        index.clear()
        assert (len(index), index.free_slots) == (0, 0)
        assert index.reserve(E) is None, "all slots are being written"

        index.packed(slots[0], 2)

        assert (len(index), index.free_slots) == (0, 4)

    def test_a_page_forgotten_while_it_is_packed_stays_forgotten(self, index: CheckedIndex) -> None:
        slots = index.put(A, B, C)
        index.pack([A, B, C])
        index.forget(A)
        anew = index.reserve(A)
        assert anew not in slots

        index.packed(slots[0], 1)

        assert index.state(A) is PageState.BEING_WRITTEN
        assert index.commit(A, anew)
        assert index.acquire(A) == anew
        assert index.acquire(B) == cold_place(slots[0])

    def test_a_bundle_that_is_read_keeps_its_slots_when_all_of_it_is_forgotten(
        self, index: CheckedIndex
    ) -> None:
        (first, *_) = self.cold(index, A, B, C, kept=2)
        for key in (A, A, B):
            index.acquire(key)
        index.clear()
        assert (len(index), index.free_slots) == (0, 2)
        for key in (A, B):
            index.release(key, cold_place(first))
            assert index.free_slots == 2
        index.release(A, cold_place(first), used=False)
        assert index.free_slots == 4

    def test_a_page_saved_anew_is_not_released_by_the_readers_of_its_bundle(
        self, index: CheckedIndex
    ) -> None:
        (first, *_) = self.cold(index, A, B, kept=1)
        index.acquire(A)
        index.forget(A)
        (anew,) = index.put(A)
        assert index.acquire(A) == anew

        index.release(A, cold_place(first))

        assert index.acquire(B) == cold_place(first), "B is still readable"
        index.put(C, D)
        assert index.reserve(E) is not None
        assert index.state(A) is not PageState.MISSING, "the new page has a reader"
        index.release(A, anew)

    def test_a_page_packed_anew_is_released_from_the_bundle_it_was_read_in(
        self, index: CheckedIndex
    ) -> None:
        (first, *_) = self.cold(index, A, B, kept=1)
        index.acquire(A)
        index.forget(A)
        (second,) = self.cold(index, A, kept=1)
        assert index.acquire(A) == cold_place(second) != cold_place(first)
        index.forget(B)
        assert index.free_slots == 2
        index.release(A, cold_place(first))
        assert index.free_slots == 3, "the first bundle is freed with its last reader"
        assert index.readable(A)
        index.release(A, cold_place(second))
        assert index.free_slots == 3

    # -- eviction -------------------------------------------------------------------

    def test_a_bundle_is_evicted_as_a_whole(self, index: CheckedIndex) -> None:
        self.cold(index, A, B, C, D, kept=4)
        assert index.reserve(E) is not None
        assert [*index.missing(dict.fromkeys(ALL))] == [A, B, C, D]
        assert (index.evictions, index.free_slots) == (4, 3)

    def test_a_bundle_in_use_is_not_evicted(self, index: CheckedIndex) -> None:
        (first, *_) = self.cold(index, A, B, kept=2)
        index.acquire(A)
        index.put(C, D)
        index.pack([C])
        slots = index.reserve_all([E, *MORE[:2]])
        assert len(slots) == 1, "only D can be evicted"
        assert index.state(D) is PageState.MISSING
        assert not index.missing(dict.fromkeys((A, B, C)))
        index.release(A, cold_place(first))
        assert len(index.reserve_all(MORE[:2])) == 2
        assert [*index.missing(dict.fromkeys((A, B, C)))] == [A, B]
        assert index.state(C) is PageState.BEING_COMPRESSED

    def test_touching_cold_pages_never_changes_what_may_be_evicted(
        self, index: CheckedIndex
    ) -> None:
        self.cold(index, A, B, kept=1)
        index.put(C)
        index.pack([C])
        index.touch([*reversed(ALL), *MORE])
        index.put(D)
        assert len(index.reserve_all([E, *MORE])) == 3, (
            "all slots except the one of the page that is being compressed"
        )
        assert index.state(C) is not PageState.MISSING

    # -- all of it ------------------------------------------------------------------

    @pytest.mark.parametrize("seed", range(12))
    def test_whatever_happens_no_slot_is_written_that_somebody_needs(self, seed: int) -> None:
        script = _Script(self.make_index(6), random.Random(seed))
        for _ in range(600):
            script.act()
        script.end()


class _Script:
    """Makes random calls of an index, and tracks the content of each slot: a page, a part of a
    bundle, or garbage.
    """

    def __init__(self, index: PageIndex, rng: random.Random) -> None:
        self.index, self.rng = CheckedIndex(index), rng
        self.holds: dict[int, object] = {}
        self.saving: list[tuple[PageKey, int]] = []
        self.packing: list[tuple[Sequence[PageKey], list[int]]] = []
        self.reading: list[tuple[PageKey, int, object]] = []
        self.slots_of: dict[int, list[int]] = {}  # pages of the bundle that starts in this slot

    def act(self) -> None:
        key, do = self.rng.choice([*ALL, *MORE]), self.rng.randrange(12)
        if do <= 3:
            self.reserve()
        elif do <= 5 and self.saving:
            self.end_save(self.saving.pop(self.rng.randrange(len(self.saving))))
        elif do == 6:
            self.pack()
        elif do == 7 and self.packing:
            self.end_pack(self.packing.pop(self.rng.randrange(len(self.packing))))
        elif do == 8 and self.index.readable(key):
            place = self.index.acquire(key)
            self.reading.append((key, place, self.content(key, place)))
        elif do == 9 and self.reading:
            self.release(self.reading.pop(self.rng.randrange(len(self.reading))))
        elif do == 10:
            self.index.touch(self.rng.sample(ALL, 3))
        elif do == 11 and self.rng.random() < 0.3:
            self.index.clear() if self.rng.random() < 0.1 else self.index.forget(key)

    def content(self, key: PageKey, place: int) -> object:
        """Check that ``place`` contains the complete page, or a complete bundle that includes the
        page. Returns the page's key, or the object that represents the bundle."""
        if place >= 0:
            assert self.holds[place] == key, "a wrong page"
            return key
        first = cold_place(place)
        mark = self.holds[first]
        assert isinstance(mark, dict), "no bundle"
        assert key in mark, "another bundle"
        assert all(self.holds[slot] is mark for slot in self.slots_of[first]), "a torn bundle"
        return mark

    def reserve(self) -> None:
        keys = [*self.index.missing(dict.fromkeys(self.rng.sample([*ALL, *MORE], 3)))]
        slots = self.index.reserve_all(keys)
        self.saving += zip(keys, slots, strict=False)
        self.holds.update(dict.fromkeys(slots, "garbage"))

    def end_save(self, page: tuple[PageKey, int]) -> None:
        assert self.holds[page[1]] == "garbage", "a slot was given twice"
        if self.rng.random() < 0.2:
            self.index.abort(*page)
        else:
            self.holds[page[1]] = page[0]
            self.index.commit(*page)

    def pack(self) -> None:
        read = {key for key, _, _ in self.reading}
        idle = [
            key
            for key in (*ALL, *MORE)
            if self.index.state(key) is PageState.RESIDENT and key not in read
        ]
        keys = self.rng.sample(idle, min(len(idle), self.rng.randint(1, 4)))
        if keys:
            slots = self.index.pack(keys)
            assert all(self.holds[slot] == key for key, slot in zip(keys, slots, strict=True))
            self.holds.update(dict.fromkeys(slots, "being packed"))
            self.packing.append((keys, slots))

    def end_pack(self, bundle: tuple[Sequence[PageKey], list[int]]) -> None:
        keys, slots = bundle
        assert all(self.holds[slot] == "being packed" for slot in slots), "a slot was given twice"
        kept = self.rng.randint(0, len(slots))
        mark = dict.fromkeys(keys)
        self.holds.update(dict.fromkeys(slots[:kept], mark))
        self.slots_of[slots[0]] = slots[:kept]
        self.index.packed(slots[0], kept)

    def release(self, reader: tuple[PageKey, int, object]) -> None:
        key, place, found = reader
        now = self.content(key, place)
        assert now is found or now == key, "a page changed under its reader"
        self.index.release(key, place, used=self.rng.random() < 0.5)

    def end(self) -> None:
        for key in (*ALL, *MORE):
            if self.index.readable(key):
                place = self.index.acquire(key)
                self.reading.append((key, place, self.content(key, place)))
        for page in self.saving:
            self.end_save(page)
        for bundle in self.packing:
            self.end_pack(bundle)
        for reader in self.reading:
            self.release(reader)
        self.index.clear()
        assert self.index.free_slots == self.index.num_slots
