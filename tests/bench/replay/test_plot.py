from __future__ import annotations

import importlib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tiered_kv.bench.agents.plotting import COLOURS, PlotError
from tiered_kv.bench.replay.report import ByTurn, Row, plot, speed_ups


def row(server: str, load: str, mean_s: float, jobs_per_s: float) -> Row:
    turns = tuple(ByTurn(turn, mean_s / 10, mean_s / 5, {}) for turn in (1, 2, 3))
    return Row(
        server=server,
        load=load,
        mean_s=mean_s,
        p95_s=mean_s * 1.5,
        recomputed_fraction=0.5,
        agrees=None,
        p50_s=mean_s,
        p90_s=mean_s,
        p99_s=mean_s * 2,
        jobs=3,
        unfinished=(),
        jobs_per_s=jobs_per_s,
        done_per_s=jobs_per_s,
        ttft_s=mean_s / 10,
        sources={},
        by_turn=turns,
        cpu_s=1.0,
        rss_bytes=1,
    )


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


@pytest.mark.parametrize("load", ["idle", "pressure"])
def test_a_single_load_or_a_lone_server_can_be_drawn(tmp_path: Path, load: str) -> None:
    pytest.importorskip("matplotlib")
    assert plot([row("tiered", load, 3.0, 0.1)], tmp_path)


def test_without_matplotlib_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(PlotError, match="pip install matplotlib"):
        plot(SWEEP, tmp_path)
