"""Results of snapshot orders reach the operation that issued the order. Other results are
dropped."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tiered_kv.keys import PageKey
from tiered_kv.orders import ContextPage, OrderId, OrderReport
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.pages.held_pages import HeldPages
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.pages.snapshot_orders import SnapshotOrders
from tiered_kv.policies.cache.lru import LeastRecentlyUsed

KEYS = [PageKey(bytes([i]) * 20) for i in range(8)]
PAGES = [ContextPage(0, i, key) for i, key in enumerate(KEYS)]


@pytest.fixture
def index() -> PageIndex:
    made = PageIndex(8, LeastRecentlyUsed())
    made.commit_all(KEYS[:4], made.reserve_all(KEYS[:4]))
    return made


class Orders(SnapshotOrders):
    """Snapshot orders with their own order book."""

    def __init__(self, index: PageIndex, ranks: int) -> None:
        self.book = OrderBook(index, ranks, [1], 1.0)
        super().__init__(self.book)

    def settle(self, reports: Mapping[OrderId, OrderReport]) -> None:
        for done in self.book.settle(reports):
            self.on_settled(done)


def report(failed: frozenset[int] = frozenset()) -> OrderReport:
    return OrderReport(1, failed, 1, 1.0)


def test_written_pages_are_held_until_every_rank_has_reported(index: PageIndex) -> None:
    orders = Orders(index, ranks=2)
    with HeldPages(index) as held:
        assert held.hold(KEYS[:5]) == KEYS[4:5]
        writing = orders.write("folder", PAGES[:4], held)
        assert not len(held)
    assert index.in_use == 4
    for key in KEYS[:4]:
        index.forget(key)  # still held, because the bytes are being written
    orders.settle({writing.order.order_id: report()})
    assert not writing.over
    assert index.free_slots == 4
    orders.settle({writing.order.order_id: report(frozenset({1, 2}))})
    assert writing.failed == 2
    assert index.free_slots == 8
    index.check_integrity()


def test_pages_that_are_not_held_are_not_written(index: PageIndex) -> None:
    orders = Orders(index, ranks=1)
    with HeldPages(index) as held:
        held.hold(KEYS[:2])
        with pytest.raises(KeyError):
            orders.write("folder", PAGES[:4], held)
        assert len(held) == 2
    assert not index.in_use
    assert not orders.in_flight


@pytest.mark.parametrize("failed", [frozenset(), frozenset({0})])
def test_results_that_are_never_requested_are_not_kept(
    index: PageIndex, failed: frozenset[int]
) -> None:
    orders = Orders(index, ranks=1)
    for _ in range(100):
        reading = orders.read("path", PAGES[4:])
        assert reading is not None
        index.clear()  # a reset
        orders.settle({reading.order.order_id: report(failed)})
        assert reading.over
        orders.unsent.take()
    kept = [one for one in vars(orders).values() if isinstance(one, dict | list | set)]
    assert kept
    assert not any(kept)
    index.check_integrity()


def test_pages_that_are_read_have_slots_for_all_or_none(index: PageIndex) -> None:
    orders = Orders(index, ranks=1)
    with HeldPages(index) as held:
        held.hold(KEYS[:4])
        assert orders.read("path", PAGES[4:]) is not None
        more = [ContextPage(0, 9, PageKey(b"more" * 5))]
        assert orders.read("path", more) is None
    assert index.in_use == 4
