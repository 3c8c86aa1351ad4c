"""Agents under pressure, the same on every engine: jobs of several turns with tools between."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.rig import EngineRig

STEP_S = 0.05


@dataclass(frozen=True, slots=True)
class Script:
    """Jobs, fixed before the first run.

    Attributes:
        begins: moment at which each job begins, seconds.
        said: by job and turn, the tokens that a tool adds before it.
        gaps: by job and turn, the seconds before it.
        answer: tokens of each answer.
    """

    begins: tuple[float, ...]
    said: tuple[tuple[tuple[int, ...], ...], ...]
    gaps: tuple[tuple[float, ...], ...]
    answer: int = 6


def script(seed: int, jobs: int = 10, turns: int = 6, gap_s: float = 4.0) -> Script:
    """Make a script: all jobs share a system prompt, and their tools answer at length."""
    rng = random.Random(seed)
    system = text(32, seed=7)
    said = tuple(
        tuple(
            (*(system if not turn else ()), *text(rng.randrange(20, 70), seed=rng.randrange(10**6)))
            for turn in range(turns)
        )
        for _ in range(jobs)
    )
    gaps = tuple(tuple(rng.uniform(0.2, 2 * gap_s) for _ in range(turns)) for _ in range(jobs))
    begins = tuple(rng.uniform(0, 2 * gap_s) for _ in range(jobs))
    return Script(begins, said, gaps)


@dataclass(slots=True)
class _Job:
    due: float
    context: list[int]
    turn: int = 0
    request: str | None = None


@dataclass(slots=True)
class Play:
    """What became of a script: the steps, as the engine scheduled them."""

    steps: list[dict[str, int]] = field(default_factory=list)


def play(rig: EngineRig, given: Script, *, ends: bool = True) -> None:
    """Run all jobs to their end.

    Args:
        ends: True if clients say which turn is the last.
    """
    jobs = [_Job(rig.now + begin, []) for begin in given.begins]
    turns = len(given.said[0])
    while any(job.turn < turns for job in jobs):
        for number, job in enumerate(jobs):
            if job.request is not None and job.request in rig.finished:
                job.context += rig.outputs[job.request]
                job.request, job.turn = None, job.turn + 1
                if job.turn < turns:
                    job.due = rig.now + given.gaps[number][job.turn]
            if job.request is None and job.turn < turns and job.due <= rig.now:
                job.context += given.said[number][job.turn]
                job.request = f"job{number}-{job.turn}"
                last = ends and job.turn == turns - 1
                params = {"job_id": f"job{number}", "is_last_step": last}
                rig.add(job.request, job.context, max_tokens=given.answer, params=params)
        rig.step()
        if rig.half is not None:
            rig.wait_for_worker()
        rig.now += STEP_S
    rig.run()
