"""Order of servers in a round, and the interval that depends on it."""

from __future__ import annotations

import math

import numpy as np

from tiered_kv.bench.agents.paired import PairedRatio
from tiered_kv.bench.live.live_rounds import drawn_order

SEEDS = range(400)
ROUNDS = 4


def spells(seed: int) -> list[float]:
    """Times of runs one after the other on a machine that is slow for two runs, fast for two."""
    rng = np.random.default_rng(seed)
    phase, level = rng.integers(4), rng.uniform(0, 0.04)
    noise = rng.normal(0, 0.01, 2 * ROUNDS)
    slow = [1 + level * ((at + phase) % 4 < 2) for at in range(2 * ROUNDS)]
    return [one + float(more) for one, more in zip(slow, noise, strict=True)]


def contains_zero(times: list[float], orders: list[list[str]]) -> bool:
    """Interval of two servers that are one and the same, measured in these orders."""
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
    drawn = [drawn_order(servers, seed, number) for seed in SEEDS for number in range(ROUNDS)]
    assert drawn == [
        drawn_order(servers, seed, number) for seed in SEEDS for number in range(ROUNDS)
    ]
    assert {tuple(one) for one in drawn} == {("a", "b", "c"), ("c", "b", "a")}
    first = sum(one[0] == "a" for one in drawn)
    assert abs(first - len(drawn) / 2) < 3 * math.sqrt(len(drawn)) / 2


def test_rounds_draw_independently() -> None:
    same = sum(
        drawn_order(["a", "b"], seed, 0) == drawn_order(["a", "b"], seed, 1) for seed in SEEDS
    )
    assert abs(same - len(SEEDS) / 2) < 3 * math.sqrt(len(SEEDS)) / 2


def test_spells_of_noise_do_not_make_a_server_differ_from_itself() -> None:
    """The interval keeps its promise of 95% with orders that are drawn, not with ones that
    alternate."""
    alternating = [["a", "b"], ["b", "a"], ["a", "b"], ["b", "a"]]
    drawn = [[drawn_order(["a", "b"], seed, number) for number in range(ROUNDS)] for seed in SEEDS]
    kept = sum(contains_zero(spells(seed), drawn[seed]) for seed in SEEDS)
    assert kept >= 0.93 * len(SEEDS)
    assert sum(contains_zero(spells(seed), alternating) for seed in SEEDS) < 0.85 * len(SEEDS)
