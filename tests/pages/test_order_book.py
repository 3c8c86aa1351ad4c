"""The page index and the order book together: every page that is read is the page that was
saved."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pages.world import BANDWIDTH, PAGE_BYTES
from tiered_kv.keys import PageKey
from tiered_kv.orders import (
    Order,
    OrderReport,
    RestoreMode,
)
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.pages.order_book import OrderBook, Settled
from tiered_kv.pages.tier_index import TierIndex
from tiered_kv.policies.cache.lru import LeastRecentlyUsed
from tiered_kv.testing.stores import SSD

A, B, C = (PageKey(name * 20) for name in (b"A", b"B", b"C"))


@pytest.fixture
def planner() -> OrderBook:
    """Create an order book for two ranks with two slots."""
    return OrderBook(
        PageIndex(2, LeastRecentlyUsed()), 2, [PAGE_BYTES], BANDWIDTH, {SSD: TierIndex()}
    )


def report(ranks: int = 2, failed: set[int] | None = None, seconds: float = 0.0) -> OrderReport:
    return OrderReport(ranks, frozenset(failed or ()), PAGE_BYTES, seconds)


def saved(planner: OrderBook, *keys: PageKey) -> None:
    order = planner.plan_save({key: block for block, key in enumerate(keys)})
    assert order is not None
    assert planner.settle({order.order_id: report()})


def test_a_page_already_saved_or_being_saved_is_left_out(planner: OrderBook) -> None:
    first = planner.plan_save({A: 1})
    assert first is not None
    assert first.blocks == (1,)
    assert planner.plan_save({A: 3}) is None
    second = planner.plan_save({A: 3, B: 4})
    assert second is not None
    assert second.blocks == (4,)
    assert planner.unsaved == 0


def test_pages_without_a_slot_are_not_saved_and_counted(planner: OrderBook) -> None:
    order = planner.plan_save({A: 1, B: 2, C: 3})
    assert order is not None
    assert order.blocks == (1, 2)
    assert planner.unsaved == 1
    assert planner.plan_save({C: 3}) is None
    assert planner.unsaved == 2


def test_every_order_has_a_unique_id_and_none_is_zero(planner: OrderBook) -> None:
    saved(planner, A, B)
    orders = [planner.plan_load("r", [A], [n], RestoreMode.SYNC) for n in range(3)]
    ids = {order.order_id for order in orders}
    assert len(ids) == 3
    assert 0 not in ids


def test_a_load_needs_as_many_blocks_as_pages(planner: OrderBook) -> None:
    saved(planner, A)
    with pytest.raises(ValueError, match="1 pages cannot fill 2 blocks"):
        planner.plan_load("r", [A], [1, 2], RestoreMode.SYNC)
    assert planner.plan_save({B: 1, C: 2}) is not None, "A was never acquired"


def test_the_bandwidth_is_learned_from_the_slowest_rank(planner: OrderBook) -> None:
    assert planner.copy_seconds(10) == pytest.approx(10 * PAGE_BYTES / BANDWIDTH)
    slow = PAGE_BYTES / (BANDWIDTH / 4)
    for _ in range(60):
        order = planner.plan_save({A: 1})
        assert order is not None
        planner.settle({order.order_id: report(ranks=1, seconds=slow / 100)})
        planner.settle({order.order_id: report(ranks=1, seconds=slow)})
        planner.index.forget(A)
    assert planner.bandwidth == pytest.approx(BANDWIDTH / 4, rel=0.01)


def test_copies_of_unknown_duration_teach_nothing(planner: OrderBook) -> None:
    saved(planner, A)
    assert planner.bandwidth == BANDWIDTH


def test_reports_can_be_merged_in_any_order() -> None:
    one = OrderReport(1, frozenset({1}), 100, 0.5)
    two = OrderReport(2, frozenset({2}), 300, 0.1)
    assert one.merge(two) == OrderReport(3, frozenset({1, 2}), 100, 0.5)
    assert two.merge(one) == one.merge(two)


AMOUNTS = st.tuples(st.integers(0, 2), st.integers(0, 2))


@given(AMOUNTS, AMOUNTS)
def test_the_slower_of_two_reports_is_the_same_whichever_comes_first(
    first: tuple[int, int], second: tuple[int, int]
) -> None:
    """The merged report has the time and the bytes of the rank that took longer, whichever report
    comes first. If both took equally long, it has the smaller number of bytes."""
    one, two = (OrderReport(1, frozenset(), nbytes, seconds) for seconds, nbytes in (first, second))
    merged = one.merge(two)
    assert merged == two.merge(one)
    seconds = max(first[0], second[0])
    slowest = [nbytes for took, nbytes in (first, second) if took == seconds]
    assert (merged.seconds, merged.nbytes) == (seconds, min(slowest))


# -- SSD ----------------------------------------------------------------------------------


def settle(planner: OrderBook, order: Order, *failed: int) -> Settled[Any]:
    report = OrderReport(1, frozenset(failed), 0, 0.0)
    (done,) = planner.settle({order.order_id: report})
    return done


def on_ssd(planner: OrderBook, *keys: PageKey) -> None:
    """Save and demote the pages, then remove them from CPU memory."""
    saved = planner.plan_save({key: block for block, key in enumerate(keys)})
    assert saved is not None
    settle(planner, saved)
    down = planner.plan_demote(SSD, keys, due=0.0)
    assert down is not None
    settle(planner, down)
    for key in keys:
        planner.index.forget(key)


def test_demotions_are_limited_and_pages_being_demoted_do_not_count() -> None:
    planner = OrderBook(
        PageIndex(4, LeastRecentlyUsed()), 1, [PAGE_BYTES], BANDWIDTH, {SSD: TierIndex()}
    )
    saved = planner.plan_save({A: 1, B: 2, C: 3})
    assert saved is not None
    settle(planner, saved)
    first = planner.plan_demote(SSD, [A, B, C], due=0.0, most=1)
    second = planner.plan_demote(SSD, [A, B, C], due=7.0, most=1)
    assert first is not None
    assert second is not None
    assert (first.keys, second.keys) == ((A,), (B,))
    assert (first.due, second.due) == (0.0, 7.0)
    assert planner.plan_demote(SSD, [C], due=0.0, most=0) is None
    settle(planner, first)
    settle(planner, second)
    rest = planner.plan_demote(SSD, [A, B, C], due=0.0)
    assert rest is not None
    assert rest.keys == (C,)


def test_a_demoted_page_keeps_its_eviction_order() -> None:
    planner = OrderBook(
        PageIndex(3, LeastRecentlyUsed()), 1, [PAGE_BYTES], BANDWIDTH, {SSD: TierIndex()}
    )
    saved = planner.plan_save({A: 1, B: 2, C: 3})
    assert saved is not None
    settle(planner, saved)
    order = planner.plan_demote(SSD, [B], due=0.0)
    assert order is not None
    assert list(planner.index.least_valuable(3)) == [A, C]
    settle(planner, order)
    assert list(planner.index.least_valuable(3)) == [A, B, C]


def test_a_promoted_page_is_readable_once_it_is_whole() -> None:
    planner = OrderBook(
        PageIndex(2, LeastRecentlyUsed()), 1, [PAGE_BYTES], BANDWIDTH, {SSD: TierIndex()}
    )
    on_ssd(planner, A, B)
    order = planner.plan_promote(SSD, [A, C, B], due=0.0)
    assert order is not None
    assert order.keys == (A, B)
    assert dict(planner.promoting) == {A: order.order_id, B: order.order_id}
    assert not planner.index.readable(A)
    assert planner.plan_promote(SSD, [A], due=0.0) is None, "it is on its way already"
    settle(planner, order, 1)
    assert planner.index.readable(A)
    assert not planner.promoting
    assert (A in planner.stores[SSD].index, B in planner.stores[SSD].index) == (True, False), (
        "a bad page is not tried again"
    )


def test_an_order_that_is_not_due_does_not_cause_steps() -> None:
    planner = OrderBook(
        PageIndex(2, LeastRecentlyUsed()), 1, [PAGE_BYTES], BANDWIDTH, {SSD: TierIndex()}
    )
    on_ssd(planner, A)
    order = planner.plan_promote(SSD, [A], due=5.0)
    assert order is not None
    assert (planner.in_flight, planner.expected(now=4.9)) == (1, 0)
    assert planner.expected(now=5.0) == 1
    settle(planner, order)
    assert (planner.in_flight, planner.expected(now=4.9)) == (0, 0)


def test_an_order_never_sent_leaves_no_trace() -> None:
    planner = OrderBook(
        PageIndex(2, LeastRecentlyUsed()), 1, [PAGE_BYTES], BANDWIDTH, {SSD: TierIndex()}
    )
    on_ssd(planner, A)
    up = planner.plan_promote(SSD, [A], due=0.0)
    assert up is not None
    planner.cancel(up)
    assert (planner.index.free_slots, planner.in_flight) == (2, 0)
    assert A in planner.stores[SSD].index, "nothing is known against it"
    saved = planner.plan_save({B: 1})
    assert saved is not None
    settle(planner, saved)
    down = planner.plan_demote(SSD, [B], due=0.0)
    assert down is not None
    planner.cancel(down)
    planner.index.check_integrity()
    assert (
        len(planner.stores[SSD].demoting),
        B in planner.stores[SSD].index,
        planner.index.readable(B),
    ) == (0, False, True)


def test_the_speed_of_promotions_is_learned_from_them_alone() -> None:
    planner = OrderBook(
        PageIndex(16, LeastRecentlyUsed()), 1, [PAGE_BYTES], BANDWIDTH, {SSD: TierIndex()}
    )
    keys = [PageKey(bytes([n]) * 20) for n in range(16)]
    on_ssd(planner, *keys)
    before = planner.promote_seconds(SSD, 16)
    order = planner.plan_promote(SSD, keys, due=0.0)
    assert order is not None
    assert planner.promote_seconds(SSD, 16) == 2 * before, "behind those already ordered"
    planner.settle({order.order_id: OrderReport(1, frozenset(), 16 * PAGE_BYTES, 1.0)})
    assert planner.promote_seconds(SSD, 16) > before
    assert planner.bandwidth == BANDWIDTH
