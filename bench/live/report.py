"""Results of a measurement: rows and pairs for JSON, tables, and figures.

Times have the names of Continuum's own analysis (``average_duration``, ``percentile_95`` and so
on), so that its users recognize them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tiered_kv.bench.agents.figures import by_number, compare, mean, tokens, tpots
from tiered_kv.bench.agents.plotting import PlotError, draw_times, drawn, label, looks
from tiered_kv.bench.agents.results import Run

from .rounds import Arriving, level_of

PERCENTILES = (50, 90, 95, 99)
REASONS: Mapping[str, str] = {
    "nulls": "values are null",
    "too_short": "too short to be jobs",
    "cut": "longer than the server's context limit or --turns allows",
}
"""Reasons for leaving out sessions, or their last turns."""
AXES: Mapping[str, str] = {
    Arriving.JPS.value: "jobs per second",
    Arriving.SESSIONS.value: "concurrent jobs",
}


def live_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return one row per load and server, over all rounds. Times are in seconds.

    ``hit_ratio`` is the fraction of prompt tokens that the server's answers report as cached.
    ``hits_by_counter`` has the fractions found in VRAM and by the connector, from the server's own
    counters. Either is None if not reported. ``tpot`` is the time per output token. ``turns_per_s``
    and ``tokens_per_s`` (prompts and answers) are averages over whole runs.
    """
    return [
        _row(load, server, own)
        for load in dict.fromkeys(run.load for run in runs)
        for server in dict.fromkeys(run.server for run in runs)
        if (own := [run for run in runs if (run.load, run.server) == (load, server)])
    ]


