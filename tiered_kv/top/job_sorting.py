"""Orders of jobs: what comes first on the screen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from .readings import JobReading, State

_URGENCY = {state: at for at, state in enumerate(State)}


class JobOrder(Enum):
    """An order of jobs. The value is its name on the screen."""

    STATE = "state"
    """Jobs that wait for something first, and of each state those that are next to change."""
    CONTEXT = "context"
    """The longest contexts first."""
    UNTIL = "pin's end"
    """The pins that end first, then those without."""
    RETURN = "return"
    """Jobs that are expected back first, then those that nobody can tell of."""
    AGE = "age"
    """Jobs that were seen first, first."""
    NAME = "name"
    """Names in the order of their characters."""


_KEYS: dict[JobOrder, Callable[[JobReading], Any]] = {
    JobOrder.STATE: lambda job: (_URGENCY[job.state], _next_to_change(job)),
    JobOrder.CONTEXT: lambda job: -job.context_tokens,
    JobOrder.UNTIL: lambda job: _or_never(job.until),
    JobOrder.RETURN: lambda job: _or_never(job.expected_at),
    JobOrder.NAME: lambda job: job.name,
}


def in_order(
    jobs: Sequence[JobReading], order: JobOrder, *, backwards: bool
) -> Sequence[JobReading]:
    """The jobs in that order. Those that are equal in it stay as they are."""
    if order is JobOrder.AGE:
        return jobs[::-1] if backwards else jobs
    return sorted(jobs, key=_KEYS[order], reverse=backwards)


def _next_to_change(job: JobReading) -> float:
    return _or_never(job.expected_at if job.state is State.WAITING else job.since)


def _or_never(moment: float | None) -> float:
    return math.inf if moment is None else moment
