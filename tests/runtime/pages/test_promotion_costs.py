"""A promotion is made unless it is slower than recomputing, and no turn waits longer for it than
recomputing would take."""

from __future__ import annotations

import pytest

from tiered_kv.connectors.runtime.pages.promotions import UNKNOWN_WAIT_S, PromotionCost


@pytest.mark.parametrize(
    ("promote_s", "recompute_s", "worth"),
    [(0.1, 2.0, True), (2.0, 0.1, False), (1.0, 1.0, True), (5.0, 0.0, True)],
    ids=["faster", "slower", "as fast", "unknown"],
)
def test_a_promotion_slower_than_computing_is_not_made(
    promote_s: float, recompute_s: float, worth: bool
) -> None:
    assert PromotionCost(promote_s, recompute_s).worth_it is worth


def test_no_turn_waits_longer_than_computing_would_take() -> None:
    assert PromotionCost(0.1, 2.0).longest_wait_s == 2.0
    assert PromotionCost(0.1, 0.0).longest_wait_s == UNKNOWN_WAIT_S


@pytest.mark.parametrize(
    ("mine", "others", "left_s", "waits"),
    [
        (0, 5, None, True),
        (0, 5, 0.5, True),
        (0, 5, 0.4, False),
        (0, 0, None, False),
        (1, 5, None, False),
    ],
    ids=["nothing is lost yet", "in time", "too late", "no slot is released", "it has some"],
)
def test_a_turn_waits_for_slots_that_others_give_back(
    mine: int, others: int, left_s: float | None, waits: bool
) -> None:
    promotion = PromotionCost(0.5, 2.0)
    assert promotion.waits_for_slots(mine=mine, others=others, left_s=left_s) is waits
