"""Conclusions that a soak draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_kv.bench.common.server import ServerOptions
from tiered_kv.bench.replay.kinds import SCHEDULER
from tiered_kv.bench.soak.__main__ import SLACK, leaks, medians, slope, tenths, with_every_tier

MIB = 1 << 20


def test_memory_that_grew_at_first_and_stays_has_no_slope() -> None:
    grew = [(float(s), min(s, 300) * MIB) for s in range(0, 601, 2)]
    assert slope(grew) == pytest.approx(0.0, abs=1e-6)
    assert tenths(grew) == [0, 60, 120, 180, 240, 300, 300, 300, 300, 300, 300]


def test_memory_that_goes_on_growing_has() -> None:
    assert slope([(float(s), s * MIB) for s in range(0, 600, 2)]) == pytest.approx(60.0)


def test_too_short_a_run_tells_nothing() -> None:
    assert slope([]) == 0.0
    assert tenths([]) == []
    assert tenths([(0.0, 5 * MIB)]) == [5] * 11


def test_what_there_is_more_of_is_a_leak_but_for_connections_that_are_kept() -> None:
    before = {"pinned_blocks": 0, "threads": 80}
    assert leaks(before, {"pinned_blocks": 0, "threads": 80 + SLACK["threads"]}) == {}
    after = {"pinned_blocks": 3, "threads": 81 + SLACK["threads"]}
    assert leaks(before, after) == {"pinned_blocks": 3, "threads": 1}


def test_the_connector_is_all_that_is_added_to_stock(tmp_path: Path) -> None:
    stock = ServerOptions(model="m", env={"A": "1"}, extra_args=("--enable-prefix-caching",))
    ours = with_every_tier(stock, tmp_path)
    assert ours.extra_args == (*stock.extra_args, "--scheduler-cls", SCHEDULER)
    assert ours.env["A"] == "1"
    assert Path(ours.env["TIERED_KV_SSD_PATH"]).parent == tmp_path
    assert ours.kv_transfer_config is not None


def test_the_medians_of_tenths_show_what_became_slower() -> None:
    assert medians([1.0] * 50 + [2.0] * 50) == [1.0] * 5 + [2.0] * 5
    assert medians([3.0, 1.0]) == [3.0, 1.0]
    assert medians([]) == []
