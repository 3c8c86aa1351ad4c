"""The index of pages on SSD, and who survives a dying segment."""

from __future__ import annotations

from tiered_kv.keys import PageKey
from tiered_kv.pages.tier_index import TierIndex

KEYS = [PageKey(bytes([65 + n]) * 20) for n in range(8)]


def unknown(key: PageKey) -> float:
    return 0.0


def full() -> TierIndex:
    index = TierIndex()
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
    assert index.survivors(KEYS, unknown) == (KEYS[1], KEYS[6])


def test_a_survivor_must_be_used_again_to_survive_again() -> None:
    index = full()
    index.touch([KEYS[1]])
    assert index.survivors(KEYS, unknown) == (KEYS[1],)
    assert index.survivors(KEYS, unknown) == ()


def test_writing_a_page_again_does_not_forget_that_it_was_used() -> None:
    index = full()
    index.touch([KEYS[1]])
    index.add([KEYS[1]])
    assert index.survivors(KEYS, unknown) == (KEYS[1],)


def test_at_most_half_survive_the_last_written_ones() -> None:
    index = full()
    index.touch(KEYS)
    assert index.survivors(KEYS, unknown) == tuple(KEYS[4:])
    assert index.survivors(KEYS[:1], unknown) == ()


def test_what_a_job_is_likely_to_come_back_for_survives_as_often_as_it_takes() -> None:
    index = full()
    chances = {KEYS[0]: 0.9, KEYS[3]: 0.6, KEYS[5]: 0.4}
    for _ in range(3):
        assert index.survivors(KEYS, lambda key: chances.get(key, 0.0)) == (KEYS[0], KEYS[3])


def test_of_more_than_half_the_likeliest_survive() -> None:
    index = full()
    index.touch(KEYS)
    chances = dict(zip(KEYS, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2], strict=True))
    assert index.survivors(KEYS, chances.__getitem__) == tuple(KEYS[:4])
