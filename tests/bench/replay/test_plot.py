from __future__ import annotations

import importlib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tiered_kv.bench.agents.plotting import COLOURS, PlotError
from tiered_kv.bench.replay.report import Row, plot, speed_ups


def row(server: str, load: str, mean_s: float, jobs_per_s: float) -> Row:
    return {
        "server": server,
        "load": load,
        "mean_s": mean_s,
        "p95_s": mean_s * 1.5,
        "jobs_per_s": jobs_per_s,
        "by_turn": [{"turn": turn, "ttft_s": mean_s / 10} for turn in (1, 2, 3)],
    }


SWEEP = [
    row(server, load, mean_s * (rate + 0.1), rate)
    for load, rate in (("idle", 0.05), ("pressure", 0.2), ("beyond", 0.4))
    for server, mean_s in (("stock", 100.0), ("tiered", 60.0), ("bound", 50.0))
]


def test_a_speed_up_is_over_stock_of_the_same_load() -> None:
    gains = speed_ups(SWEEP)
    assert list(gains) == ["idle", "pressure", "beyond"]
    assert gains["pressure"] == pytest.approx({"tiered": 100 / 60, "bound": 2.0})
    assert speed_ups([row("tiered", "idle", 1.0, 1.0)]) == {}


def test_a_sweep_is_drawn_as_png_and_svg_and_equally_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = plot(SWEEP, tmp_path / "new")
    assert [path.name for path in paths] == ["replay.png", "replay.svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    drawn = paths[1].read_text()
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    for colour in COLOURS[1:3]:
        assert colour.lower() in drawn.lower()
    assert plot(SWEEP, tmp_path / "again")[1].read_text() == drawn
    for load in ("idle", "pressure"):
        assert plot([row("tiered", load, 3.0, 0.1)], tmp_path), "a lone server under one load"


def test_without_matplotlib_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(PlotError, match="pip install matplotlib"):
        plot(SWEEP, tmp_path)
