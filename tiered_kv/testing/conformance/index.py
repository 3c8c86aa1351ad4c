"""The conformance suite of page indexes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tiered_kv.keys import PageKey
from tiered_kv.pages.base import PageState
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.testing.single_pages import commit, reserve

A, B, C, D, E = (PageKey(name.encode() * 20) for name in "ABCDE")
ALL = (A, B, C, D, E)


class CheckedIndex:
    """An index that runs ``check_integrity`` after each call, even if the call raised.

    It has the methods of the index, and methods for single pages.
    """

    def __init__(self, index: PageIndex) -> None:
        self.unchecked = index

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.unchecked, name)
        if not callable(attribute):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return attribute(*args, **kwargs)
            finally:
                self.unchecked.check_integrity()

        return call

    def __len__(self) -> int:
        return len(self.unchecked)

    def reserve(self, key: PageKey) -> Any:
        return reserve(self, key)

    def commit(self, key: PageKey, slot: int) -> bool:
        return commit(self, key, slot)

    def put(self, *keys: PageKey) -> list[int]:
        """Reserve slots for pages, and commit the pages. Returns their slots."""
        slots = [self.reserve(key) for key in keys]
        for key, slot in zip(keys, slots, strict=True):
            assert self.commit(key, slot)
        return slots


class IndexConformance:
    """Conformance suite of page indexes. Create a subclass, name it ``Test…`` and define
    ``make_index``.

    No test depends on which of several evictable pages is evicted.
    """

    def make_index(self, num_slots: int) -> PageIndex:
        """Return an empty index with that many slots."""
        raise NotImplementedError

    @pytest.fixture
    def make(self) -> Iterator[Callable[[int], CheckedIndex]]:
        made: list[PageIndex] = []

        def make(num_slots: int) -> CheckedIndex:
            made.append(self.make_index(num_slots))
            return CheckedIndex(made[-1])

        yield make
        for index in made:
            index.check_integrity()

    @pytest.fixture
    def index(self, make: Callable[[int], CheckedIndex]) -> CheckedIndex:
        """An index with three slots."""
        return make(3)

    # -- saving -------------------------------------------------------------------

    def test_a_page_is_read_only_once_it_is_whole(self, index: CheckedIndex) -> None:
        assert index.state(A) is PageState.MISSING
        slot = index.reserve(A)
        assert index.state(A) is PageState.BEING_WRITTEN
        assert index.readable_prefix([A], 0, 1) == 0
        with pytest.raises(KeyError, match="being written"):
            index.acquire(A)

        assert index.commit(A, slot) is True

        assert index.state(A) is PageState.RESIDENT
        assert index.readable_prefix([A], 0, 1) == 1
        assert index.acquire(A) == slot
        index.release(A, slot)

    def test_a_page_whose_copy_failed_was_never_there(self, index: CheckedIndex) -> None:
        slot = index.reserve(A)

        index.abort(A, slot)

        assert index.state(A) is PageState.MISSING
        assert (len(index), index.free_slots) == (0, 3)
        with pytest.raises(KeyError):
            index.acquire(A)

    def test_no_two_pages_share_a_slot(self, index: CheckedIndex) -> None:
        assert {index.reserve(key) for key in (A, B, C)} == {0, 1, 2}
        assert index.free_slots == 0

    def test_an_index_without_slots_knows_no_page(self, make: Callable[[int], Any]) -> None:
        index = make(0)
        assert index.reserve(A) is None
        assert index.state(A) is PageState.MISSING

    @pytest.mark.parametrize("ending", ["commit", "abort", "release"])
    def test_what_nobody_began_cannot_end(self, index: CheckedIndex, ending: str) -> None:
        with pytest.raises(ValueError, match="without being"):
            getattr(index, ending)(A, 0)
        (slot,) = index.put(A)
        with pytest.raises(ValueError, match="without being"):
            getattr(index, ending)(A, slot + 1)

    @pytest.mark.parametrize("ending", ["commit", "abort"])
    def test_a_save_ends_once(self, index: CheckedIndex, ending: str) -> None:
        (slot,) = index.put(A)
        with pytest.raises(ValueError, match="without being"):
            getattr(index, ending)(A, slot)
        assert index.state(A) is PageState.RESIDENT

    # -- eviction -----------------------------------------------------------------

    def test_a_page_makes_room_when_all_slots_are_taken(self, index: CheckedIndex) -> None:
        index.put(A, B, C)

        slot = index.reserve(D)

        assert slot in (0, 1, 2)
        gone = [key for key in (A, B, C) if index.state(key) is PageState.MISSING]
        assert len(gone) == index.evictions == 1
        assert len(index) == 3
        index.commit(D, slot)

    def test_a_page_on_its_way_is_never_evicted(self, index: CheckedIndex) -> None:
        slots = {key: index.reserve(key) for key in (A, B)}
        index.put(C)

        assert index.reserve(D) is not None, "C is evicted"
        assert index.reserve(E) is None, "all three are being written"

        assert index.state(C) is PageState.MISSING
        assert index.state(E) is PageState.MISSING
        for key, slot in slots.items():
            assert index.commit(key, slot)

    def test_a_page_that_was_only_copied_elsewhere_keeps_its_place(
        self, index: CheckedIndex
    ) -> None:
        index.put(A, B, C)
        before = list(index.least_valuable(3))
        slot = index.acquire(before[1])
        assert list(index.least_valuable(3)) == [before[0], before[2]]
        index.release(before[1], slot, used=False)
        assert list(index.least_valuable(3)) == before

    def test_a_page_that_is_read_is_never_evicted(self, index: CheckedIndex) -> None:
        index.put(A, B, C)
        slot = index.acquire(B)

        index.put(D, E)
        assert index.state(B) is PageState.RESIDENT
        for key in (D, E):
            index.acquire(key)

        assert index.reserve(A) is None, "all three are being read"
        index.release(B, slot)
        assert index.reserve(A) == slot
        assert index.state(B) is PageState.MISSING

    def test_a_page_with_two_readers_stays_until_both_have_left(
        self, make: Callable[[int], Any]
    ) -> None:
        index = make(1)
        (slot,) = index.put(A)
        assert index.acquire(A) == index.acquire(A) == slot

        index.release(A, slot)
        assert index.reserve(B) is None
        index.release(A, slot)
        assert index.reserve(B) == slot

    def test_pages_are_evicted_one_at_a_time_and_only_for_want_of_a_slot(
        self, index: CheckedIndex
    ) -> None:
        index.put(A, B, C)
        index.forget(B)
        index.put(D)
        assert index.evictions == 0
        index.put(E)
        assert index.evictions == 1

    def test_touching_never_changes_what_may_be_evicted(self, index: CheckedIndex) -> None:
        index.put(A, B)
        index.reserve(C)
        index.acquire(B)

        index.touch(reversed(ALL))

        assert index.reserve(D) is not None
        assert [*index.missing(dict.fromkeys((A, B, C)))] == [A]

    # -- reading ------------------------------------------------------------------

    def test_a_prefix_ends_at_the_first_page_that_cannot_be_read(
        self, make: Callable[[int], Any]
    ) -> None:
        index = make(5)
        index.put(A, B, D)
        index.reserve(C)
        keys = [A, B, C, D, E]

        assert index.readable_prefix(keys, 0, 5) == 2
        assert index.readable_prefix(keys, 1, 5) == 2
        assert index.readable_prefix(keys, 2, 5) == 2
        assert index.readable_prefix(keys, 3, 5) == 4
        assert index.readable_prefix(keys, 0, 1) == 1, "no more than stop, although B is readable"
        assert index.readable_prefix(keys, 0, 0) == 0
        assert index.readable_prefix(keys, 3, 1) == 3, "pages before start are not examined"

    def test_a_page_can_be_found_while_it_is_read(self, index: CheckedIndex) -> None:
        index.put(A)
        index.acquire(A)
        assert index.readable_prefix([A], 0, 1) == 1
        assert index.state(A) is PageState.RESIDENT

    # -- forgetting -----------------------------------------------------------------

    def test_forgetting_a_page_frees_its_slot(self, index: CheckedIndex) -> None:
        index.put(A)
        index.forget(A)
        index.forget(A)
        index.forget(B)
        assert (len(index), index.free_slots, index.evictions) == (0, 3, 0)

    @pytest.mark.parametrize("ending", ["commit", "abort"])
    def test_a_page_forgotten_on_its_way_keeps_its_slot_until_it_arrives(
        self, make: Callable[[int], Any], ending: str
    ) -> None:
        index = make(1)
        slot = index.reserve(A)

        index.forget(A)

        assert index.state(A) is PageState.MISSING
        assert index.free_slots == 0
        assert index.reserve(B) is None, "the only slot is still being written"
        assert not getattr(index, ending)(A, slot)
        assert index.state(A) is PageState.MISSING, (
            "a forgotten page is not found after it is written"
        )
        assert index.free_slots == 1
        assert index.reserve(B) == slot

    def test_a_page_forgotten_while_it_is_read_keeps_its_slot_until_the_last_reader_left(
        self, make: Callable[[int], Any]
    ) -> None:
        index = make(1)
        (slot,) = index.put(A)
        index.acquire(A)
        index.acquire(A)

        index.forget(A)

        assert index.state(A) is PageState.MISSING
        index.release(A, slot)
        assert index.reserve(B) is None, "one reader is left"
        index.release(A, slot)
        assert index.reserve(B) == slot

    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    def test_a_page_saved_anew_is_another_page_than_the_one_forgotten(
        self, index: CheckedIndex, order: tuple[int, ...]
    ) -> None:
        """Three concurrent saves under one key finish in any order, and the page of the last save
        is kept.
        """
        slots = []
        for _ in range(3):
            index.forget(A)
            slots.append(index.reserve(A))
        assert len(set(slots)) == 3

        for i in order:
            assert index.commit(A, slots[i]) is (i == 2)

        assert index.acquire(A) == slots[2]
        assert index.free_slots == 2
        index.release(A, slots[2])

    def test_an_old_reader_does_not_release_the_new_page(self, index: CheckedIndex) -> None:
        (old,) = index.put(A)
        index.acquire(A)
        index.forget(A)
        (new,) = index.put(A)
        assert index.acquire(A) == new != old

        index.release(A, old)

        assert index.put(B, C) is not None
        assert index.reserve(D) is not None
        assert index.state(A) is not PageState.MISSING, "the new page still has a reader"
        index.release(A, new)

    def test_a_failed_copy_of_a_forgotten_page_does_not_abort_the_new_one(
        self, index: CheckedIndex
    ) -> None:
        old = index.reserve(A)
        index.forget(A)
        new = index.reserve(A)

        index.abort(A, old)

        assert index.state(A) is PageState.BEING_WRITTEN
        assert index.commit(A, new)

    def test_clear_forgets_pages_in_every_state(self, make: Callable[[int], Any]) -> None:
        index = make(4)
        idle, read = index.put(A, B)
        index.acquire(B)
        coming, failing = index.reserve(C), index.reserve(D)

        index.clear()

        assert len(index) == 0
        assert [*index.missing(dict.fromkeys(ALL))] == [*ALL]
        assert index.free_slots == 1
        assert index.reserve(E) == idle
        index.release(B, read)
        assert index.commit(C, coming) is False
        index.abort(D, failing)
        assert index.free_slots == 3
        assert [*index.missing(dict.fromkeys(ALL))] == [A, B, C, D]
        index.clear()
        index.clear()

    # -- all of it ------------------------------------------------------------------

    @pytest.mark.parametrize("seed", range(8))
    def test_any_sequence_of_calls_keeps_every_slot_with_one_owner(
        self, make: Callable[[int], Any], seed: int
    ) -> None:
        rng, index = random.Random(seed), make(4)
        saving: list[tuple[PageKey, int]] = []
        reading: list[tuple[PageKey, int]] = []
        for _ in range(400):
            key = rng.choice(ALL)
            action = rng.randrange(7)
            if action <= 1 and index.state(key) is PageState.MISSING:
                slot = index.reserve(key)
                if slot is not None:
                    busy = [taken for _, taken in saving + reading]
                    assert slot not in busy, "a slot in use was given away"
                    saving.append((key, slot))
            elif action == 2 and saving:
                ended = saving.pop(rng.randrange(len(saving)))
                getattr(index, rng.choice(["commit", "abort"]))(*ended)
            elif action == 3 and index.state(key) is PageState.RESIDENT:
                reading.append((key, index.acquire(key)))
            elif action == 4 and reading:
                index.release(*reading.pop(rng.randrange(len(reading))))
            elif action == 5:
                index.touch(rng.sample(ALL, 3))
            elif action == 6 and rng.random() < 0.3:
                index.clear() if rng.random() < 0.2 else index.forget(key)

        for key, slot in saving:
            index.commit(key, slot)
        for key, slot in reading:
            index.release(key, slot)
        index.clear()
        assert index.free_slots == 4
