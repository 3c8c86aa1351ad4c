"""Ratios of job times: ours over those of every other server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiered_kv.bench.replay.figures import BOOTSTRAPS, common, completions
from tiered_kv.bench.replay.names import CONTROL, IDLE, TIERED
from tiered_kv.bench.replay.results import Run

QUANTILES = (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio with its 95% interval, a percentile bootstrap over rounds and, in them, over jobs."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """Completion times of ours over another server's under one load.

    Only rounds that have both servers count, and in them jobs that finished on both in all.

    Attributes:
        mean, p90, p95: of all jobs of these rounds.
        rounds: of the means, one for each round.
    """

    load: str
    server: str
    mean: Interval
    p90: Interval
    p95: float
    rounds: tuple[float, ...]


def ratios(runs: Iterable[Run]) -> list[Ratio]:
    """Ratios under every load but idle, over every server, in the order they were measured."""
    under = [run for run in runs if run.load != IDLE]
    pairs = dict.fromkeys(
        (run.load, run.server) for run in under if run.server not in (TIERED, CONTROL)
    )
    found = (ratio([run for run in under if run.load == load], server) for load, server in pairs)
    return [one for one in found if one is not None]


def ratio(runs: Iterable[Run], server: str) -> Ratio | None:
    """The ratio of runs under one load; None if no job finished on both servers."""
    by_name = {(run.server, run.round): run for run in runs}
    numbers = sorted(number for name, number in by_name if name == TIERED)
    pairs = [
        (by_name[TIERED, number], by_name[server, number])
        for number in numbers
        if (server, number) in by_name
    ]
    among = common([run for pair in pairs for run in pair]) if pairs else frozenset[str]()
    if not among:
        return None
    ours = np.array([completions(own, among) for own, _ in pairs])
    theirs = np.array([completions(other, among) for _, other in pairs])
    return Ratio(
        load=pairs[0][0].load,
        server=server,
        mean=_interval(ours, theirs, None),
        p90=_interval(ours, theirs, 0.90),
        p95=float(np.quantile(ours, 0.95) / np.quantile(theirs, 0.95)),
        rounds=tuple(map(float, ours.sum(axis=1) / theirs.sum(axis=1))),
    )


def _interval(
    ours: NDArray[np.float64], theirs: NDArray[np.float64], quantile: float | None
) -> Interval:
    """Ratio of means, or of a quantile, of times ``[rounds, jobs]``; both sides are drawn alike."""

    def figure(times: NDArray[np.float64]) -> NDArray[np.float64]:
        flat = times.reshape(*times.shape[:-2], -1)
        if quantile is None:
            return np.asarray(flat.mean(axis=-1))
        return np.asarray(np.quantile(flat, quantile, axis=-1))

    rounds, jobs = ours.shape
    rng = np.random.default_rng(0)
    rows = rng.integers(rounds, size=(BOOTSTRAPS, rounds, 1))
    columns = rng.integers(jobs, size=(BOOTSTRAPS, 1, jobs))
    drawn = figure(ours[rows, columns]) / figure(theirs[rows, columns])
    low, high = np.quantile(drawn, QUANTILES)
    return Interval(float(figure(ours) / figure(theirs)), float(low), float(high))
