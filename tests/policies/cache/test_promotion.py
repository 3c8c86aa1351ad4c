"""Pages come up from SSD when that is faster than computing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.keys import PageKey
from tiered_kv.policies.cache.promotion import (
    STALLED_S,
    UNKNOWN_WAIT_S,
    Promotion,
    bandwidth_after_refusal,
    is_stalled,
    pages_without,
    room_ahead,
    room_for_turns,
    slowest_store,
    waits_for_slots,
    worth_promoting,
)
from tiered_kv.tiers import StoreId, TierId

FAST, SLOW = StoreId(TierId("fast"), 0), StoreId(TierId("slow"), 0)


@pytest.mark.parametrize(
    ("promote_s", "recompute_s", "worth"),
    [(0.1, 2.0, True), (2.0, 0.1, False), (1.0, 1.0, True), (5.0, 0.0, True)],
    ids=["faster", "slower", "as fast", "nobody knows"],
)
def test_a_promotion_slower_than_computing_is_not_made(
    promote_s: float, recompute_s: float, worth: bool
) -> None:
    assert worth_promoting(Promotion(promote_s, recompute_s)) is worth


def test_nobody_waits_longer_than_computing_would_take() -> None:
    assert Promotion(0.1, 2.0).longest_wait_s == 2.0
    assert Promotion(0.1, 0.0).longest_wait_s == UNKNOWN_WAIT_S


@pytest.mark.parametrize(
    ("mine", "others", "left_s", "waits"),
    [
        (0, 5, None, True),
        (0, 5, 0.5, True),
        (0, 5, 0.4, False),
        (0, 0, None, False),
        (1, 5, None, False),
    ],
    ids=["nothing is lost yet", "in time", "too late", "nobody gives any back", "it has some"],
)
def test_a_turn_waits_for_slots_that_others_give_back(
    mine: int, others: int, left_s: float | None, waits: bool
) -> None:
    promotion = Promotion(0.5, 2.0)
    assert waits_for_slots(promotion, mine=mine, others=others, left_s=left_s) is waits


def test_what_is_not_worth_it_is_tried_without_the_slowest_tier() -> None:
    """A page is of no use without all before it."""
    pages = [PageKey(bytes([n])) for n in range(6)]
    assert slowest_store({FAST: 0.1, SLOW: 2.0}) == SLOW
    fresh = {FAST: [pages[0], pages[3]], SLOW: [pages[2], pages[4]]}
    assert pages_without(SLOW, pages, fresh) == 2
    assert pages_without(SLOW, pages, {FAST: pages}) == 0, "all of its pages are on their way"


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 10_000))
def test_promotions_leave_slots_to_what_is_saved(num_slots: int, free: int, ordered: int) -> None:
    assert room_for_turns(num_slots, ordered) + ordered <= max(1, num_slots / 2)
    assert room_ahead(num_slots, free, ordered) <= free, "nothing is evicted before it is due"
    assert room_ahead(num_slots, free, ordered) + ordered <= max(ordered + free, num_slots / 4)


def test_a_store_that_keeps_an_order_for_long_is_stalled() -> None:
    assert not is_stalled(STALLED_S / 2)
    assert is_stalled(STALLED_S)


def test_a_tier_that_was_slow_once_is_tried_again() -> None:
    bandwidth = 1e6
    for _ in range(100):
        bandwidth = bandwidth_after_refusal(bandwidth, 1e9)
    assert bandwidth == 1e9
    assert bandwidth_after_refusal(2e9, 1e9) == 2e9, "it is faster than expected"
