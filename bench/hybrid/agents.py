"""Agents' jobs of random tokens: a system prompt that all share, results of tools, answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tiered_kv.bench.models.catalogue import VOCABULARY
from tiered_kv.bench.replay.jobs import Job, Turn

FIRST_WORD = 3
"""Token ids below it are special."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Number and size of the jobs. Lengths in tokens, times in seconds.

    Attributes:
        system: length of the prompt that all jobs begin with.
        task: mean length of what a job's first turn adds to it.
        result: mean length of a tool's result, which each later turn adds.
        answer: length of every answer.
        gap_s: median time of a tool; gaps are lognormal with ``gap_spread`` and have a ceiling of
            ``gap_limit_s``.
        apart_s: mean time between two jobs' starts.
    """

    jobs: int
    turns: int
    system: int
    task: int
    result: int
    answer: int
    gap_s: float
    gap_spread: float
    gap_limit_s: float
    apart_s: float


MIDDLE = Load(
    jobs=6,
    turns=5,
    system=512,
    task=500,
    result=250,
    answer=32,
    gap_s=2.5,
    gap_spread=0.7,
    gap_limit_s=10.0,
    apart_s=2.0,
)
"""Contexts of some 2,200 tokens in the end."""

QUICK = Load(
    jobs=5,
    turns=3,
    system=256,
    task=300,
    result=150,
    answer=16,
    gap_s=0.5,
    gap_spread=0.5,
    gap_limit_s=2.0,
    apart_s=0.3,
)
"""Enough to see that everything works."""


def make_jobs(load: Load, seed: int) -> tuple[Job, ...]:
    """The jobs of a load; the same for the same seed.

    What a turn adds is half to one and a half times as long as its mean, so that turns end
    anywhere in a block.
    """
    rng = np.random.default_rng(seed)

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(FIRST_WORD, VOCABULARY, size=count).tolist())

    def about(mean: int) -> int:
        return int(rng.integers(mean // 2, mean + mean // 2 + 1))

    system = words(load.system)
    jobs = []
    for number in range(1, load.jobs + 1):
        drawn = rng.lognormal(np.log(load.gap_s), load.gap_spread, size=load.turns - 1)
        gaps = [*np.minimum(drawn, load.gap_limit_s).tolist(), 0.0]
        added = [system + words(about(load.task))]
        added += [words(about(load.result)) for _ in gaps[1:]]
        turns = zip(added, gaps, strict=True)
        jobs.append(
            Job(f"agent-{number}", "", tuple(Turn(a, words(load.answer), gap) for a, gap in turns))
        )
    return tuple(jobs)


def contexts(jobs: tuple[Job, ...]) -> list[int]:
    """Length of each job's text in the end, its last answer included."""
    return [sum(len(turn.added) + len(turn.answer) for turn in job.turns) for job in jobs]


def mistaken(job: Job, at: int, tokens: int) -> Job:
    """A job's first turn alone, with other words in one place: what a wrong page would be."""
    first = job.turns[0]
    other = tuple(FIRST_WORD + token % (VOCABULARY - FIRST_WORD) for token in first.added)
    added = first.added[:at] + other[at : at + tokens] + first.added[at + tokens :]
    return Job(f"{job.name}-mistaken", "mistaken", (Turn(added, first.answer, 0.0),))
