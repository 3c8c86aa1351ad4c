from __future__ import annotations

import pytest

from tests.bench.replay.test_figures import run
from tiered_kv.bench.replay.report.ratios import ratio, ratios

NAMES = ("stock", "tiered", "reach", "bound")


def test_ours_is_told_against_each_server_under_each_load_but_idle() -> None:
    runs = [run(name, [2.0], load=load) for load in ("idle", "beyond") for name in NAMES]
    assert [(one.load, one.server) for one in ratios(runs)] == [
        ("beyond", "stock"),
        ("beyond", "reach"),
        ("beyond", "bound"),
    ]
    assert {one.mean.ratio for one in ratios(runs)} == {1.0}


def test_peers_are_among_them_and_stock_once_more_is_not() -> None:
    names = ("tiered", "lmcache", "control", "tiered-behind-router")
    found = ratios([run(name, [2.0, 3.0]) for name in names])
    assert [one.server for one in found] == ["lmcache", "tiered-behind-router"]


def test_all_rounds_count_and_each_is_told() -> None:
    runs = [
        run("reach", [10, 10]),
        run("tiered", [11, 11]),
        run("reach", [20, 40], number=1),
        run("tiered", [15, 30], number=1),
    ]
    found = ratio(runs, "reach")
    assert found is not None
    assert found.rounds == pytest.approx((1.1, 0.75))
    assert found.mean.ratio == pytest.approx(67 / 80)
    assert found.p90.ratio == pytest.approx(25.5 / 34)
    # Two rounds of which one may be drawn twice.
    assert (found.mean.low, found.mean.high) == pytest.approx((0.75, 1.1))
    assert 0.7 < found.p95 < 0.8, "the longest jobs decide"


def test_a_pair_has_a_round_and_its_jobs_in_common() -> None:
    runs = [
        run("reach", [10, 90], failed=[1]),
        run("tiered", [11, 11]),
        run("tiered", [99, 99], number=1),
        run("reach", [99, 99], number=2),
    ]
    found = ratio(runs, "reach")
    assert found is not None
    assert found.mean.ratio == pytest.approx(1.1)
    assert found.rounds == pytest.approx((1.1,))
    assert ratio(runs, "bound") is None
    assert ratio([run("reach", [9], failed=[0]), run("tiered", [9])], "reach") is None


def test_the_interval_is_that_of_pairs_and_not_of_the_times_themselves() -> None:
    """Jobs take from a second to a hundred; ours takes a tenth less for each."""
    times = [float(2**at) for at in range(8)]
    runs = [
        one
        for number in range(3)
        for one in (
            run("stock", times, number=number),
            run("tiered", [0.9 * time for time in times], number=number),
        )
    ]
    found = ratio(runs, "stock")
    assert found is not None
    for one in (found.mean, found.p90):
        assert (one.ratio, one.low, one.high) == pytest.approx((0.9, 0.9, 0.9))


def test_an_interval_is_wide_where_some_jobs_gain_and_others_lose() -> None:
    runs = [run("stock", [10.0] * 8), run("tiered", [5.0, 15.0] * 4)]
    found = ratio(runs, "stock")
    assert found is not None
    assert found.mean.ratio == pytest.approx(1.0)
    assert found.mean.low < 0.8
    assert found.mean.high > 1.2
