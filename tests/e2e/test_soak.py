"""Random agents on a real server with every tier and jobs in order: nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.soak import leaks, measure, slope

pytestmark = pytest.mark.e2e


def test_half_a_minute_of_agents_leaves_nothing_behind(small_model: Path, tmp_path: Path) -> None:
    found = measure(0.5, seed=1, log=tmp_path / "server.log")
    log = (tmp_path / "server.log").read_text()
    assert found["errors"] == 0, found["first_error"]
    assert found["leaked"] == {}
    assert found["requests"] > 30
    assert "failed; the engine goes on" not in log, "a hook raised"
    assert "ContinuumScheduler" in log


def test_what_is_more_than_before_is_a_leak_beyond_some_slack() -> None:
    before = {"pinned_blocks": 0, "threads": 10}
    assert leaks(before, {"pinned_blocks": 3, "threads": 13}) == {"pinned_blocks": 3}
    assert leaks(before, {"pinned_blocks": 0, "threads": 20}) == {"threads": 6}


def test_the_slope_is_of_the_second_half() -> None:
    warm = [(float(s), 10 * s << 20) for s in range(60)]
    flat = [(float(s), 600 << 20) for s in range(60, 120)]
    assert slope(warm + flat) == pytest.approx(0.0, abs=1e-6)
    assert slope(warm) == pytest.approx(600.0)
    assert slope([]) == 0.0
