"""The page index fulfils its contract with compressed pages, under any eviction rule."""

from __future__ import annotations

import time

from tests.pages.test_cpu_index import AnyPage, LastInFirstOut
from tiered_kv.keys import PageKey
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.policies.cache.eviction import ByWorth
from tiered_kv.policies.cache.lru import LeastRecentlyUsed
from tiered_kv.policies.distribution import GRID, Forecast
from tiered_kv.testing.conformance.cold_index import ColdIndexConformance
from tiered_kv.testing.conformance.index import CheckedIndex

KEYS = [PageKey(bytes([n]) * 20) for n in range(12)]


class TestColdPagesWithLeastRecentlyUsed(ColdIndexConformance):
    def make_index(self, num_slots: int) -> PageIndex:
        return PageIndex(num_slots, LeastRecentlyUsed())


class TestColdPagesWithLastInFirstOut(ColdIndexConformance):
    def make_index(self, num_slots: int) -> PageIndex:
        return PageIndex(num_slots, LastInFirstOut())


class TestColdPagesWithAnyPage(ColdIndexConformance):
    def make_index(self, num_slots: int) -> PageIndex:
        return PageIndex(num_slots, AnyPage())


class TestColdPagesByWorth(ColdIndexConformance):
    def make_index(self, num_slots: int) -> PageIndex:
        return PageIndex(num_slots, ByWorth(time.monotonic, 64))


def pack(index: CheckedIndex, keys: list[PageKey], kept: int) -> None:
    index.packed(index.pack(keys)[0], kept)


def test_a_bundle_is_evicted_with_its_least_valuable_page() -> None:
    index = CheckedIndex(PageIndex(6, LeastRecentlyUsed()))
    index.put(*KEYS[:6])
    pack(index, [KEYS[1], KEYS[2], KEYS[5]], kept=3)

    assert index.reserve(KEYS[6]) is not None, "the oldest page is not in the bundle"
    assert [*index.missing(dict.fromkeys(KEYS[:6]))] == [KEYS[0]]
    assert index.reserve(KEYS[7]) is not None
    assert [*index.missing(dict.fromkeys(KEYS[:6]))] == [*KEYS[:3], KEYS[5]]
    assert index.free_slots == 2


def test_a_page_that_was_read_cold_counts_as_just_used() -> None:
    index = CheckedIndex(PageIndex(4, LeastRecentlyUsed()))
    index.put(*KEYS[:4])
    pack(index, KEYS[:1], kept=1)
    pack(index, KEYS[1:2], kept=1)
    index.release(KEYS[1], index.acquire(KEYS[1]), used=False)
    index.release(KEYS[0], index.acquire(KEYS[0]))
    assert index.reserve(KEYS[4]) is not None
    assert [*index.missing(dict.fromkeys(KEYS[:4]))] == [KEYS[1]]


def test_pages_without_a_context_are_considered_last_the_next_time() -> None:
    index = CheckedIndex(PageIndex(8, rule := ByWorth(lambda: 0.0, 64)))
    index.put(*KEYS[:6])
    rule.on_gap_begun("job", KEYS[3:6], Forecast(GRID * 0 + 1.0), 0.0, 1.0)
    assert index.oldest_raw(3) == []
    assert index.oldest_raw(3) == [KEYS[3:6]], "the first three went behind"
    assert index.oldest_raw(2) == [KEYS[3:5]]


def test_pages_being_read_keep_their_slot_and_are_not_packed() -> None:
    index = CheckedIndex(PageIndex(8, rule := ByWorth(lambda: 0.0, 64)))
    index.put(*KEYS[:5])
    rule.on_gap_begun("job", KEYS[:5], Forecast(GRID * 0 + 1.0), 0.0, 1.0)
    slot = index.acquire(KEYS[2])
    assert index.oldest_raw(5) == [KEYS[:2], KEYS[3:5]]
    index.release(KEYS[2], slot)
    assert index.oldest_raw(5) == [KEYS[:5]]


def test_packed_pages_are_not_packed_again() -> None:
    index = CheckedIndex(PageIndex(8, rule := ByWorth(lambda: 0.0, 64)))
    index.put(*KEYS[:5])
    rule.on_gap_begun("job", KEYS[:5], Forecast(GRID * 0 + 1.0), 0.0, 1.0)
    pack(index, KEYS[1:3], kept=1)
    assert index.oldest_raw(5) == [KEYS[:1], KEYS[3:5]]
