"""A virtual worker moves no bytes. It reports each order after the time that the transfer would
take, and its stores know which pages were written."""

from __future__ import annotations

import pytest

from tiered_kv.connectors.runtime.observe.virtual_worker import (
    SEGMENTS,
    CopyLines,
    Line,
    VirtualStore,
    VirtualWorker,
)
from tiered_kv.keys import PageKey
from tiered_kv.messages import Orders, Proposal, Reclaim, Reports, TierOrders, TierReport
from tiered_kv.orders import (
    LoadOrder,
    LookupOrder,
    OrderId,
    OrderKind,
    RestoreMode,
    StoreOrder,
)
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
    """An order book in which copying a page to CPU memory takes one second, and to SSD ten."""
    index = PageIndex(80, LeastRecentlyUsed())
    made = OrderBook(index, RANKS, [PAGE_BYTES], BANDWIDTH, {SSD: TierIndex()})
    made.stores[SSD].bandwidth = SSD_BANDWIDTH
    return made


def make_worker(encode: float = BANDWIDTH, decode: float = BANDWIDTH) -> VirtualWorker:
    copies = CopyLines(Line(BANDWIDTH), Line(BANDWIDTH), Line(encode), Line(decode))
    disk = VirtualStore(64, Line(SSD_BANDWIDTH), Line(SSD_BANDWIDTH))
    return VirtualWorker([PAGE_BYTES], copies, {SSD: disk}, RANKS)


@pytest.fixture
def worker() -> VirtualWorker:
    return make_worker()


def save(book: OrderBook, worker: VirtualWorker, keys: list[PageKey], now: float) -> None:
    order = book.plan_save(dict.fromkeys(keys, 1))
    assert order is not None
    worker.carry_out(Orders(saves=(order,)), now)


def send(worker: VirtualWorker, now: float, *orders: StoreOrder, **more: object) -> None:
    by_kind = {kind: tuple(one for one in orders if one.kind is kind) for kind in OrderKind}
    sent = TierOrders(
        demotes=by_kind[OrderKind.DEMOTE],  # type: ignore[arg-type]
        promotes=by_kind[OrderKind.PROMOTE],  # type: ignore[arg-type]
        lookups=by_kind[OrderKind.LOOK_UP],  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )
    worker.carry_out(Orders(stores={SSD: sent}), now)


def settle(book: OrderBook, said: Reports | None) -> int:
    """Process reports. Returns the number of orders that are finished on every rank."""
    return len(book.settle(said.orders)) if said is not None else 0


def stored(book: OrderBook, worker: VirtualWorker, keys: list[PageKey]) -> None:
    """Save pages to CPU memory and demote them to SSD, by t = 100 s."""
    save(book, worker, keys, now=0.0)
    settle(book, worker.take_reports(50.0))
    order = book.plan_demote(SSD, keys, 0.0)
    assert order is not None
    send(worker, 50.0, order)
    settle(book, worker.take_reports(100.0))


def filled(book: OrderBook, worker: VirtualWorker) -> tuple[TierReport, Proposal]:
    """Write more pages to SSD than it can hold, by t = 1e6 s. Returns the store's report and the
    segment that it proposes to delete."""
    save(book, worker, KEYS, now=0.0)
    settle(book, worker.take_reports(100.0))
    order = book.plan_demote(SSD, KEYS, 0.0)
    assert order is not None
    send(worker, 100.0, order)
    reports = worker.take_reports(1e6)
    assert settle(book, reports) == 1
    assert reports is not None
    report = reports.stores[SSD][0]
    assert report.proposal is not None
    return report, report.proposal


