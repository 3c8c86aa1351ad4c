"""A worker without bytes is done when the bytes would be there, and its stores have what went
there."""

from __future__ import annotations

import pytest

from tiered_kv.connectors.runtime.observe.virtual_worker import VirtualWorker
from tiered_kv.keys import PageKey
from tiered_kv.messages import Orders, Reclaim, Reports, TierOrders
from tiered_kv.orders import PromoteOrder, RestoreMode, StoreOrder
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.pages.tier_index import TierIndex
from tiered_kv.policies.cache.lru import LeastRecentlyUsed
from tiered_kv.testing.stores import SSD

PAGE_BYTES, BANDWIDTH, SSD_BANDWIDTH = 1000, 1000.0, 100.0
RANKS = 2
KEYS = [PageKey(bytes([65 + n]) * 20) for n in range(80)]


@pytest.fixture
def book() -> OrderBook:
    """A page takes a second to CPU memory, and ten to SSD."""
    index = PageIndex(80, LeastRecentlyUsed())
    made = OrderBook(index, RANKS, [PAGE_BYTES], BANDWIDTH, {SSD: TierIndex()})
    made.stores[SSD].bandwidth = SSD_BANDWIDTH
    return made


@pytest.fixture
def worker(book: OrderBook) -> VirtualWorker:
    return VirtualWorker(book, RANKS, {SSD: 64})


def save(book: OrderBook, worker: VirtualWorker, keys: list[PageKey], now: float) -> None:
    order = book.plan_save(dict.fromkeys(keys, 1))
    assert order is not None
    worker.carry_out(Orders(saves=(order,)), now)


def send(worker: VirtualWorker, now: float, *orders: StoreOrder, **more: object) -> None:
    up = tuple(one for one in orders if isinstance(one, PromoteOrder))
    down = tuple(one for one in orders if not isinstance(one, PromoteOrder))
    sent = TierOrders(demotes=down, promotes=up, **more)  # type: ignore[arg-type]
    worker.carry_out(Orders(stores={SSD: sent}), now)


def settle(book: OrderBook, said: Reports | None) -> int:
    """Have reports count; how many orders are over on every rank."""
    return len(book.settle(said.orders)) if said is not None else 0


def stored(book: OrderBook, worker: VirtualWorker, keys: list[PageKey]) -> None:
    """Bring pages to CPU memory and to SSD, before the hundredth second."""
    save(book, worker, keys, now=0.0)
    settle(book, worker.hear(50.0))
    order = book.plan_demote(SSD, keys, 0.0)
    assert order is not None
    send(worker, 50.0, order)
    settle(book, worker.hear(100.0))


def test_copies_of_one_direction_wait_for_each_other(
    book: OrderBook, worker: VirtualWorker
) -> None:
    save(book, worker, KEYS[:2], now=10.0)
    save(book, worker, KEYS[2:3], now=10.0)
    assert worker.hear(11.9) is None
    assert settle(book, worker.hear(12.0)) == 1
    assert [book.index.readable(key) for key in KEYS[:3]] == [True, True, False]
    load = book.plan_load("r", KEYS[:2], [1, 2], RestoreMode.SYNC)
    worker.begin(load, 12.0)
    assert settle(book, worker.hear(13.0)) == 1, "the other way is free"
    assert settle(book, worker.hear(14.0)) == 1
    assert book.in_flight == 0
    assert book.bandwidth == BANDWIDTH, "nothing else is learned from it"


def test_pages_come_back_from_the_tier_that_they_went_to(
    book: OrderBook, worker: VirtualWorker
) -> None:
    stored(book, worker, KEYS[:2])
    assert not book.stored_nowhere(KEYS[:2])
    for key in KEYS[:2]:
        book.index.forget(key)
    order = book.plan_promote(SSD, KEYS[:2], 0.0)
    assert order is not None
    send(worker, 100.0, order)
    assert worker.hear(119.9) is None
    assert settle(book, worker.hear(120.0)) == 1
    assert all(map(book.index.readable, KEYS[:2]))


def test_a_promotion_waits_until_it_is_due_or_wanted(
    book: OrderBook, worker: VirtualWorker
) -> None:
    stored(book, worker, KEYS[:2])
    for key in KEYS[:2]:
        book.index.forget(key)
    early, late = (book.plan_promote(SSD, [key], 500.0) for key in KEYS[:2])
    assert early is not None
    assert late is not None
    send(worker, 100.0, early, late)
    assert worker.hear(400.0) is None
    send(worker, 400.0, expedited=(early.order_id,))
    assert settle(book, worker.hear(410.0)) == 1
    assert book.index.readable(KEYS[0])
    assert worker.hear(509.0) is None
    assert settle(book, worker.hear(600.0)) == 1, "though nobody asked at 510"


def test_a_reset_empties_the_tiers(book: OrderBook, worker: VirtualWorker) -> None:
    stored(book, worker, KEYS[:2])
    order = book.plan_promote(SSD, KEYS[:2], 0.0)
    assert order is None, "they are in CPU memory"
    book.index.forget(KEYS[0])
    send(worker, 100.0, fingerprint=b"another")
    order = book.plan_promote(SSD, KEYS[:1], 0.0)
    assert order is not None
    send(worker, 100.0, order)
    said = worker.hear(200.0)
    assert said is not None
    assert said.orders[order.order_id].failed == {0}
    assert said.stores[SSD][0].stored_bytes == 0


def test_a_full_store_proposes_a_segment_and_tells_who_is_gone(
    book: OrderBook, worker: VirtualWorker
) -> None:
    save(book, worker, KEYS, now=0.0)
    settle(book, worker.hear(100.0))
    order = book.plan_demote(SSD, KEYS, 0.0)
    assert order is not None
    send(worker, 100.0, order)
    said = worker.hear(1e6)
    assert said is not None
    news = said.stores[SSD][0]
    assert news.stored_bytes == len(KEYS) * PAGE_BYTES * RANKS
    assert news.proposal is not None
    assert news.proposal.keys == tuple(KEYS[:2])
    send(worker, 1e6, reclaims={0: Reclaim(news.proposal.segment, (KEYS[1],))})
    said = worker.hear(1e6)
    assert said is not None
    assert said.stores[SSD][0].gone == (KEYS[0],)


def test_bundles_fill_a_share_of_their_slots(book: OrderBook, worker: VirtualWorker) -> None:
    save(book, worker, KEYS[:64], now=0.0)
    settle(book, worker.hear(100.0))
    free = book.index.free_slots
    for keys in (KEYS[:32], KEYS[32:64]):
        worker.carry_out(Orders(packs=(book.plan_pack(keys, 0),)), 100.0)
    assert settle(book, worker.hear(200.0)) == 2
    assert book.index.free_slots - free == 2 * 10
    assert all(map(book.index.readable, KEYS[:64]))
