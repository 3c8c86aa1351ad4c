"""Figure of a comparison: a bar for every case, groups beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiered_kv.bench.common.plotting import COLOURS, matplotlib_modules

Row = Mapping[str, Any]


def draw_bars(result: Mapping[str, Any], base: Path) -> list[Path]:
    """Draw ``base``.png and .svg: each case over the first of its group, with its interval.

    Raises:
        PlotError: matplotlib is missing.
    """
    matplotlib, figures = matplotlib_modules()
    base.parent.mkdir(parents=True, exist_ok=True)
    rows = result["rows"]
    groups = list(dict.fromkeys(row["group"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    # A fixed salt and no date: equal rows give equal files.
    with matplotlib.rc_context({"svg.hashsalt": "sim", "font.size": 9}):
        figure = figures.Figure(figsize=(2.5 + 1.8 * len(groups), 4.2), layout="constrained")
        axes = figure.subplots()
        width = 0.8 / len(cases)
        for at, case in enumerate(cases):
            own = {row["group"]: row["over_first"] for row in rows if row["case"] == case}
            places = [groups.index(group) + (at + 0.5) * width - 0.4 for group in own]
            over = list(own.values())
            axes.bar(
                places,
                [one["value"] for one in over],
                width,
                label=case,
                color=COLOURS[at % len(COLOURS)],
                yerr=_errors(over),
                error_kw={"elinewidth": 0.8, "capsize": 1.5},
            )
        axes.axhline(1.0, color=COLOURS[0], linewidth=0.8)
        axes.set_xticks(range(len(groups)), groups)
        axes.set_ylabel(f"{result['figure']} over {cases[0]}")
        axes.set_title(result["title"])
        axes.grid(alpha=0.3, axis="y")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        paths = [base.with_suffix(".png"), base.with_suffix(".svg")]
        figure.savefig(paths[0], dpi=130)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _errors(over: Sequence[Mapping[str, float | None]]) -> list[list[float]]:
    """Distances below and above the bars."""
    return [
        [abs((one[bound] or one["value"] or 0.0) - (one["value"] or 0.0)) for one in over]
        for bound in ("low", "high")
    ]
