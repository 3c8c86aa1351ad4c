"""The benchmark's script on a real server: everybody tells the same figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_kv.bench.trace.accounts import accounts
from tiered_kv.bench.trace.script import run_script

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def test_trace_metrics_routes_and_clients_agree(small_model: Path, tmp_path: Path) -> None:
    seen = run_script(small_model, tmp_path, 0, lambda _: None)
    every = accounts(seen)
    assert [one.to_json() for one in every if not one.agrees] == []
    assert len(every) > 20
    assert len(seen.records) > 40
