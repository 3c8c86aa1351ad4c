"""One figure of what was measured: times over load, speed-up over stock, first tokens by turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiered_kv.bench.agents.plotting import COLOURS, MARKERS, PlotError, matplotlib_modules
from tiered_kv.bench.replay.figures import Row
from tiered_kv.bench.replay.names import IDLE, PRESSURE, STOCK


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw ``replay.png`` and ``replay.svg``; what was there is replaced.

    Raises:
        PlotError: matplotlib is missing, or there are no rows.
    """
    if not rows:
        raise PlotError("no run to draw")
    matplotlib, figures = matplotlib_modules()
    # A fixed salt and no date: equal runs give equal files.
    with matplotlib.rc_context({"svg.hashsalt": "replay", "font.size": 10}):
        figure = figures.Figure(figsize=(13, 4.2), layout="constrained")
        loads, gains, turns = figure.subplots(1, 3)
        servers = list(dict.fromkeys(row.server for row in rows))
        style = {
            name: {"color": COLOURS[at % len(COLOURS)], "marker": MARKERS[at % len(MARKERS)]}
            for at, name in enumerate(servers)
        }
        _draw_loads(loads, rows, style)
        _draw_gains(gains, rows, style)
        _draw_turns(turns, rows, style)
        handles, labels = loads.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "replay.png", folder / "replay.svg"]
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def speed_ups(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Stock's mean completion time over each other server's, by load and server."""
    stock = {row.load: row.mean_s for row in rows if row.server == STOCK}
    found: dict[str, dict[str, float]] = {load: {} for load in stock}
    for row in rows:
        if row.server != STOCK and row.load in stock:
            found[row.load][row.server] = stock[row.load] / row.mean_s
    return found


def _draw_loads(axes: Any, rows: Sequence[Row], style: dict[str, Any]) -> None:
    for server, look in style.items():
        own = sorted((row for row in rows if row.server == server), key=lambda row: row.jobs_per_s)
        rates = [row.jobs_per_s for row in own]
        axes.plot(rates, [row.mean_s for row in own], label=server, **look)
        axes.plot(rates, [row.p95_s for row in own], linestyle=":", alpha=0.6, **look)
    axes.set_title("job completion time: mean, dotted P95")
    axes.set_xlabel("jobs arriving a second")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _draw_gains(axes: Any, rows: Sequence[Row], style: dict[str, Any]) -> None:
    gains = speed_ups(rows)
    servers = [name for name in style if any(name in by_server for by_server in gains.values())]
    width = 0.8 / max(len(servers), 1)
    for at, server in enumerate(servers):
        for load_at, by_server in enumerate(gains.values()):
            if server in by_server:
                place = load_at + (at - (len(servers) - 1) / 2) * width
                bars = axes.bar(place, by_server[server], width, color=style[server]["color"])
                axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes.axhline(1.0, color=COLOURS[0], linewidth=1)
    axes.margins(y=0.1)  # for the labels
    axes.set_xticks(range(len(gains)), list(gains))
    axes.set_title("speed-up over stock, mean")
    axes.set_ylabel("times as fast")


def _draw_turns(axes: Any, rows: Sequence[Row], style: dict[str, Any]) -> None:
    loads = list(dict.fromkeys(row.load for row in rows))
    load = PRESSURE if PRESSURE in loads else next((x for x in loads if x != IDLE), loads[0])
    for row in rows:
        if row.load == load:
            numbers = [turn.turn for turn in row.by_turn]
            axes.plot(numbers, [turn.ttft_s for turn in row.by_turn], **style[row.server])
            axes.set_xticks(numbers)
    axes.set_title(f"time to first token by turn, {load}")
    axes.set_xlabel("turn of the job")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
