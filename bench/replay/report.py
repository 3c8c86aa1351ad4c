"""Results of a comparison: rows, ratios, one JSON object, tables, and a figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tiered_kv.bench.agents.figures import (
    by_number,
    common,
    compare,
    completions,
    mean,
    recomputed,
    sum_sources,
    unequal,
)
from tiered_kv.bench.agents.left_out import LeftOut
from tiered_kv.bench.agents.paired import PairedRatio
from tiered_kv.bench.agents.plotting import COLOURS, PlotError, draw_times, drawn, label, looks
from tiered_kv.bench.agents.results import Kept, Run
from tiered_kv.bench.output import without_nan

from .agreement import agreement
from .names import BOUND, CONTROL, IDLE, LOADS, PRESSURE, SERVERS, STOCK, TIERED

Row: TypeAlias = Mapping[str, Any]
"""One server under one load; see ``row``."""
REASONS = {
    "nulls": "values are null",
    "too_short": "too few turns that continue each other",
    "too_long": "contexts are longer than the pool or the model allows",
}
"""Reasons for leaving out sessions."""
SHOWN = ("load", "server", "jobs", "mean_s", "p50_s", "p95_s", "ttft_s")
"""Figures of a row that are shown on a terminal."""


def row(server: str, load: str, runs: Sequence[Run], *, forced: bool) -> Row:
    """Return the row of one server under one load, over all rounds. Times are in seconds and cover
    finished jobs.

    ``sources`` are prompt tokens by tier, "recomputed" for tokens that no tier had.
    ``recomputed_fraction`` is the fraction of all prompt tokens that were recomputed although an
    earlier turn of the job had computed them; new tokens of a turn are not counted. ``agrees`` is
    True if raw logprobs agree with stock vLLM's, and None if they cannot be compared. ``cpu_s`` and
    ``rss_bytes`` are the server's, as means over the rounds.

    Args:
        runs: runs of all servers and loads.
        forced: True if answers were forced, so that outputs can be compared.
    """
    own = [run for run in runs if (run.server, run.load) == (server, load)]
    times = [s for run in own for s in completions(run)] or [np.nan]
    jobs = [job for run in own for job in run.jobs]
    turns = [turn for run in own for turn in run.turns]
    verdicts = [agreement(run, runs) for run in own] if forced else []
    known = [verdict for verdict in verdicts if verdict is not None]
    sources = sum_sources(turns)
    done = sum(len(run.finished) for run in own)
    return {
        "server": server,
        "load": load,
        "mean_s": mean(times),
        **{f"p{at}_s": float(np.percentile(times, at)) for at in (50, 90, 95, 99)},
        "recomputed_fraction": sum(map(recomputed, jobs)) / max(1, sum(sources.values())),
        "agrees": all(known) if known else None,
        "jobs": done,
        "unfinished": [
            f"{job.name} (round {run.round + 1})"
            for run in own
            for job in run.jobs
            if job.error is not None
        ],
        "jobs_per_s": mean(run.jobs_per_s for run in own),
        "done_per_s": done / (sum(run.span_s for run in own) or 1.0),
        "ttft_s": mean(turn.ttft_s for turn in turns),
        "sources": sources,
        "by_turn": [
            {
                "turn": number,
                "ttft_s": mean(turn.ttft_s for turn in same),
                "latency_s": mean(turn.latency_s for turn in same),
                "sources": sum_sources(same),
            }
            for number, same in by_number(jobs).items()
        ],
        "cpu_s": mean(run.cpu_s for run in own),
        "rss_bytes": int(mean(run.rss_bytes for run in own)),
    }


def rows(runs: Sequence[Run], *, forced: bool) -> list[Row]:
    """Return one row per measured load and server."""
    return [row(server, load, runs, forced=forced) for load, server in measured(runs)]


def measured(runs: Iterable[Run]) -> list[tuple[str, str]]:
    """Return the measured loads and servers as pairs, in the order of ``LOADS`` and ``SERVERS``."""

    def place(name: str, order: Sequence[str]) -> int:
        return order.index(name) if name in order else len(order)

    pairs = dict.fromkeys((run.load, run.server) for run in runs)
    return sorted(pairs, key=lambda pair: (place(pair[0], LOADS), place(pair[1], SERVERS)))


def ratios(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the ratios of tiered-kv's completion times to those of every other server, under every
    load except idle.

    ``mean``, ``p90`` and ``p95`` are geometric means over rounds, the first two with their 95%
    intervals (see ``PairedRatio``). ``rounds`` has the ratio of the mean times for each round.
    """
    found = []
    for load, server in measured(runs):
        if load == IDLE or server in (TIERED, CONTROL):
            continue
        one = compare([run for run in runs if run.load == load], TIERED, server)
        if one is not None:
            figures = {"mean": _ratio(one.mean), "p90": _ratio(one.p90), "p95": one.p95.value}
            found.append({"load": load, "server": server, **figures, "rounds": list(one.rounds)})
    return found


