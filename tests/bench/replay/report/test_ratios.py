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
    assert {one.mean for one in ratios(runs)} == {1.0}


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
    assert found.mean == pytest.approx(67 / 80)
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
    assert found.mean == pytest.approx(1.1)
    assert found.rounds == pytest.approx((1.1,))
    assert ratio(runs, "bound") is None
    assert ratio([run("reach", [9], failed=[0]), run("tiered", [9])], "reach") is None
