"""How much load a server bears: the rate of arrivals at which completion times run away."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from bench.sim.cells import Bench, Cell, Place, Source, means

STABLE_TIMES = 3.0
"""A server is stable while the mean job takes at most so many times what one alone takes."""
ALONE_JOBS_PER_S = 1e-5
"""So far apart that no two meet."""
STEP = 1.04
"""How near the rate of collapse is found: a factor."""
MOST_DOUBLINGS = 12
SEARCH_SEEDS = 2


def alone_s(bench: Bench, place: Place, source: Source, seeds: Sequence[int]) -> float:
    """Mean completion time of jobs that have stock vLLM to themselves."""
    cells = [Cell.of(place, source, "fcfs", ALONE_JOBS_PER_S, seed) for seed in seeds]
    return means(list(bench.run(cells).values()))["mean_s"]


def highest_stable(
    bench: Bench, place: Place, source: Source, server: str, alone: float, seeds: Sequence[int]
) -> float:
    """The highest rate, jobs a second, at which the server is stable over these seeds."""

    def stable(rate: float) -> bool:
        cells = [Cell.of(place, source, server, rate, seed) for seed in seeds]
        return means(list(bench.run(cells).values()))["mean_s"] <= STABLE_TIMES * alone

    return search(stable, 1.0 / alone)


def search(stable: Callable[[float], bool], guess: float) -> float:
    """The highest rate that is stable, within a factor of ``STEP``. Rates are powers of STEP, so
    that the same are asked for again."""
    at = round(math.log(guess) / math.log(STEP))
    stride = 16
    low: int | None = None
    high: int | None = None
    for _ in range(MOST_DOUBLINGS):
        if stable(STEP**at):
            low = at
            at += stride
        else:
            high = at
            at -= stride
        if low is not None and high is not None:
            break
    if low is None or high is None:
        raise ValueError("no rate was found at which the server is just stable")
    while high - low > 1:
        middle = (low + high) // 2
        if stable(STEP**middle):
            low = middle
        else:
            high = middle
    return STEP**low


def closed(mean_s: float, fcfs_s: float, infinite_s: float) -> float:
    """Share of the way from FCFS to infinite VRAM."""
    return (fcfs_s - mean_s) / (fcfs_s - infinite_s)
