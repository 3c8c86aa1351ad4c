"""A paired ratio, its confidence interval, and the order of servers that the interval depends
on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.bench.agents.paired import PairedRatio, drawn_order

seconds = st.floats(0.1, 1e4)


@given(st.lists(st.tuples(seconds, seconds), min_size=2, max_size=6))
def test_the_interval_lies_around_the_ratio(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*pairs, strict=True)
    found = PairedRatio.of(ours, theirs)
    back = PairedRatio.of(theirs, ours)
    assert found.low is not None
    assert found.high is not None
    assert back.high is not None
    assert found.low <= found.value * (1 + 1e-9)
    assert found.value <= found.high * (1 + 1e-9)
    assert found.value * back.value == pytest.approx(1.0)
    assert found.low * back.high == pytest.approx(1.0)


def test_the_interval_is_that_of_students_t() -> None:
    found = PairedRatio.of([math.e, 1.0, 1.0], [1.0, 1.0, 1.0])
    assert found.value == pytest.approx(math.exp(1 / 3))
    assert found.high is not None
    assert found.high / found.value == pytest.approx(math.exp(4.3027 / 3), rel=1e-4)


def test_one_pair_has_a_ratio_and_no_interval() -> None:
    found = PairedRatio.of([3.0], [2.0])
    assert found.value == pytest.approx(1.5)
    assert found.low is found.high is None


def test_no_pair_is_an_error() -> None:
    with pytest.raises(ValueError, match="no pair"):
        PairedRatio.of([], [])


SEEDS = range(400)
ROUNDS = 4


def spells(seed: int) -> list[float]:
    """Return times of consecutive runs on a machine that alternates between two slow and two fast
    runs."""
    rng = np.random.default_rng(seed)
    phase, level = rng.integers(4), rng.uniform(0, 0.04)
    noise = rng.normal(0, 0.01, 2 * ROUNDS)
    slow = [1 + level * ((at + phase) % 4 < 2) for at in range(2 * ROUNDS)]
    return [one + float(more) for one, more in zip(slow, noise, strict=True)]


def contains_one(times: list[float], orders: list[list[str]]) -> bool:
    """Compare a server with itself over runs in these orders. Returns True if the confidence
    interval of the ratio contains 1."""
    by_server: dict[str, list[float]] = {"a": [], "b": []}
    for number, order in enumerate(orders):
        for at, server in enumerate(order):
            by_server[server].append(times[2 * number + at])
    ratio = PairedRatio.of(by_server["b"], by_server["a"])
    assert ratio.low is not None
    assert ratio.high is not None
    return ratio.low <= 1 <= ratio.high


def test_a_seed_draws_the_same_orders_and_each_server_is_first_half_of_the_time() -> None:
    servers = ["a", "b", "c"]

    def drawn() -> list[list[str]]:
        return [drawn_order(servers, seed, number) for seed in SEEDS for number in range(ROUNDS)]

    assert drawn() == drawn()
    assert {tuple(one) for one in drawn()} == {("a", "b", "c"), ("c", "b", "a")}
    first = sum(one[0] == "a" for one in drawn())
    assert abs(first - len(drawn()) / 2) < 3 * math.sqrt(len(drawn())) / 2
    same = sum(drawn_order(servers, seed, 0) == drawn_order(servers, seed, 1) for seed in SEEDS)
    assert abs(same - len(SEEDS) / 2) < 3 * math.sqrt(len(SEEDS)) / 2, "rounds are independent"


def test_spells_of_noise_do_not_make_a_server_differ_from_itself() -> None:
    """A server is compared with itself on a machine whose speed changes every two runs. If the
    order of runs is drawn at random, at least 93% of the 95% intervals contain 1. If the order
    alternates, less than 85% do."""
    alternating = [["a", "b"], ["b", "a"], ["a", "b"], ["b", "a"]]
    drawn = [[drawn_order(["a", "b"], seed, number) for number in range(ROUNDS)] for seed in SEEDS]
    kept = sum(contains_one(spells(seed), drawn[seed]) for seed in SEEDS)
    assert kept >= 0.93 * len(SEEDS)
    assert sum(contains_one(spells(seed), alternating) for seed in SEEDS) < 0.85 * len(SEEDS)