def test_copies_of_one_direction_wait_for_each_other(
    book: OrderBook, worker: VirtualWorker
) -> None:
    save(book, worker, KEYS[:2], now=10.0)
    save(book, worker, KEYS[2:3], now=10.0)
    assert worker.take_reports(11.9) is None
    assert settle(book, worker.take_reports(12.0)) == 1
    assert [book.index.readable(key) for key in KEYS[:3]] == [True, True, False]
    load = book.plan_load("r", KEYS[:2], [1, 2], RestoreMode.SYNC)
    assert worker.carry_out(Orders(loads=(load,)), 12.0) == 14.0
    assert settle(book, worker.take_reports(13.0)) == 1, "the other way is free"
    assert settle(book, worker.take_reports(14.0)) == 1
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
    assert worker.take_reports(119.9) is None
    assert settle(book, worker.take_reports(120.0)) == 1
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
    assert worker.take_reports(400.0) is None
    send(worker, 400.0, expedited=(early.order_id,))
    assert settle(book, worker.take_reports(410.0)) == 1
    assert book.index.readable(KEYS[0])
    assert worker.take_reports(509.0) is None
    assert settle(book, worker.take_reports(600.0)) == 1, "though not polled at 510"


def test_a_reset_empties_the_tiers(book: OrderBook, worker: VirtualWorker) -> None:
    stored(book, worker, KEYS[:2])
    order = book.plan_promote(SSD, KEYS[:2], 0.0)
    assert order is None, "they are in CPU memory"
    book.index.forget(KEYS[0])
    send(worker, 100.0, fingerprint=b"another")
    order = book.plan_promote(SSD, KEYS[:1], 0.0)
    assert order is not None
    send(worker, 100.0, order)
    said = worker.take_reports(200.0)
    assert said is not None
    assert said.orders[order.order_id].failed == {0}
    assert said.stores[SSD][0].stored_bytes == 0


def test_a_segment_proposed_before_a_reset_is_not_deleted_after_it(
    book: OrderBook, worker: VirtualWorker
) -> None:
    _, proposal = filled(book, worker)
    book.stores[SSD].index.clear()
    order = book.plan_demote(SSD, KEYS[:2], 0.0)
    assert order is not None
    send(worker, 1e6, order, fingerprint=b"another", reclaims={0: Reclaim(proposal.segment, ())})
    reports = worker.take_reports(2e6)
    assert reports is not None
    assert reports.orders[order.order_id].failed == frozenset()
    assert reports.stores[SSD][0].gone == ()
    assert reports.stores[SSD][0].stored_bytes == 2 * PAGE_BYTES * RANKS


def test_a_reset_fails_orders_from_before_it(book: OrderBook, worker: VirtualWorker) -> None:
    save(book, worker, KEYS[:3], now=0.0)
    settle(book, worker.take_reports(50.0))
    under_way, later = (
        book.plan_demote(SSD, keys, due) for keys, due in ((KEYS[:2], 0.0), (KEYS[2:3], 500.0))
    )
    assert under_way is not None
    assert later is not None
    send(worker, 50.0, under_way, later)
    send(worker, 51.0, fingerprint=b"another")
    reports = worker.take_reports(51.0)
    assert reports is not None
    assert {order: one.failed for order, one in reports.orders.items()} == {later.order_id: {0}}
    reports = worker.take_reports(600.0)
    assert reports is not None
    assert reports.orders[under_way.order_id].failed == {0, 1}
    assert reports.stores[SSD][0].stored_bytes == 0


def test_a_full_store_proposes_a_segment_and_reports_lost_pages(
    book: OrderBook, worker: VirtualWorker
) -> None:
    news, proposal = filled(book, worker)
    assert news.stored_bytes == len(KEYS) * PAGE_BYTES * RANKS
    assert proposal.keys == tuple(KEYS[:2])
    send(worker, 1e6, reclaims={0: Reclaim(proposal.segment, (KEYS[1],))})
    said = worker.take_reports(1e6)
    assert said is not None
    assert said.stores[SSD][0].gone == (KEYS[0],)


def test_bundles_fill_a_fraction_of_their_slots(book: OrderBook, worker: VirtualWorker) -> None:
    save(book, worker, KEYS[:64], now=0.0)
    settle(book, worker.take_reports(100.0))
    free = book.index.free_slots
    for keys in (KEYS[:32], KEYS[32:64]):
        worker.carry_out(Orders(packs=(book.plan_pack(keys, 0),)), 100.0)
    assert settle(book, worker.take_reports(200.0)) == 2
    assert book.index.free_slots - free == 2 * 10
    assert all(map(book.index.readable, KEYS[:64]))


