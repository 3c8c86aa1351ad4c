"""Compressed pages of an earlier engine that all ranks have, and the page index that adopts
them."""

from __future__ import annotations

from tests.transfer.memory_file.made_memory import key_of
from tiered_kv.messages import AdoptedBundle, AdoptedPages
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.policies.cache.lru import LeastRecentlyUsed
from tiered_kv.transfer.memory_file.validation import agreed, agreed_bundles


def bundle(slots: tuple[int, ...], *names: int, saved: int = 0) -> AdoptedBundle:
    """Return a bundle of pages. Each page's save time is its name plus ``saved``."""
    return AdoptedBundle(slots, tuple(map(key_of, names)), tuple(saved + name for name in names))


def rank(*bundles: AdoptedBundle, **slots: int) -> AdoptedPages:
    """Return the pages that a rank adopted: bundles, and pages in slots of their own (``p5=3`` is
    page 5 in slot 3)."""
    names = [int(name[1:]) for name in slots]
    return AdoptedPages(tuple(slots.values()), tuple(map(key_of, names)), (*names,), bundles)


def names_in(found: list[AdoptedBundle]) -> list[tuple[tuple[int, ...], list[int]]]:
    known = {key_of(name): name for name in range(50)}
    return [(one.slots, [known[key] for key in one.keys]) for one in found]


def test_the_pages_of_a_single_rank_are_agreed_oldest_first() -> None:
    one = rank(bundle((4, 2), 5, 6, 7), bundle((8, 1), 1, 2, 3))
    assert names_in(agreed_bundles([one])) == [((8, 1), [1, 2, 3]), ((4, 2), [5, 6, 7])]
    assert agreed_bundles([]) == []


def test_the_rank_that_needs_most_slots_determines_the_adopted_bundles() -> None:
    ranks = [rank(bundle((4, 2), 1, 2)), rank(bundle((4, 2, 9), 1, 2))]
    assert names_in(agreed_bundles(ranks)) == [((4, 2, 9), [1, 2])]


def test_pages_that_one_rank_lacks_or_has_from_another_save_are_left_out() -> None:
    ranks = [rank(bundle((4, 2), 1, 2, 3)), rank(bundle((4, 2), 1, 3))]
    assert names_in(agreed_bundles(ranks)) == [((4, 2), [1, 3])]
    ranks = [rank(bundle((4, 2), 1, 2)), rank(bundle((4, 2), 1, 2, saved=7))]
    assert agreed_bundles(ranks) == []
    assert agreed_bundles([rank(bundle((4, 2), 1)), rank()]) == []


def test_bundles_whose_slots_differ_between_ranks_are_left_out() -> None:
    assert agreed_bundles([rank(bundle((4, 2), 1)), rank(bundle((4, 3, 2), 1))]) == []
    assert agreed_bundles([rank(bundle((4, 2), 1)), rank(bundle((2, 4), 1))]) == []


def test_a_page_is_adopted_in_one_place_only() -> None:
    one = rank(bundle((4, 2), 1, 2, 3), bundle((8, 1), 1, 5, saved=9), p2=7)
    assert names_in(agreed_bundles([one])) == [((4, 2), [3]), ((8, 1), [1, 5])]


def test_the_index_takes_over_pages_and_bundles() -> None:
    index = PageIndex(10, LeastRecentlyUsed())
    one = rank(bundle((4, 2), 1, 2, 3), bundle((8, 12), 5, 6), p7=7, p9=11)
    index.adopt(agreed([one]), agreed_bundles([one]))
    index.check_integrity()
    assert (len(index), index.cold.compressed, index.free_slots) == (4, 3, 7)
    assert not index.readable(key_of(5)), "it has a slot that pages may not have any more"
    assert all(index.readable(key_of(name)) for name in (1, 2, 3, 7))
    place = index.acquire(key_of(2))
    index.release(key_of(2), place)
    index.reserve_all([key_of(name) for name in range(20, 30)])
    index.check_integrity()
    assert index.cold.compressed == 0
