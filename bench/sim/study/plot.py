"""Figures of a study: completion times over load, and the tiers that prompts came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiered_kv.bench.agents.plotting import COLOURS, MARKERS, PlotError, matplotlib_modules
from tiered_kv.bench.sim.engine.metrics import TIERS

from .study import FCFS, INFINITE

TIER_COLOURS = {"vram": COLOURS[1], "cpu": COLOURS[6], "ssd": COLOURS[5], "recomputed": COLOURS[3]}

Row = Mapping[str, Any]


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw a PNG and an SVG for every scene: mean, P95 and speed-up over FCFS against load, and
    the tiers that prompts came from at the highest one. What was there is replaced.

    Raises:
        PlotError: matplotlib is missing, or there are no rows.
    """
    if not rows:
        raise PlotError("no run to draw")
    matplotlib, figures = matplotlib_modules()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    # A fixed salt and no date: equal rows give equal files.
    with matplotlib.rc_context({"svg.hashsalt": "sim", "font.size": 9}):
        for scene, own in by_scene(rows).items():
            figure = figures.Figure(figsize=(15, 4.6), layout="constrained")
            _draw(figure, scene, own)
            base = folder / "-".join(scene).replace(" ", "").replace(".", "_")
            figure.savefig(base.with_suffix(".png"), dpi=130)
            figure.savefig(base.with_suffix(".svg"), metadata={"Date": None})
            paths += [base.with_suffix(".png"), base.with_suffix(".svg")]
    return paths


def by_scene(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Rows by workload, hardware, model and CPU memory."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        scene = (row["workload"], row["gpu"], row["model"], f"{row['cpu_gib']:g}GiB")
        found.setdefault(scene, []).append(row)
    return found


def _draw(figure: Any, scene: Sequence[str], rows: Sequence[Row]) -> None:
    means, tails, gains, tiers = figure.subplots(1, 4)
    figure.suptitle(f"{scene[0]} on {scene[1]}, {scene[2]}, {scene[3]} of CPU memory")
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for at, policy in enumerate(policies):
        own = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["load"])
        loads = [row["load"] for row in own]
        look = {
            "color": COLOURS[at % len(COLOURS)],
            "marker": MARKERS[at % len(MARKERS)],
            "linestyle": ":" if policy in (FCFS, INFINITE) else "-",
            "markersize": 4,
        }
        means.plot(loads, [row["mean_s"] for row in own], label=policy, **look)
        tails.plot(loads, [row["p95_s"] for row in own], **look)
        if policy != FCFS:
            gains.plot(loads, [1 / row["over_fcfs"] for row in own], **look)
    for axes, title in ((means, "mean completion time"), (tails, "P95 completion time")):
        axes.set_title(title)
        axes.set_ylabel("seconds")
        axes.set_yscale("log")
    gains.set_title("speed-up over FCFS, mean")
    gains.axhline(1.0, color=COLOURS[0], linewidth=0.8)
    for axes in (means, tails, gains):
        axes.set_xlabel("load, of FCFS's collapse")
        axes.grid(alpha=0.3, which="both")
    _draw_tiers(tiers, rows, policies)
    handles, labels = means.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, frameon=False)


def _draw_tiers(axes: Any, rows: Sequence[Row], policies: Sequence[str]) -> None:
    load = max(row["load"] for row in rows)
    at_load = {row["policy"]: row for row in rows if row["load"] == load}
    left = [0.0] * len(policies)
    for tier in TIERS:
        shares = [at_load[policy][tier] for policy in policies]
        axes.barh(policies, shares, left=left, color=TIER_COLOURS[tier], label=tier)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_title(f"where prompts came from at {load:g}")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=4, frameon=False)
