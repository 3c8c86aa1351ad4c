"""Random agents on a real server with every tier and in job order leak no resource."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_kv.bench.soak.__main__ import measure

pytestmark = pytest.mark.e2e


def test_fifteen_seconds_of_agents_leave_nothing_behind(small_model: Path, tmp_path: Path) -> None:
    found = measure(0.25, seed=1, logs=tmp_path)
    log = (tmp_path / "soak.log").read_text()
    assert found["errors"] == 0, found["first_error"]
    assert found["stock"]["errors"] == 0, found["stock"]["first_error"]
    assert not found["leaked"], found["left"]
    assert found["requests"] > 6
    assert found["updates"] > 0
    assert found["snapshots"] + sum(found["refused"].values()) > 0
    assert found["different"] == 0, f"{found['compared']} compared"
    assert "failed; the engine continues" not in log, "a hook raised"
    assert "ContinuumScheduler" in log
