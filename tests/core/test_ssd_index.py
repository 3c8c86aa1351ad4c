"""The index of pages on SSD, and who survives a dying segment."""

from __future__ import annotations

from tiered_kv.keys import PageKey
from tiered_kv.ssd_index import SsdIndex

KEYS = [PageKey(bytes([65 + n]) * 20) for n in range(8)]


def full() -> SsdIndex:
    index = SsdIndex()
    index.add(KEYS)
    return index


def test_pages_are_there_until_discarded() -> None:
    index = full()
    index.discard([KEYS[0], PageKey(b"never there")])
    assert KEYS[0] not in index
    assert KEYS[1] in index
    assert len(index) == 7
    index.clear()
    assert len(index) == 0


def test_of_a_dying_segment_what_was_used_survives() -> None:
    index = full()
    index.touch([KEYS[1], KEYS[6], PageKey(b"never there")])
    assert index.survivors(KEYS) == (KEYS[1], KEYS[6])


def test_a_survivor_must_be_used_again_to_survive_again() -> None:
    index = full()
    index.touch([KEYS[1]])
    assert index.survivors(KEYS) == (KEYS[1],)
    assert index.survivors(KEYS) == ()


def test_writing_a_page_again_does_not_forget_that_it_was_used() -> None:
    index = full()
    index.touch([KEYS[1]])
    index.add([KEYS[1]])
    assert index.survivors(KEYS) == (KEYS[1],)


def test_at_most_half_survive_the_last_written_ones() -> None:
    index = full()
    index.touch(KEYS)
    assert index.survivors(KEYS) == tuple(KEYS[4:])
    assert index.survivors(KEYS[:1]) == ()
