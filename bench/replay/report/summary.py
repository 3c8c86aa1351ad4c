"""Summary of a comparison: as one JSON object, as a table, and as lines below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tiered_kv.bench.agents.left_out import LeftOut
from tiered_kv.bench.output import without_nan
from tiered_kv.bench.replay import figures
from tiered_kv.bench.replay.ab import unequal
from tiered_kv.bench.replay.ledger import Kept
from tiered_kv.bench.replay.names import CONTROL, TIERED

from .ratios import ratios

REASONS = {
    "nulls": "values that are null",
    "too_short": "too few turns that go on from one another",
    "too_long": "a context that the pool or the model does not hold",
}
"""Reasons for which sessions are left out, in words."""


def summary(
    kept: Sequence[Kept],
    not_started: Mapping[str, str],
    *,
    forced: bool,
    left_out: Mapping[str, LeftOut] = {},
) -> dict[str, Any]:
    """Result as ``ab --json`` prints it. Times in seconds; None if not measured."""
    runs = [one.run for one in kept]
    idle, control = (figures.idle_ratio(runs, server) for server in (TIERED, CONTROL))
    said = {
        "rows": [asdict(row) for row in figures.rows(runs, forced=forced)],
        "ratios": [asdict(ratio) for ratio in ratios(runs)],
        "closed_mean": figures.closed(runs),
        "closed_p95": figures.closed(runs, 95),
        "idle_ratio": idle.ratio if idle else None,
        "idle_interval": [idle.low, idle.high] if idle else None,
        "idle_control": control.ratio if control else None,
        "idle_control_interval": [control.low, control.high] if control else None,
        "left_out": {reason: asdict(one) for reason, one in left_out.items()},
        "not_started": dict(not_started),
        "notes": unequal(kept),
        "versions": dict(runs[-1].versions) if runs else {},
    }
    return {key: without_nan(value) for key, value in said.items()}


def table(result: Mapping[str, Any]) -> Table:
    """The rows of ``summary``, as many columns as a terminal holds."""
    shown = Table(
        title="Agent jobs on real servers",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("load", "server"):
        shown.add_column(name, no_wrap=True)
    for name in ("jobs", "mean s", "P50", "P95", "P99", "TTFT s", "again", "agrees"):
        shown.add_column(name, justify="right")
    last = None
    for row in result["rows"]:
        if last not in (None, row["load"]):
            shown.add_section()
        last = row["load"]
        total = row["jobs"] + len(row["unfinished"])
        verdict = {True: "yes", False: "NO", None: "-"}[row["agrees"]]
        shown.add_row(
            row["load"],
            row["server"],
            f"{row['jobs']}/{total}",
            *(_number(row[key]) for key in ("mean_s", "p50_s", "p95_s", "p99_s", "ttft_s")),
            f"{row['recomputed_fraction']:.3f}",
            verdict,
        )
    return shown


def lines(result: Mapping[str, Any]) -> list[str]:
    """Lines below the table."""
    found = ["again: share of the prompt tokens computed once more; agrees: outputs with stock's"]
    for one in result["ratios"]:
        rounds = ", ".join(f"{ratio:.2f}" for ratio in one["rounds"])
        found.append(
            f"{one['load']}: time over that of {one['server']} {_interval(one['mean'])} in the "
            f"mean (by rounds {rounds}), {_interval(one['p90'])} at P90, {one['p95']:.2f} at P95"
        )
    for key, name in (("closed_mean", "mean"), ("closed_p95", "P95")):
        if result[key] is not None:
            share = result[key]
            found.append(f"of the gap between stock and the bound, {share:.2f} is closed ({name})")
    for key, interval, who in (
        ("idle_ratio", "idle_interval", "ours"),
        ("idle_control", "idle_control_interval", "stock, once more"),
    ):
        if result[key] is not None:
            low, high = result[interval]
            found.append(
                f"at idle, {who}: time over stock's {result[key]:.3f}, "
                f"95% interval {low:.3f} to {high:.3f}"
            )
    for row in result["rows"]:
        if row["unfinished"]:
            names = ", ".join(row["unfinished"])
            found.append(f"{row['server']} under {row['load']} did not finish {names}")
    found += [
        f"left out for {REASONS[reason]}: {one['turns']} turns of {one['sessions']} sessions"
        for reason, one in result["left_out"].items()
        if one["sessions"]
    ]
    found += [f"{name} does not serve here: {why}" for name, why in result["not_started"].items()]
    return found + [f"NOT EVENLY MEASURED: {note}" for note in result["notes"]]


def _interval(found: Mapping[str, float]) -> str:
    return f"{found['ratio']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
