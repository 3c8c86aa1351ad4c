"""Ratios of job times: ours over those of the servers that it is told against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tiered_kv.bench.replay.figures import common, completions
from tiered_kv.bench.replay.names import BOUND, IDLE, REACH, STOCK, TIERED
from tiered_kv.bench.replay.results import Run

AGAINST = (STOCK, REACH, BOUND)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Completion times of ours over another server's under one load.

    Only rounds that have both servers count, and in them jobs that finished on both.

    Attributes:
        mean, p95: of all jobs of these rounds.
        rounds: of the means, one for each round.
    """

    load: str
    server: str
    mean: float
    p95: float
    rounds: tuple[float, ...]


def ratios(runs: Iterable[Run]) -> list[Ratio]:
    """Ratios under every load but idle that was measured, in the order they came."""
    under = [run for run in runs if run.load != IDLE]
    loads = dict.fromkeys(run.load for run in under)
    found = (
        ratio([run for run in under if run.load == load], server)
        for load in loads
        for server in AGAINST
    )
    return [one for one in found if one is not None]


def ratio(runs: Iterable[Run], server: str) -> Ratio | None:
    """The ratio of runs under one load; None if no round has jobs that finished on both servers."""
    by_name = {(run.server, run.round): run for run in runs}
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    for (name, number), run in sorted(by_name.items()):
        other = by_name.get((server, number))
        if name != TIERED or other is None:
            continue
        among = common((run, other))
        if among:
            ours.append(completions(run, among))
            theirs.append(completions(other, among))
    if not ours:
        return None
    own, others = np.concatenate(ours), np.concatenate(theirs)
    return Ratio(
        load=next(iter(by_name.values())).load,
        server=server,
        mean=float(own.mean() / others.mean()),
        p95=float(np.percentile(own, 95) / np.percentile(others, 95)),
        rounds=tuple(sum(a) / sum(b) for a, b in zip(ours, theirs, strict=True)),
    )
