"""Results of a measurement for people: a table, and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

REASONS: Mapping[str, str] = {
    "nulls": "have nulls",
    "too_short": "are too short to be jobs",
    "cut": "end early: the server's context or --turns allows no more",
}


def table(result: Mapping[str, Any]) -> Table:
    """One row for every load and server; times in seconds."""
    made = Table(title="Jobs on running servers", title_justify="left")
    for column in ("load", "server"):
        made.add_column(column)
    times = ("mean", "P50", "P90", "P95", "P99", "TTFT", "P90", "TPOT ms")
    for column in ("jobs", *times, "hits", "tokens/s"):
        made.add_column(column, justify="right")
    for row in result["servers"]:
        made.add_row(
            row["load"],
            row["server"],
            str(row["num_jobs"]),
            f"{row['average_duration']:.1f}",
            *(f"{row[f'percentile_{at}']:.1f}" for at in (50, 90, 95, 99)),
            f"{row['ttft']['mean']:.2f}",
            f"{row['ttft']['p90']:.2f}",
            f"{1e3 * row['tpot']['mean']:.0f}",
            _hits(row),
            f"{row['tokens_per_s']:,.0f}",
        )
    return made


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Sentences beside the table: on pairs, on jobs that failed, on what was left out."""
    for pair in result["pairs"]:
        found = pair["paired_difference"]
        said = f"{pair['load']}: {pair['server']} takes {found['percent']:+.1f}% of {pair['over']}"
        if found["low"] is None:
            yield f"{said}; one round has no interval"
        else:
            yield (
                f"{said}, 95% interval {found['low']:+.1f} to {found['high']:+.1f}%, "
                f"{pair['rounds']} rounds, {pair['jobs']} pairs of jobs"
            )
    for row in result["servers"]:
        if row["unfinished"]:
            yield (
                f"{row['load']}: {row['unfinished']} jobs of {row['server']} did not finish; "
                f"the first: {row['first_error']}"
            )
    for reason, found in result["left_out"].items():
        if found["sessions"]:
            why = REASONS.get(reason, reason)
            yield f"{found['turns']} turns of {found['sessions']} sessions left out: they {why}"


def _hits(row: Mapping[str, Any]) -> str:
    """Share of prompt tokens that the server had; a dash where it does not tell."""
    counted = row["hits_by_counter"]
    share = sum(counted.values()) if counted else row["hit_ratio"]
    return "-" if share is None else f"{share:.1%}"
