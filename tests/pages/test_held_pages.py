"""Pages that are held stay in memory until their ``HeldPages`` block ends, whatever happens in
between."""

from __future__ import annotations

import pytest

from tiered_kv.keys import PageKey
from tiered_kv.pages.base import PageState
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.pages.held_pages import HeldPages
from tiered_kv.policies.cache.lru import LeastRecentlyUsed

KEYS = [PageKey(bytes([i]) * 20) for i in range(8)]
OTHERS = [PageKey(bytes([100 + i]) * 20) for i in range(8)]


@pytest.fixture
def index() -> PageIndex:
    made = PageIndex(8, LeastRecentlyUsed())
    made.commit_all(KEYS[:6], made.reserve_all(KEYS[:6]))
    return made


def test_held_pages_are_not_evicted_and_are_released_by_an_error(index: PageIndex) -> None:
    def fails() -> None:
        with HeldPages(index) as held:
            assert held.hold(KEYS) == KEYS[6:]
            assert len(index.reserve_all(OTHERS)) == 2
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert index.in_use == 2, "those that are being saved"


def test_a_forgotten_page_counts_as_missing_until_it_is_back(index: PageIndex) -> None:
    with HeldPages(index) as held:
        held.hold(KEYS[:2])
        index.forget(KEYS[0])
        assert index.free_slots == 2, "it is still held"
        assert held.hold(KEYS[:2]) == KEYS[:1]
        assert index.free_slots == 3
        index.commit_all(KEYS[:1], index.reserve_all(KEYS[:1]))
        assert held.hold(KEYS[:2]) == []
        index.check_integrity()
    assert not index.in_use


def test_a_page_that_was_forgotten_and_saved_again_is_held_at_its_new_place(
    index: PageIndex,
) -> None:
    with HeldPages(index) as held:
        held.hold(KEYS[:1])
        before = index.place(KEYS[0])
        index.forget(KEYS[0])
        index.commit_all(KEYS[:1], index.reserve_all(KEYS[:1]))
        assert held.hold(KEYS[:1]) == []
        assert index.place(KEYS[0]) != before
        assert index.in_use == 1
    assert not index.in_use


def test_pages_are_held_as_they_arrive(index: PageIndex) -> None:
    slots = index.reserve_all(KEYS[6:])
    with HeldPages(index) as held:
        arrived = held.arrival(KEYS)
        assert not arrived()
        assert len(held) == 6
        index.commit_all(KEYS[6:7], slots[:1])
        assert not arrived()
        assert len(held) == 7
        index.abort(KEYS[7], slots[1])
        assert arrived(), "it does not move any more, and is not there"
        assert held.hold(KEYS) == KEYS[7:]


def test_compressed_pages_are_held_and_pages_being_compressed_move(index: PageIndex) -> None:
    slots = index.pack(KEYS[:4])
    with HeldPages(index) as held:
        arrived = held.arrival(KEYS[:4])
        assert index.state(KEYS[0]) is PageState.BEING_COMPRESSED
        assert index.place(KEYS[0]) is None
        assert not arrived()
        index.packed(slots[0], 2)
        assert arrived()
        assert held.hold(KEYS[:4]) == []
        index.forget(KEYS[1])
        assert held.hold(KEYS[:4]) == KEYS[1:2]
        assert len(index.reserve_all(OTHERS)) == 6, "but for the slots of the bundle"
    assert {index.state(key) for key in OTHERS[:6]} == {PageState.BEING_WRITTEN}
    assert index.in_use == 6


def test_private_pages_are_forgotten_unless_published(index: PageIndex) -> None:
    for published in (True, False):
        with HeldPages(index) as held:
            held.make_private(KEYS[:3])
            held.hold(KEYS[:2])
            if published:
                held.publish()
        assert [index.readable(key) for key in KEYS[:3]] == [published] * 3
    assert index.free_slots == 5
    index.check_integrity()


def test_pages_that_are_handed_over_are_not_released(index: PageIndex) -> None:
    with HeldPages(index) as held:
        held.hold(KEYS[:5])
        assert len(held.hand_over(KEYS[3:4])) == 1
        assert len(held) == 4
    assert index.in_use == 1
