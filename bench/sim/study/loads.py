"""Load that a server bears: the rate of arrivals at which completion times run away."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from .cells import Bench, Cell, Place, Source, means

STABLE_TIMES = 3.0
"""A server is stable while the mean job takes at most so many times what one alone takes."""
ALONE_JOBS_PER_S = 1e-5
"""Rate of arrivals at which no two jobs meet."""
STEP = 1.04
"""Factor within which the rate of collapse is found."""
MOST_DOUBLINGS = 12
SEARCH_SEEDS = 2


@dataclass(frozen=True, slots=True)
class Question:
    """Question for the load that a server bears.

    Attributes:
        alone_s: mean completion time of a job alone.
    """

    place: Place
    source: Source
    server: str
    alone_s: float

    def cells(self, rate: float, seeds: Sequence[int]) -> list[Cell]:
        return [Cell.of(self.place, self.source, self.server, rate, seed) for seed in seeds]

    @property
    def guess(self) -> float:
        """The rate at which the contexts of the jobs under way would fill VRAM if all were kept
        (Little's law: so many jobs are there as arrive while one runs)."""
        machine = self.place.machine()
        workload = self.source.jobs_for(machine, 0)
        beside = machine.beside(machine.block or workload.block)
        longest = sum(job.longest + beside for job in workload.jobs) / len(workload.jobs)
        return max(1.0, machine.pool_tokens / longest) / self.alone_s


def alone_s(
    bench: Bench, scenes: Sequence[tuple[Place, Source]], seeds: Sequence[int]
) -> list[float]:
    """Mean completion time of jobs that have stock vLLM to themselves, in each scene."""
    asked = [Question(*scene, "fcfs", 0.0).cells(ALONE_JOBS_PER_S, seeds) for scene in scenes]
    found = bench.run(cell for cells in asked for cell in cells)
    return [means([found[cell] for cell in cells])["mean_s"] for cells in asked]


def highest_stable(
    bench: Bench, questions: Sequence[Question], seeds: Sequence[int]
) -> list[float]:
    """The highest rate, jobs a second, at which each of the servers is stable over these seeds.
    All of them are looked for at a time: what to try next is known only when a rate was tried."""
    searches = {question: search(question.guess) for question in questions}
    tried = {question: next(one) for question, one in searches.items()}
    found: dict[Question, float] = {}
    while tried:
        asked = {question: question.cells(rate, seeds) for question, rate in tried.items()}
        results = bench.run(cell for cells in asked.values() for cell in cells)
        for question, cells in asked.items():
            mean_s = means([results[cell] for cell in cells])["mean_s"]
            try:
                tried[question] = searches[question].send(mean_s <= STABLE_TIMES * question.alone_s)
            except StopIteration as end:
                found[question] = end.value
                del tried[question]
    return [found[question] for question in questions]


def borne_by_stock(
    bench: Bench, scenes: Sequence[tuple[Place, Source]], seeds: Sequence[int]
) -> dict[tuple[Place, Source], float]:
    """The highest rate, jobs a second, that stock vLLM just bears in each scene."""
    alone = alone_s(bench, scenes, seeds)
    questions = [Question(*scene, "fcfs", one) for scene, one in zip(scenes, alone, strict=True)]
    return dict(zip(scenes, highest_stable(bench, questions, seeds), strict=True))


def search(guess: float) -> Generator[float, bool, float]:
    """Ask of rates whether they are stable; ends with the highest that is, within a factor of
    ``STEP``. Rates are powers of STEP, so that the same are asked for again."""
    at = round(math.log(guess) / math.log(STEP))
    stride = 16
    low: int | None = None
    high: int | None = None
    for _ in range(MOST_DOUBLINGS):
        if (yield STEP**at):
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
        if (yield STEP**middle):
            low = middle
        else:
            high = middle
    return STEP**low


def closed(mean_s: float, fcfs_s: float, infinite_s: float) -> float:
    """Share of the way from FCFS to infinite VRAM."""
    return (fcfs_s - mean_s) / (fcfs_s - infinite_s)
