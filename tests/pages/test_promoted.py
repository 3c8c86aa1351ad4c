"""A promoted page counts as used, or as evicted without having been used."""

from tiered_kv.keys import PageKey
from tiered_kv.pages.cpu_index import PromotedPages

A, B, C = (PageKey(bytes([n] * 32)) for n in range(3))


def test_a_restored_page_counts_as_used_once_and_an_evicted_one_as_wasted() -> None:
    pages = PromotedPages()
    pages.came_up([A, B], 10)
    pages.read([A, C])
    pages.read([A])
    pages.gone([A, B, C])
    assert (pages.used, pages.wasted) == (1, 1)
    assert (pages.used_bytes, pages.wasted_bytes) == (10, 10)


def test_a_page_promoted_again_counts_again() -> None:
    pages = PromotedPages()
    for _ in range(3):
        pages.came_up([A], 10)
        pages.gone([A])
    pages.came_up([A], 10)
    pages.read([A])
    assert (pages.used, pages.wasted) == (1, 3)
