"""Pages come up from SSD when that is faster than computing."""

from __future__ import annotations

import pytest

from tiered_kv.policies.cache.promotion import UNKNOWN_WAIT_S, Promotion, worth_promoting


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
