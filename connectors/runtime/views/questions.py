"""Questions to the scheduler half from outside, and their answers: plain JSON both ways.

A question is ``{"ask": ASK}`` with what that needs:

- ``status``: nothing more.
- ``jobs``: ``limit``, and ``after`` with the engine and number of the job before the first, as
  ``[engine, number]``. With several engines the jobs of the first come first.
- ``job``: ``id``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiered_kv.connectors.runtime.scheduler import SchedulerHalf

from .engine_status import status
from .job_view import JobView

MOST_JOBS = 100
"""Jobs in an answer: to tell of them takes a millisecond, which a step is late by."""
MOST_NAMESAKES = 100
"""Jobs of one name in an answer."""


def answer(half: SchedulerHalf, question: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a question. Changes nothing; takes time for what is asked alone.

    Raises:
        KeyError, TypeError, ValueError: it is no question.
    """
    match question["ask"]:
        case "status":
            return status(half)
        case "jobs":
            known = len(half.gaps.manager.jobs)
            return {**_now(half), "known": known, "jobs": _jobs(half, question)}
        case "job":
            jobs = JobView(half).named(str(question["id"]), MOST_NAMESAKES)
            return {**_now(half), "jobs": jobs}
        case unknown:
            raise ValueError(f"nobody can answer {unknown!r}")


def _now(half: SchedulerHalf) -> dict[str, float]:
    return {"now": round(half.given.wall(), 3)}


def _jobs(half: SchedulerHalf, question: Mapping[str, Any]) -> list[dict[str, Any]]:
    engine, number = map(int, question["after"])
    most = min(int(question["limit"]), MOST_JOBS)
    if half.facts.replica < engine or most < 1:
        return []
    after = number if half.facts.replica == engine else 0
    return JobView(half).page(after, most)
