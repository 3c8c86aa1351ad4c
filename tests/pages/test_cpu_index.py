"""The page index fulfils its contract under any eviction order."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tiered_kv.keys import PageKey
from tiered_kv.pages.base import EvictionOrder, PageState
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.policies.cache.lru import LeastRecentlyUsed
from tiered_kv.testing.conformance.index import IndexConformance
from tiered_kv.testing.single_pages import commit, reserve


class LastInFirstOut(EvictionOrder):
    """Evicts the newest page first. Uses of a page do not change the order."""

    def __init__(self) -> None:
        self._keys: list[PageKey] = []

    def added(self, key: PageKey) -> None:
        self._keys.append(key)

    def removed(self, key: PageKey) -> None:
        self._keys.remove(key)

    def touched(self, key: PageKey) -> None:
        assert key in self._keys, "touched a page that cannot be evicted"

    def __iter__(self) -> Iterator[PageKey]:
        return reversed(self._keys)


class AnyPage(LastInFirstOut):
    """Evicts a random page. The choice stays the same until a page is added."""

    def __init__(self) -> None:
        super().__init__()
        self._rng = random.Random(0)

    def added(self, key: PageKey) -> None:
        self._keys.insert(self._rng.randint(0, len(self._keys)), key)


class TestIndexWithLeastRecentlyUsed(IndexConformance):
    def make_index(self, num_slots: int) -> PageIndex:
        return PageIndex(num_slots, LeastRecentlyUsed())


class TestIndexWithLastInFirstOut(IndexConformance):
    def make_index(self, num_slots: int) -> PageIndex:
        return PageIndex(num_slots, LastInFirstOut())


class TestIndexWithAnyPage(IndexConformance):
    def make_index(self, num_slots: int) -> PageIndex:
        return PageIndex(num_slots, AnyPage())


def test_the_page_used_longest_ago_is_evicted_and_tails_before_heads() -> None:
    index = PageIndex(4, LeastRecentlyUsed())
    keys = [PageKey(bytes([n]) * 20) for n in range(6)]
    for key in keys[:4]:
        slot = reserve(index, key)
        assert slot is not None
        commit(index, key, slot)

    index.touch(reversed(keys[:2]))  # a context of two pages, whose first page is touched last
    reserve(index, keys[4])
    assert index.state(keys[2]) is PageState.MISSING
    reserve(index, keys[5])
    assert index.state(keys[3]) is PageState.MISSING
    index.forget(keys[5])
    assert not index.missing(dict.fromkeys(keys[:2]))
    index.check_integrity()


def test_a_page_that_was_read_counts_as_just_used() -> None:
    index = PageIndex(2, LeastRecentlyUsed())
    first, second, third = (PageKey(bytes([n]) * 20) for n in range(3))
    for key in (first, second):
        slot = reserve(index, key)
        assert slot is not None
        commit(index, key, slot)
    index.release(first, index.acquire(first))

    reserve(index, third)

    assert index.state(first) is not PageState.MISSING
    assert index.state(second) is PageState.MISSING


def test_a_page_released_too_often_is_an_error() -> None:
    index = PageIndex(1, LeastRecentlyUsed())
    key = PageKey(b"k" * 20)
    slot = reserve(index, key)
    assert slot == 0
    commit(index, key, slot)
    with pytest.raises(ValueError, match="without being"):
        index.release(key, slot)
    index.check_integrity()


def test_a_page_that_is_acquired_twice_at_a_time_has_two_readers() -> None:
    index = PageIndex(2, LeastRecentlyUsed())
    keys = [PageKey(b"a"), PageKey(b"b")]
    index.commit_all(keys, index.reserve_all(keys))
    several = [*keys, keys[0]]
    slots = index.acquire_all(several)
    assert index.in_use == 3
    with pytest.raises(ValueError, match="without being acquired"):
        index.release_all([keys[1]] * 2, [slots[1]] * 2)
    index.release_all(several, slots)
    assert index.in_use == 0
    index.check_integrity()


def full_index(slots: int, unsaved: set[int]) -> tuple[PageIndex, list[PageKey]]:
    """Return a full index above a lower tier that lacks some pages, and the pages of the index,
    oldest first."""
    index = PageIndex(slots, LeastRecentlyUsed())
    keys = [PageKey(n.to_bytes(2, "big") * 10) for n in range(slots)]
    index.commit_all(keys, index.reserve_all(keys))
    lacking = {keys[n] for n in unsaved}
    index.unsaved = lambda some: [key for key in some if key in lacking]
    return index, keys


def evicted(index: PageIndex, keys: list[PageKey], count: int) -> list[int]:
    """Return the numbers of the pages that are evicted to make space for ``count`` new pages."""
    new = [PageKey(bytes([index.taken + n]) * 30) for n in range(count)]
    assert len(index.reserve_all(new)) == count
    index.check_integrity()
    return [n for n, key in enumerate(keys) if index.state(key) is PageState.MISSING]


def test_pages_that_a_lower_tier_has_are_evicted_before_pages_that_it_lacks() -> None:
    index, keys = full_index(16, unsaved={0, 2})
    assert evicted(index, keys, 3) == [1, 3, 4]
    assert index.spared == 2


def test_only_a_part_of_memory_is_passed_over_for_a_lower_tier() -> None:
    index, keys = full_index(16, unsaved=set(range(10)))
    assert evicted(index, keys, 3) == [4, 5, 6], "four of sixteen slots are passed over"


def test_one_eviction_passes_over_few_pages_however_large_memory_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tiered_kv.pages.cpu_index.SPARED_AT_ONCE", 2)
    index, keys = full_index(16, unsaved=set(range(10)))
    assert evicted(index, keys, 3) == [2, 3, 4]


def test_pages_that_a_lower_tier_lacks_are_evicted_if_no_others_are_left() -> None:
    index, keys = full_index(16, unsaved={0, 1})
    held = index.acquire_all(keys[3:])
    assert evicted(index, keys, 2) == [0, 2]
    index.release_all(keys[3:], held)
    index.check_integrity()


def test_a_bundle_is_evicted_only_after_a_lower_tier_has_all_its_pages() -> None:
    index, keys = full_index(16, unsaved={1})
    slots = index.pack(keys[:3])
    index.packed(slots[0], 3)
    assert evicted(index, keys, 2) == [3, 4], "page 1 is in a bundle with pages 0 and 2"
    index.unsaved = lambda _: ()
    assert evicted(index, keys, 5)[:3] == [0, 1, 2]
