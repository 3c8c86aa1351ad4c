"""Statistics of a workload: turns, tokens, gaps and tools of its jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from .live_jobs import LiveJobs

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
COLUMNS = ("mean", *QUANTILES, "most")
MOST_TOOLS = 8
NO_TOOL, OTHERS = "(no name)", "(others)"


def workload_statistics(jobs: LiveJobs) -> dict[str, Any]:
    """Return quantiles over jobs and over turns, including sub-agents. Sizes are in ``unit``.

    A job's last turn has no gap. ``reused`` is the fraction of a prompt that was already in the
    previous turn's context. ``tools`` has the fraction of gaps for each tool, by its name or by the
    first word of its command.
    """
    everyone = [one for job in jobs.jobs for one in job.everyone()]
    turns = [turn for job in everyone for turn in job.turns]
    followed = [turn for job in everyone for turn in job.turns[:-1]]
    counts = Counter(turn.tool_name or next(iter(turn.tool.split()), NO_TOOL) for turn in followed)
    tools = {name: count / counts.total() for name, count in counts.most_common(MOST_TOOLS)}
    if len(counts) > MOST_TOOLS:
        tools[OTHERS] = 1.0 - sum(tools.values())
    return {
        "name": jobs.name,
        "unit": jobs.unit.value,
        "jobs": len(jobs.jobs),
        "sub_agents": len(everyone) - len(jobs.jobs),
        "turns": len(turns),
        "quantiles": {
            "turns_per_job": _quantiles(len(job.turns) for job in everyone),
            "longest_context": _quantiles(
                max(turn.prompt + turn.output for turn in job.turns) for job in everyone
            ),
            "prompt": _quantiles(turn.prompt for turn in turns),
            "added": _quantiles(turn.added for turn in turns),
            "output": _quantiles(turn.output for turn in turns),
            "reused": _quantiles(turn.shared / turn.prompt for turn in turns if turn.prompt),
            "gap_s": _quantiles(turn.gap_s for turn in followed),
        },
        "tools": tools,
        "left_out": {reason: one.sessions for reason, one in jobs.left_out.items()},
    }


def _quantiles(values: Iterable[float]) -> dict[str, float]:
    found = np.array(list(values), dtype=np.float64)
    if not len(found):
        return {}
    at = {name: float(np.quantile(found, at)) for name, at in QUANTILES.items()}
    return {"mean": float(found.mean()), **at, "most": float(found.max())}


def statistics_table(found: Mapping[str, Any]) -> Table:
    """Return the quantiles as a table that fits a terminal."""
    shown = Table(
        Column(f"in {found['unit']}", no_wrap=True),
        *(Column(name, justify="right") for name in COLUMNS),
        title=f"{found['name']}: {found['jobs']} jobs, {found['sub_agents']} sub-agents, "
        f"{found['turns']} turns",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for what, row in found["quantiles"].items():
        shown.add_row(what, *(f"{row[name]:,.3g}" if name in row else "-" for name in COLUMNS))
    return shown


def statistics_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the lines to print below the table."""
    tools = ", ".join(f"{name} {share:.0%}" for name, share in found["tools"].items())
    lines = [f"tools: {tools}"] if tools else []
    return lines + [
        f"left out, {reason}: {count} sessions" for reason, count in found["left_out"].items()
    ]
