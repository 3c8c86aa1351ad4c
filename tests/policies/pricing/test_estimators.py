"""Costs of restores and of VRAM, learned from the engine's own work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.policies.pricing.estimators import (
    PEAK_HALF_LIFE_S,
    PRICE,
    Memoryfulness,
    PrefillFit,
    QueueDelay,
    ShadowPrice,
    Survival,
)


def prefill_s(behind: int, tokens: int) -> float:
    """Return the prefill time of a machine that takes 0.2 s per 1,000 tokens, plus a quadratic
    part."""
    begin, end = behind / 1000, (behind + tokens) / 1000
    return 0.2 * (end - begin) + 0.01 * (end**2 - begin**2)


def test_prefill_times_are_unknown_before_the_first_prefill() -> None:
    fit = PrefillFit()
    assert not fit.measured
    assert fit.seconds(0, 5000) == 0.0


def test_prefills_of_several_lengths_separate_linear_and_quadratic_parts() -> None:
    fit = PrefillFit()
    for behind, tokens in [(0, 1000), (0, 8000), (4000, 500), (0, 300), (20_000, 2000)]:
        fit.observe(behind, tokens, prefill_s(behind, tokens))
    for behind, tokens in [(0, 30_000), (10_000, 100), (0, 1)]:
        assert fit.seconds(behind, tokens) == pytest.approx(prefill_s(behind, tokens), rel=1e-6)


def test_prefills_of_one_length_give_a_linear_fit() -> None:
    fit = PrefillFit()
    for _ in range(5):
        fit.observe(0, 2000, 1.0)
    assert fit.seconds(0, 4000) == pytest.approx(2.0)


def test_an_estimate_holds_until_there_is_something_better() -> None:
    fit = PrefillFit()
    fit.suppose(2.0, 0.1)
    assert not fit.measured
    assert fit.seconds(0, 10_000) == pytest.approx(30.0)
    for tokens in [500, 3000, 9000] * 30:
        fit.observe(0, tokens, prefill_s(0, tokens))
    assert fit.seconds(0, 10_000) == pytest.approx(prefill_s(0, 10_000), rel=0.05)


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(-5, 10**6), st.floats(-1, 1e4)), max_size=30
    ),
    st.integers(0, 10**6),
)
def test_more_tokens_never_take_less_time(seen: list[tuple[int, int, float]], behind: int) -> None:
    fit = PrefillFit()
    for prefill in seen:
        fit.observe(*prefill)
    times = [fit.seconds(behind, tokens) for tokens in (0, 10, 1000, 10**6)]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert np.isfinite(times).all()


def test_queue_delay_is_the_mean_of_the_last_hundred() -> None:
    delay = QueueDelay()
    assert delay.mean_s == 0.0
    for _ in range(100):
        delay.observe(50.0)
    for _ in range(75):
        delay.observe(2.0)
    assert delay.mean_s == pytest.approx((25 * 50 + 75 * 2) / 100)


def correlated(lengths: list[int]) -> float:
    """Return the correlation according to its definition, computed from all pairs."""
    pairs = [(k, n - k) for n in lengths for k in range(1, n + 1)]
    served, left = np.array(pairs, float).T
    if served.std() == 0 or left.std() == 0:
        return 1.0
    return float(np.clip(-np.corrcoef(served, left)[0, 1], 0, 1))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_memoryfulness_is_the_correlation_of_served_and_left(lengths: list[int]) -> None:
    eta = Memoryfulness()
    for length in lengths:
        eta.observe(length)
    assert eta.value == pytest.approx(correlated(lengths), abs=1e-6)


def test_jobs_of_one_length_are_memoryful_and_geometric_ones_are_not() -> None:
    fixed, geometric = Memoryfulness(), Memoryfulness()
    assert fixed.value == 1.0
    rng = np.random.default_rng(0)
    for length in rng.geometric(0.05, 5000):
        fixed.observe(20)
        geometric.observe(int(length))
    assert fixed.value == pytest.approx(1.0)
    assert geometric.value < 0.1


def test_jobs_without_turns_are_ignored() -> None:
    eta = Memoryfulness()
    eta.observe(0)
    assert eta.value == 1.0


def test_vram_costs_nothing_while_there_is_room_for_demand_and_pins() -> None:
    price = ShadowPrice()
    price.observe(400, now=0.0)
    assert price.price(1000, pinned=600) == 0.0
    assert price.price(1000, pinned=601) == PRICE


def test_the_price_does_not_fall_as_demand_rises() -> None:
    price = ShadowPrice()
    prices = []
    for demand in range(0, 1100, 100):
        price.observe(demand, now=0.0)
        prices.append(price.price(1000, pinned=300))
    assert prices == sorted(prices)
    assert prices[0] == 0.0
    assert prices[-1] == PRICE


def test_the_price_is_divided_by_the_requests_that_a_restore_delays() -> None:
    assert ShadowPrice.of(1001.0, 1000) == PRICE
    assert ShadowPrice.of(1001.0, 1000, held_up=4.0) == PRICE / 4
    assert ShadowPrice.of(1001.0, 1000, held_up=0.0) == PRICE, "nothing is lost"
    assert ShadowPrice.of(1000.0, 1000) == 0.0


def test_a_burst_is_remembered_for_a_while() -> None:
    price = ShadowPrice()
    price.observe(900, now=0.0)
    price.observe(100, now=1.0)
    assert price.price(1000, pinned=300) == PRICE
    price.observe(100, now=1.0 + 3 * PEAK_HALF_LIFE_S)
    assert price.price(1000, pinned=300) == 0.0


def test_lost_pages_lower_the_survival_outside_vram() -> None:
    survival = Survival(1.0)
    survival.observe(found=900, wanted=900)
    assert survival.share == 1.0
    survival.observe(found=0, wanted=900)
    once = survival.share
    assert once < 1.0
    for _ in range(100):
        survival.observe(found=0, wanted=900)
    assert survival.share == pytest.approx(0.0, abs=1e-3)
    for _ in range(100):
        survival.observe(found=450, wanted=900)
    assert survival.share == pytest.approx(0.5, abs=1e-3)


@given(st.floats(0, 1), st.lists(st.tuples(st.integers(-5, 10**6), st.integers(-5, 10**6))))
def test_survival_stays_a_fraction_whatever_is_observed(
    first: float, told: list[tuple[int, int]]
) -> None:
    survival = Survival(first)
    for found, wanted in told:
        survival.observe(found, wanted)
        assert 0.0 <= survival.share <= 1.0
