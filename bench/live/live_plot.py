"""Figures of a sweep: over arrival rates, in the manner of Continuum's, or over live sessions,
where the knee shows that VRAM is full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiered_kv.bench.agents.plotting import COLOURS, MARKERS, PlotError, matplotlib_modules

from .live_load import Arriving

AXES: Mapping[str, str] = {
    Arriving.JPS.value: "jobs a second",
    Arriving.SESSIONS.value: "live sessions",
}


def plot_sweeps(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw ``jps.png`` and ``sessions.png``, each with its SVG, of those that were measured.

    Args:
        rows: of ``live_figures.live_rows``.

    Raises:
        PlotError: matplotlib is missing, or there is nothing to draw.
    """
    paths = []
    for kind, label in AXES.items():
        own = [row for row in rows if kind in row]
        if own:
            paths += _drawn(own, kind, label, folder)
    if not paths:
        raise PlotError("no run to draw")
    return paths


def _drawn(rows: Sequence[Mapping[str, Any]], kind: str, label: str, folder: Path) -> list[Path]:
    matplotlib, figures = matplotlib_modules()
    # A fixed salt and no date: equal runs give equal files.
    with matplotlib.rc_context({"svg.hashsalt": "live", "font.size": 10}):
        figure = figures.Figure(figsize=(13, 4.2), layout="constrained")
        times, first, rate = figure.subplots(1, 3)
        for at, server in enumerate(dict.fromkeys(row["server"] for row in rows)):
            look = {"color": COLOURS[at % len(COLOURS)], "marker": MARKERS[at % len(MARKERS)]}
            own = sorted((row for row in rows if row["server"] == server), key=lambda x: x[kind])
            level = [row[kind] for row in own]
            times.plot(level, [row["average_duration"] for row in own], label=server, **look)
            tail = [row["percentile_95"] for row in own]
            times.plot(level, tail, linestyle=":", alpha=0.6, **look)
            first.plot(level, [row["ttft"]["p90"] for row in own], **look)
            rate.plot(level, [row["tokens_per_s"] for row in own], **look)
        titles = {
            times: "job completion time, s: mean, dotted P95",
            first: "time to first token, s: P90",
            rate: "tokens a second, prompts and answers",
        }
        for axes, title in titles.items():
            axes.set_title(title)
            axes.set_xlabel(label)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        handles, labels = times.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{kind}.png", folder / f"{kind}.svg"]
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths
