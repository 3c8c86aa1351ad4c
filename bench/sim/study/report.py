"""A study's rows as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .plot import by_scene

Row = Mapping[str, Any]


def report(result: Mapping[str, Any]) -> str:
    """A table for every scene: mean completion time and P95 for each load, seconds."""
    parts = []
    for scene, rows in by_scene(result["rows"]).items():
        parts.append(_table(scene, rows))
    ratio = result.get("stable_load_ratio")
    if ratio is not None:
        parts.append(f"Highest stable load over FCFS's, in the worst of these: {ratio:.2f}.")
    return "\n\n".join(parts) + "\n"


def _table(scene: Sequence[str], rows: Sequence[Row]) -> str:
    loads = sorted({row["load"] for row in rows})
    workload, gpu, model, cpu = scene
    first = f"{workload}, {gpu}, {model}, {cpu} of CPU memory"
    lines = [
        f"| {first} | " + " | ".join(f"load {load:g}" for load in loads) + " |",
        "|---|" + "---|" * len(loads),
    ]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = {row["load"]: row for row in rows if row["policy"] == policy}
        cells = [_cell(own[load]) if load in own else "" for load in loads]
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    said = f"{row['mean_s']:.1f} ({row['p95_s']:.0f})"
    return said if row["closed"] is None else f"{said} {row['closed']:.2f}"