def _ratio(found: PairedRatio) -> dict[str, float | None]:
    return {"ratio": found.value, "low": found.low, "high": found.high}


def idle_ratio(runs: Iterable[Run], server: str) -> PairedRatio | None:
    """Return the ratio of a server's mean completion time to stock vLLM's at idle; None if no round
    has both servers.
    """
    found = compare([run for run in runs if run.load == IDLE], server, STOCK)
    return found.mean if found else None


def closed(runs: Iterable[Run], percentile: float | None = None) -> float | None:
    """Return the fraction of the gap between stock vLLM and the server ``bound`` that tiered-kv
    closes under pressure: (stock - tiered) / (stock - bound) of the completion times of the jobs
    that finished in every run of the three servers.

    Args:
        percentile: percentile to compare, 0 to 100; None compares means.

    Returns:
        None if one of the three servers was not measured, no job finished in every run, or stock
        vLLM is not slower than ``bound``.
    """
    by_server: dict[str, list[Run]] = {name: [] for name in (STOCK, TIERED, BOUND)}
    for run in runs:
        if run.load == PRESSURE and run.server in by_server:
            by_server[run.server].append(run)
    if not all(by_server.values()):
        return None
    among = common(run for found in by_server.values() for run in found)
    if not among:
        return None

    def figure(name: str) -> float:
        times = [s for run in by_server[name] for s in completions(run, among)]
        return float(np.mean(times) if percentile is None else np.percentile(times, percentile))

    gap = figure(STOCK) - figure(BOUND)
    return (figure(STOCK) - figure(TIERED)) / gap if gap > 0 else None


def summary(
    kept: Sequence[Kept],
    not_started: Mapping[str, str],
    *,
    forced: bool,
    left_out: Mapping[str, LeftOut] = {},
) -> dict[str, Any]:
    """Return the result that ``ab --json`` prints. Times are in seconds, and None if not
    measured.
    """
    runs = [one.run for one in kept]
    result: dict[str, Any] = {
        "rows": rows(runs, forced=forced),
        "ratios": ratios(runs),
        "closed_mean": closed(runs),
        "closed_p95": closed(runs, 95),
    }
    for name, server in (("idle", TIERED), ("idle_control", CONTROL)):
        found = idle_ratio(runs, server)
        result["idle_ratio" if server == TIERED else name] = found.value if found else None
        result[f"{name}_interval"] = [found.low, found.high] if found else None
    result |= {
        "left_out": {reason: asdict(one) for reason, one in left_out.items()},
        "not_started": dict(not_started),
        "notes": unequal(kept),
        "versions": dict(runs[-1].versions) if runs else {},
    }
    found_values: dict[str, Any] = without_nan(result)
    return found_values


