"""Comparison of two traces of the same jobs: differences per job, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .traced_jobs import TracedJobs
from .turn_table import Column, TurnTable

BOOTSTRAPS = 2000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of the same jobs in two traces.

    Attributes:
        first, second: means over the jobs.
        difference: second mean minus first mean.
        low, high: 95% interval of the difference, bootstrapped over the jobs.
    """

    first: float
    second: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two traces of the same jobs.

    Attributes:
        jobs: number of jobs that are complete in both traces, matched by name and client. If a name
            occurs several times, its occurrences are matched in order.
        only_first, only_second: number of jobs that are complete in only one trace.
        differences: completion time, seconds; waits for admission and for first tokens, seconds per
            turn; computed tokens per job. Empty if no job is complete in both traces.
    """

    jobs: int
    only_first: int
    only_second: int
    differences: Mapping[str, Difference]


def compare(first: TurnTable, second: TurnTable) -> Comparison:
    """Compare the jobs that are complete in both traces."""
    tables = (first, second)
    jobs = [TracedJobs.of(table) for table in tables]
    rows = [_rows(*both) for both in zip(tables, jobs, strict=True)]
    shared = [name for name in rows[0] if name in rows[1]]
    found = dict[str, Difference]()
    if shared:
        places = [np.array([row[name] for name in shared]) for row in rows]
        figures = [_figures(*both) for both in zip(jobs, places, strict=True)]
        found = {name: _difference(figures[0][name], figures[1][name]) for name in figures[0]}
    only = [len(row) - len(shared) for row in rows]
    return Comparison(len(shared), only[0], only[1], found)


def _rows(table: TurnTable, jobs: TracedJobs) -> dict[tuple[str, str, int], int]:
    """Return the positions of complete jobs, by name, client and number."""
    found = dict[tuple[str, str, int], int]()
    for at in np.flatnonzero(jobs.whole):
        name = table.job_name(int(jobs.name[at]))
        found.setdefault((name.job, name.client, int(jobs.number[at])), int(at))
    return found


def _figures(jobs: TracedJobs, at: Column) -> dict[str, Column]:
    turns = jobs.turns[at]
    return {
        "completion_s": jobs.completion_s[at],
        "queue_s": jobs.queue_s[at] / turns,
        "first_token_s": jobs.first_token_s[at] / turns,
        "recomputed_tokens": jobs.recomputed[at],
    }


def _difference(first: Column, second: Column) -> Difference:
    differences, random = second - first, np.random.default_rng(0)
    count = len(differences)
    means = [differences[random.integers(count, size=count)].mean() for _ in range(BOOTSTRAPS)]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(
        float(first.mean()),
        float(second.mean()),
        float(differences.mean()),
        float(low),
        float(high),
    )
