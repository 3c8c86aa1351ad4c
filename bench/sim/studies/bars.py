"""Figure of a comparison: a bar for every case, groups beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiered_kv.bench.agents.plotting import COLOURS, matplotlib_modules

Row = Mapping[str, Any]
BAR_INCHES = 0.24


def draw_bars(result: Mapping[str, Any], base: Path) -> list[Path]:
    """Draw ``base``.png and .svg: a panel for every group, its cases over the first, with their
    intervals. Groups of the same cases have one scale.

    Raises:
        PlotError: matplotlib is missing.
    """
    matplotlib, figures = matplotlib_modules()
    base.parent.mkdir(parents=True, exist_ok=True)
    groups = dict[str, list[Row]]()
    for row in result["rows"]:
        groups.setdefault(row["group"], []).append(row)
    alike = len({tuple(row["case"] for row in rows) for rows in groups.values()}) == 1
    heights = [1 + len(rows) for rows in groups.values()]
    # A fixed salt and no date: equal rows give equal files.
    with matplotlib.rc_context({"svg.hashsalt": "sim", "font.size": 9}):
        figure = figures.Figure(figsize=(7, 1 + BAR_INCHES * sum(heights)), layout="constrained")
        panels = figure.subplots(
            len(groups), 1, sharex=alike, squeeze=False, height_ratios=heights
        )[:, 0]
        for axes, (group, rows) in zip(panels, groups.items(), strict=True):
            _draw_group(axes, group, rows)
        panels[-1].set_xlabel(f"{result['figure']} over that of the first")
        figure.suptitle(result["title"])
        paths = [base.with_suffix(".png"), base.with_suffix(".svg")]
        figure.savefig(paths[0], dpi=130)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _draw_group(axes: Any, group: str, rows: Sequence[Row]) -> None:
    over = [row["over_first"] for row in rows]
    axes.barh(
        [row["case"] for row in rows],
        [one["value"] for one in over],
        color=[COLOURS[at % len(COLOURS)] for at in range(len(rows))],
        xerr=_errors(over),
        error_kw={"elinewidth": 0.8, "capsize": 1.5},
    )
    axes.invert_yaxis()  # the first on top, as in the table
    axes.axvline(1.0, color=COLOURS[0], linewidth=0.8)
    axes.grid(alpha=0.3, axis="x")
    axes.set_title(group, loc="left", fontsize=9)


def _errors(over: Sequence[Mapping[str, float | None]]) -> list[list[float]]:
    """Distances below and above the bars."""
    return [
        [abs((one[bound] or one["value"] or 0.0) - (one["value"] or 0.0)) for one in over]
        for bound in ("low", "high")
    ]