def live_pairs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Compare every server with the first one, under each load; see ``Compared``.
    ``paired_difference`` is the ratio of mean completion times minus one, in percent.
    """
    first, *others = dict.fromkeys(run.server for run in runs) or [""]
    pairs = []
    for load in dict.fromkeys(run.load for run in runs):
        for server in others:
            found = compare([run for run in runs if run.load == load], server, first)
            if found is None:
                continue
            ratios = {
                f"{name}_ratio": asdict(one)
                for name in ("mean", "p90", "ttft", "tpot", "tokens_per_s")
                if (one := getattr(found, name)) is not None
            }
            percent = {
                name: None if bound is None else 100 * (bound - 1)
                for name, bound in ratios["mean_ratio"].items()
            }
            pairs.append(
                {
                    "load": load,
                    "server": server,
                    "over": first,
                    "rounds": len(found.rounds),
                    "jobs": found.jobs,
                    "paired_difference": {"percent": percent.pop("value"), **percent},
                    **ratios,
                }
            )
    return pairs


def _row(load: str, server: str, runs: Sequence[Run]) -> dict[str, Any]:
    jobs = [job for run in runs for job in run.jobs]
    errors = [job.error for job in jobs if job.error is not None]
    times = np.array([job.completion_s for job in jobs if job.error is None] or [np.nan])
    turns = [turn for run in runs for turn in run.turns]
    seconds = sum(run.span_s for run in runs)
    prompt = sum(turn.prompt_tokens for turn in turns)
    cached = sum(turn.cached_tokens for turn in turns)
    how, level = level_of(load)
    return {
        "server": server,
        "load": load,
        how: level,
        "rounds": len(runs),
        "num_jobs": len(jobs) - len(errors),
        "unfinished": len(errors),
        "first_error": errors[0] if errors else None,
        "average_duration": float(times.mean()),
        "min_duration": float(times.min()),
        "max_duration": float(times.max()),
        "median_duration": float(np.median(times)),
        **{f"percentile_{at}": float(np.percentile(times, at)) for at in PERCENTILES},
        "ttft": _distribution([turn.ttft_s for turn in turns]),
        "tpot": _distribution(tpots(turns)),
        "by_turn": [
            {
                "turn": number,
                "requests": len(same),
                "ttft": mean(turn.ttft_s for turn in same),
                "latency": mean(turn.latency_s for turn in same),
                "prompt_tokens": mean(turn.prompt_tokens for turn in same),
            }
            for number, same in by_number(jobs).items()
        ],
        "hit_ratio": cached / prompt if all(run.reports_cached for run in runs) else None,
        "hits_by_counter": _counted(runs),
        "jobs_per_s": (len(jobs) - len(errors)) / seconds,
        "turns_per_s": len(turns) / seconds,
        "tokens_per_s": tokens(turns) / seconds,
        "prompt_tokens": prompt,
        "answer_tokens": tokens(turns) - prompt,
    }


def _counted(runs: Sequence[Run]) -> dict[str, float] | None:
    """Return the fractions of all looked-up prompt tokens that were found in each place; None if a
    run has no counters.
    """
    if not all(run.counts.get("asked") for run in runs):
        return None
    total = {place: sum(run.counts.get(place, 0) for run in runs) for place in runs[0].counts}
    asked = total.pop("asked")
    return {place: count / asked for place, count in total.items()}


def _distribution(values: Sequence[float]) -> dict[str, float]:
    at = {f"p{at}": float(np.percentile(values or [np.nan], at)) for at in PERCENTILES}
    return {"mean": mean(values), **at}


def readable(result: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the result as tables for a terminal, without figures that only programs need."""
    # Few and short columns, so that server names fit into 110 characters.
    servers = [
        {
            **{name: row[name] for name in ("load", "server")},
            "jobs": row["num_jobs"],
            "mean": row["average_duration"],
            **{f"P{at}": row[f"percentile_{at}"] for at in (90, 95)},
            **{name: row[name]["mean"] for name in ("ttft", "tpot")},
            "hits": sum((row["hits_by_counter"] or {}).values()) or row["hit_ratio"],
            "tokens/s": row["tokens_per_s"],
        }
        for row in result["servers"]
    ]
    pairs = [
        {
            **{name: pair[name] for name in ("load", "server", "over", "rounds", "jobs")},
            **pair["paired_difference"],
        }
        for pair in result["pairs"]
    ]
    unfinished = [
        {name: row[name] for name in ("load", "server", "unfinished", "first_error")}
        for row in result["servers"]
        if row["unfinished"]
    ]
    left_out = [
        {"reason": REASONS.get(reason, reason), **found}
        for reason, found in result["left_out"].items()
        if found["sessions"]
    ]
    tables = {
        "servers": servers,
        "difference of job times": pairs,
        "unfinished": unfinished,
        "left out": left_out,
    }
    return {title: rows for title, rows in tables.items() if rows}


def plot_sweeps(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw ``jps.png`` over arrival rates, like Continuum's figure, and ``sessions.png`` over
    numbers of concurrent jobs, whose bend shows where VRAM is full. Each figure is also saved as
    SVG. A figure without runs is left out. Returns the paths.

    Args:
        rows: result of ``live_rows``.

    Raises:
        PlotError: matplotlib is not installed, or there is nothing to draw.
    """
    paths: list[Path] = []
    for how, axis in AXES.items():
        own = sorted((row for row in rows if how in row), key=lambda row: row[how])
        if not own:
            continue
        with drawn(folder, how) as ((times, first, rate), written):
            for server, look in looks(row["server"] for row in rows).items():
                line = [row for row in own if row["server"] == server]
                at = [row[how] for row in line]
                draw_times(times, at, line, "average_duration", "percentile_95", server, look)
                first.plot(at, [row["ttft"]["p90"] for row in line], **look)
                rate.plot(at, [row["tokens_per_s"] for row in line], **look)
            label(times, {"title": "job completion time, s: mean, dotted P95", "xlabel": axis})
            label(first, {"title": "time to first token, s: P90", "xlabel": axis})
            label(rate, {"title": "tokens per second, prompts and answers", "xlabel": axis})
        paths += written
    if not paths:
        raise PlotError("the folder contains no runs to draw")
    return paths