def readable(result: Row) -> dict[str, Any]:
    """Return the result as tables for a terminal, without figures that only programs need."""
    # Few and short columns, so that server names fit into 110 characters.
    rows = [
        {name.removesuffix("_s"): one[name] for name in SHOWN}
        | {"recomputed": round(one["recomputed_fraction"], 3), "agrees": one["agrees"]}
        for one in result["rows"]
    ]
    unfinished = [
        {"load": one["load"], "server": one["server"], "jobs": ", ".join(one["unfinished"])}
        for one in result["rows"]
        if one["unfinished"]
    ]
    ratios = [
        {
            **{name: one[name] for name in ("load", "server")},
            **{name: _with_interval(*one[name].values()) for name in ("mean", "p90")},
            "p95": f"{one['p95']:.2f}",
            "rounds": ", ".join(f"{ratio:.2f}" for ratio in one["rounds"]),
        }
        for one in result["ratios"]
    ]
    left_out = [
        {"reason": REASONS[reason], **one}
        for reason, one in result["left_out"].items()
        if one["sessions"]
    ]
    shown: dict[str, Any] = {
        "jobs": rows,
        "unfinished": unfinished,
        "tiered-kv over others": ratios,
        "left out": left_out,
    }
    for name in ("idle", "idle_control"):
        ratio = result["idle_ratio" if name == "idle" else name]
        if ratio is not None:
            shown[f"{name}: mean over stock's"] = _with_interval(ratio, *result[f"{name}_interval"])
    for name in ("closed_mean", "closed_p95", "not_started"):
        shown[name] = result[name]
    shown["NOT EVENLY MEASURED"] = "; ".join(result["notes"])
    return {title: found for title, found in shown.items() if found}


def _with_interval(ratio: float, low: float | None, high: float | None) -> str:
    return f"{ratio:.2f}" if low is None else f"{ratio:.2f} ({low:.2f} to {high:.2f})"


def speed_ups(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the ratio of stock vLLM's mean completion time to that of every other server, by load
    and server.
    """
    stock = {one["load"]: one["mean_s"] for one in rows if one["server"] == STOCK}
    found: dict[str, dict[str, float]] = {load: {} for load in stock}
    for one in rows:
        if one["server"] != STOCK and one["load"] in stock:
            found[one["load"]][one["server"]] = stock[one["load"]] / one["mean_s"]
    return found


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw ``replay.png`` and ``replay.svg``: times over load, speed-up over stock, and times to
    first token by turn. Existing files are replaced. Returns the paths.

    Raises:
        PlotError: matplotlib is not installed, or there are no rows.
    """
    if not rows:
        raise PlotError("the folder contains no runs to draw")
    loads = list(dict.fromkeys(one["load"] for one in rows))
    load = PRESSURE if PRESSURE in loads else next((x for x in loads if x != IDLE), loads[0])
    style = looks(one["server"] for one in rows)
    with drawn(folder, "replay") as ((times, gains, turns), paths):
        for server, look in style.items():
            own = sorted(
                (one for one in rows if one["server"] == server), key=lambda x: x["jobs_per_s"]
            )
            at = [one["jobs_per_s"] for one in own]
            draw_times(times, at, own, "mean_s", "p95_s", server, look)
            for one in own:
                if one["load"] == load:
                    numbers = [turn["turn"] for turn in one["by_turn"]]
                    turns.plot(numbers, [turn["ttft_s"] for turn in one["by_turn"]], **look)
                    turns.set_xticks(numbers)
        title = "job completion time: mean, dotted P95"
        label(times, {"title": title, "xlabel": "job arrivals per second", "ylabel": "seconds"})
        _draw_gains(gains, speed_ups(rows), style)
        title = f"time to first token by turn, {load}"
        label(turns, {"title": title, "xlabel": "turn of the job", "ylabel": "seconds"})
    return paths


def _draw_gains(
    axes: Any, gains: Mapping[str, Mapping[str, float]], style: Mapping[str, Mapping[str, str]]
) -> None:
    servers = [name for name in style if any(name in by_server for by_server in gains.values())]
    width = 0.8 / max(len(servers), 1)
    for at, server in enumerate(servers):
        for load_at, by_server in enumerate(gains.values()):
            if server in by_server:
                place = load_at + (at - (len(servers) - 1) / 2) * width
                bars = axes.bar(place, by_server[server], width, color=style[server]["color"])
                axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes.axhline(1.0, color=COLOURS[0], linewidth=1)
    axes.margins(y=0.1)  # space for the labels
    axes.set_xticks(range(len(gains)), list(gains))
    axes.set(title="mean speed-up over stock vLLM", ylabel="speed-up factor")
