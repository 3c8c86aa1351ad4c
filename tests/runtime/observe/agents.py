"""Agents that play the same jobs on every engine, under memory pressure: jobs of several turns,
with tool calls in between."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.rig import EngineRig

STEP_S = 0.05


@dataclass(frozen=True, slots=True)
class Script:
    """Jobs that are fixed before the first run.

    Attributes:
        begins: start time of each job, in seconds.
        said: by job and turn, the tokens that a tool adds before the turn.
        gaps: by job and turn, the seconds before the turn.
    """

    begins: tuple[float, ...]
    said: tuple[tuple[tuple[int, ...], ...], ...]
    gaps: tuple[tuple[float, ...], ...]


@dataclass(slots=True)
class _Job:
    due: float
    context: list[int]
    turn: int = 0
    request: str | None = None


def script(seed: int, jobs: int = 8, turns: int = 5, gap_s: float = 3.0) -> Script:
    """Create a script in which all jobs share a system prompt, and tools add many tokens."""
    rng = random.Random(seed)
    system = text(32, seed=7)
    said = tuple(
        tuple(
            (*(system if not turn else ()), *text(rng.randrange(20, 80), seed=rng.randrange(10**6)))
            for turn in range(turns)
        )
        for _ in range(jobs)
    )
    gaps = tuple(tuple(rng.uniform(0.2, 2 * gap_s) for _ in range(turns)) for _ in range(jobs))
    begins = tuple(rng.uniform(0, 2 * gap_s) for _ in range(jobs))
    return Script(begins, said, gaps)


def play(rig: EngineRig, given: Script) -> None:
    """Run all jobs to their end. The engine never waits for real time: worker orders finish a step
    later."""
    jobs = [_Job(rig.now + begin, []) for begin in given.begins]
    turns = len(given.said[0])
    while open_jobs := [number for number, job in enumerate(jobs) if job.turn < turns]:
        for number in open_jobs:
            _advance(rig, given, jobs[number], number)
        _step(rig)
        if not any(job.request for job in jobs):
            _step(rig)
            waits = (job.due for job in jobs if job.turn < turns)
            rig.now = max(rig.now, min(waits, default=rig.now))
    rig.run()


def _advance(rig: EngineRig, given: Script, job: _Job, number: int) -> None:
    """Finish the job's turn if its answer is complete, and start the next one if it is due."""
    turns = len(given.said[number])
    if job.request is not None and job.request in rig.finished:
        job.context += rig.outputs[job.request]
        job.request, job.turn = None, job.turn + 1
        if job.turn < turns:
            job.due = rig.now + given.gaps[number][job.turn]
    if job.request is None and job.turn < turns and job.due <= rig.now:
        job.context += given.said[number][job.turn]
        job.request = f"job{number}-{job.turn}"
        params = {"job_id": f"job{number}", "is_last_step": job.turn == turns - 1}
        rig.add(job.request, job.context, max_tokens=6, params=params)


def _step(rig: EngineRig) -> None:
    rig.step()
    if rig.half is not None:
        rig.wait_for_worker()
    rig.now += STEP_S
