"""The demo runs on a CPU without AVX-512, emulated on any machine: it measures, chooses a size,
runs and compares."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.bench.paths import ROOT

pytestmark = pytest.mark.e2e


def computed(run: dict[str, Any]) -> int:
    """Return the prompt tokens of later turns that were recomputed."""
    return sum(row["sources"]["recomputed"] for row in run["by_turn"][1:])


def test_the_demo_shows_its_effect_on_a_cpu_without_avx512(
    tmp_path: Path, small_model: Path
) -> None:
    avx2 = str(ROOT / "scripts" / "avx2")
    command = [avx2, sys.executable, "-m", "bench.demo", "--model", str(small_model), "--json"]
    command += ["--seconds", "50", "--turns", "6", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "in float32 on" in done.stderr, "it says what it chose"
    found = json.loads(done.stdout)
    assert found["dtype"] == "float32"
    assert found["differing_answers"] == 0
    assert found["answers"] == found["jobs"] * 6
    assert computed(found["tiered"]) < 0.6 * computed(found["stock"])
    for name in ("stock.log", "tiered.log", "trace.jsonl"):
        assert (tmp_path / name).stat().st_size > 0