def test_a_line_transfers_one_order_at_a_time() -> None:
    line = Line(100.0, latency_s=1.0)
    assert line.send(200, now=10.0) == 13.0
    assert line.send(100, now=10.0) == 15.0, "behind the first"
    assert line.send(100, now=100.0) == 102.0
    assert line.carried == 400


def test_a_line_without_bandwidth_is_refused() -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        Line(0.0)


def test_a_full_store_deletes_its_oldest_segment_except_the_survivors() -> None:
    pages = [PageKey(n.to_bytes(8, "big")) for n in range(2 * SEGMENTS + 1)]
    store = VirtualStore(2 * SEGMENTS, Line(1.0), Line(1.0))
    store.put(pages[:-1])
    full = store.proposal
    store.put(pages[-1:])
    dying = store.proposal
    assert full is None, "it holds every page of its capacity"
    assert dying is not None
    assert dying.keys == (pages[0], pages[1])
    assert store.reclaim(Reclaim(dying.segment, (pages[1],))) == 1
    report = store.take_report(PAGE_BYTES)
    assert report is not None
    assert report.gone == (pages[0],)
    assert report.stored_bytes == 2 * SEGMENTS * PAGE_BYTES


def test_survivors_are_written_after_earlier_orders(book: OrderBook, worker: VirtualWorker) -> None:
    save(book, worker, KEYS, now=0.0)
    settle(book, worker.take_reports(100.0))
    order = book.plan_demote(SSD, KEYS[:70], 0.0)
    assert order is not None
    send(worker, 100.0, order)
    settle(book, worker.take_reports(1000.0))
    later = book.plan_demote(SSD, KEYS[70:71], 0.0)
    assert later is not None
    send(worker, 1000.0, reclaims={0: Reclaim(0, (KEYS[1],))})
    send(worker, 1000.0, later)
    assert worker.take_reports(1000.0) is not None, "a page is gone"
    assert worker.take_reports(1019.0) is None
    assert settle(book, worker.take_reports(1020.0)) == 1, "one page behind another"


def test_orders_that_finish_together_are_reported_in_the_order_of_sending(
    book: OrderBook, worker: VirtualWorker
) -> None:
    save(book, worker, KEYS[:2], now=0.0)
    settle(book, worker.take_reports(50.0))
    first, second = (
        LoadOrder(OrderId(order_id), 0, "r", (1,), (1,), RestoreMode.SYNC) for order_id in (9, 8)
    )
    pack = book.plan_pack(KEYS[:2], 0)
    worker.carry_out(Orders(loads=(first, second), packs=(pack,)), 50.0)
    reports = worker.take_reports(52.0)
    assert reports is not None
    assert list(reports.orders) == [first.order_id, second.order_id, pack.order_id]


def test_cold_pages_are_decoded_while_others_are_copied() -> None:
    worker = make_worker(decode=BANDWIDTH / 8)
    slots, sync = (1, 2, 3, -1), RestoreMode.SYNC
    cold = LoadOrder(OrderId(1), 0, "r", (1, 2, 3, 4), slots, sync, cold=(KEYS[0],))
    assert worker.carry_out(Orders(loads=(cold,)), 0.0) == 8.0, "decoding takes longer"
    reports = worker.take_reports(8.0)
    assert reports is not None
    assert reports.orders[OrderId(1)].seconds == 8.0
    plain = LoadOrder(OrderId(2), 0, "r", (1,), (1,), RestoreMode.ASYNC)
    assert worker.carry_out(Orders(loads=(plain,)), 8.0) == 8.0, "no step waits for it"
    assert worker.next_event == 9.0


def test_a_store_answers_a_lookup_immediately(book: OrderBook, worker: VirtualWorker) -> None:
    stored(book, worker, KEYS[:1])
    lookup = LookupOrder(OrderId(1_000), SSD, tuple(KEYS[:2]), deadline_s=1.0)
    send(worker, 100.0, lookup)
    reports = worker.take_reports(100.0)
    assert reports is not None
    assert reports.orders[lookup.order_id].failed == {1}
