"""The index of pages on SSD: which pages exist, and which were used after they were written."""

from __future__ import annotations

from tiered_kv.keys import PageKey
from tiered_kv.pages.tier_index import TierIndex

KEYS = [PageKey(bytes([65 + n]) * 20) for n in range(8)]


def full() -> TierIndex:
    index = TierIndex()
    index.add(KEYS)
    return index


def test_pages_exist_until_discarded() -> None:
    index = full()
    index.discard([KEYS[0], PageKey(b"never there")])
    assert KEYS[0] not in index
    assert KEYS[1] in index
    assert len(index) == 7
    index.clear()
    assert len(index) == 0


def test_a_page_counts_as_used_if_it_was_used_after_it_was_written() -> None:
    index = full()
    index.touch([KEYS[1], KEYS[6], PageKey(b"never there")])
    assert [key for key in KEYS if index.was_used(key)] == [KEYS[1], KEYS[6]]
    assert not index.was_used(PageKey(b"never there"))


def test_a_page_that_is_written_again_must_be_used_again() -> None:
    index = full()
    index.touch([KEYS[1]])
    index.on_rewritten([KEYS[1], KEYS[2], PageKey(b"never there")])
    assert not index.was_used(KEYS[1])
    assert PageKey(b"never there") not in index
    index.touch([KEYS[1]])
    assert index.was_used(KEYS[1])


def test_a_second_report_of_a_page_does_not_forget_that_it_was_used() -> None:
    index = full()
    index.touch([KEYS[1]])
    index.add([KEYS[1]])
    assert index.was_used(KEYS[1])


def test_superseded_pages_are_taken_out_first_unless_they_are_used() -> None:
    index = full()
    index.supersede([KEYS[1], KEYS[2], KEYS[3], PageKey(b"never there")])
    index.touch([KEYS[2]])
    index.discard([KEYS[3]])
    assert KEYS[1] in index, "not before the tier needs space"
    assert index.take_superseded() == [KEYS[1]]
    assert KEYS[1] not in index
    assert KEYS[2] in index
    assert index.take_superseded() == []
    index.supersede([KEYS[2]])
    index.clear()
    assert index.take_superseded() == []
