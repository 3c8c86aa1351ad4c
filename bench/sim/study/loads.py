"""Loads: the highest arrival rate that a server bears before its completion times run away."""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass

from .cells import Bench, Cell, Key, Place, Source, means

FCFS = "fcfs"
"""Stock vLLM, whose collapse sets every load."""
STABLE_TIMES = 3.0
"""A server is stable while its mean job takes at most this many times as long as a job alone."""
ALONE_JOBS_PER_S = 1e-5
"""Arrival rate at which no two jobs meet."""
STEP = 1.04
"""Factor within which the rate of collapse is found."""
STRIDE, MOST_STRIDES = 16, 12

Scene = tuple[Place, Source]
"""A machine with the jobs that arrive there."""


@dataclass(frozen=True, slots=True)
class Load:
    """Limits of a scene.

    Attributes:
        alone_s: mean completion time of a job that has stock vLLM to itself.
        stable: highest rate at which each server is stable, jobs/s, by its name.
    """

    alone_s: float
    stable: Mapping[str, float]


def find_loads(
    bench: Bench,
    scenes: Collection[Scene],
    seeds: Sequence[int],
    servers: Sequence[str] = (FCFS,),
) -> dict[Scene, Load]:
    """Find what each of the servers bears in each scene. All searches run concurrently, because
    the next rate of one is known only after its last run."""

    def cells(scene: Scene, server: str, rate: float) -> list[Cell]:
        return [Cell.of(*scene, server, rate, seed) for seed in seeds]

    def mean_s(wanted: Mapping[Key, Sequence[Cell]]) -> dict[Key, float]:
        return {key: means(runs)["mean_s"] for key, runs in bench.run(wanted).items()}

    alone = mean_s({scene: cells(scene, FCFS, ALONE_JOBS_PER_S) for scene in scenes})
    searches = {
        (scene, server): search(first_guess(scene, alone[scene]))
        for scene in scenes
        for server in servers
    }
    tried = {one: next(looking) for one, looking in searches.items()}
    found = dict[tuple[Scene, str], float]()
    while tried:
        took = mean_s({one: cells(*one, rate) for one, rate in tried.items()})
        for one, took_s in took.items():
            try:
                tried[one] = searches[one].send(took_s <= STABLE_TIMES * alone[one[0]])
            except StopIteration as end:
                found[one] = end.value
                del tried[one]
    return {
        scene: Load(alone[scene], {server: found[scene, server] for server in servers})
        for scene in scenes
    }


def first_guess(scene: Scene, alone_s: float) -> float:
    """Return the rate at which the contexts of concurrent jobs would fill VRAM if all were kept,
    jobs/s. By Little's law as many jobs run as arrive during one."""
    place, source = scene
    machine = place.machine()
    workload = source.jobs_for(machine, 0)
    beside = machine.beside(machine.block or workload.block)
    longest = sum(job.longest + beside for job in workload.jobs) / len(workload.jobs)
    return max(1.0, machine.pool_tokens / longest) / alone_s


def search(guess: float) -> Generator[float, bool, float]:
    """Yield rates, and receive whether each is stable. Returns the highest stable one, within a
    factor of ``STEP``. Rates are powers of STEP, so that kept runs are found again."""
    at: float = round(math.log(guess) / math.log(STEP))
    low, high = -math.inf, math.inf
    for _ in range(MOST_STRIDES):
        if (yield STEP**at):
            low, at = at, at + STRIDE
        else:
            high, at = at, at - STRIDE
        if high - low < math.inf:
            break
    else:
        raise ValueError("no rate was found at which the server is just stable")
    while high - low > 1:
        middle = (low + high) // 2
        if (yield STEP**middle):
            low = middle
        else:
            high = middle
    return float(STEP**low)
