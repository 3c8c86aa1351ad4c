"""The view: the part of a server's state that is shown, the order of its jobs, and the keys that
change the view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from tiered_kv.status import JobState, JobStatus

from .server_state import ServerState


class Action(Enum):
    """Action that a key triggers."""

    QUIT = auto()
    NEXT_ROW = auto()
    PREVIOUS_ROW = auto()
    NEXT_PAGE = auto()
    PREVIOUS_PAGE = auto()
    FIRST = auto()
    LAST = auto()
    NEXT_ENGINE = auto()


class JobOrder(Enum):
    """Sort order of jobs. The value is the name of the order on the screen."""

    STATE = "state"
    """Most urgent state first. Within a state, waiting jobs are sorted by expected return, other
    jobs by ``since``."""
    CONTEXT = "context"
    """Jobs with the longest contexts first."""
    UNTIL = "pin's end"
    """Jobs with pins, by the end of the pin, then jobs without pins."""
    RETURN = "return"
    """Waiting jobs with a forecast, by expected return, then all other jobs."""
    AGE = "age"
    """Jobs in order of their first appearance."""
    NAME = "name"
    """Jobs in alphabetical order of their names."""


SORT_KEYS = {
    "s": JobOrder.STATE,
    "c": JobOrder.CONTEXT,
    "p": JobOrder.UNTIL,
    "r": JobOrder.RETURN,
    "a": JobOrder.AGE,
    "n": JobOrder.NAME,
}
"""Keys that select a sort order."""


@dataclass(frozen=True, slots=True)
class View:
    """The part of a state that is shown, and its order.

    Attributes:
        order: sort order of the jobs.
        backwards: True to reverse the order.
        top: number of jobs above the first job shown.
        engine: rank of the viewed engine; None for all engines.
    """

    order: JobOrder = JobOrder.STATE
    backwards: bool = False
    top: int = 0
    engine: int | None = None

    def of(self, state: ServerState) -> ServerState:
        """Return the part of a state that is shown."""
        return state if self.engine is None else state.of_engine(self.engine)

    def in_order(self, jobs: Sequence[JobStatus]) -> Sequence[JobStatus]:
        """Return the jobs in this view's order. The sort is stable."""
        if self.order is JobOrder.AGE:
            return jobs[::-1] if self.backwards else jobs
        return sorted(jobs, key=_KEYS[self.order], reverse=self.backwards)

    def within(self, jobs: int, rows: int) -> View:
        """Return the view with ``top`` limited, so that the screen does not scroll past the last of
        ``jobs`` jobs, of which ``rows`` fit on the screen."""
        return replace(self, top=max(0, min(self.top, jobs - rows)))

    def sorted_by(self, order: JobOrder) -> View:
        """Return the view in another order, scrolled to the top. Selecting the same order
        again reverses it.
        """
        return replace(
            self, order=order, backwards=order is self.order and not self.backwards, top=0
        )

    def moved(self, action: Action, state: ServerState, rows: int) -> View:
        """Return the view after an action of a key. ``QUIT`` does not change the view.

        Args:
            state: the whole state.
            rows: number of jobs that fit on the screen.
        """
        if action is Action.NEXT_ENGINE:
            return replace(self, engine=self._next_engine(state), top=0)
        jobs = len(self.of(state).jobs)
        tops = {
            Action.NEXT_ROW: self.top + 1,
            Action.PREVIOUS_ROW: self.top - 1,
            Action.NEXT_PAGE: self.top + max(1, rows),
            Action.PREVIOUS_PAGE: self.top - max(1, rows),
            Action.FIRST: 0,
            Action.LAST: jobs,
        }
        return replace(self, top=tops.get(action, self.top)).within(jobs, rows)

    def _next_engine(self, state: ServerState) -> int | None:
        """Return the rank of the next engine to show; None, for all engines, after the last engine
        or if there is only one."""
        ranks = [one.engine for one in state.status.engines]
        if len(ranks) < 2:
            return None
        return min(
            (rank for rank in ranks if self.engine is None or rank > self.engine), default=None
        )


_URGENCY = [JobState(name) for name in ("held", "queued", "running", "waiting", "silent")]
"""Job states, the most urgent for an operator first."""

_KEYS: dict[JobOrder, Callable[[JobStatus], Any]] = {
    JobOrder.STATE: lambda job: (_URGENCY.index(job.state), _next_to_change(job)),
    JobOrder.CONTEXT: lambda job: -job.context_tokens,
    JobOrder.UNTIL: lambda job: _or_never(job.kv.until),
    JobOrder.RETURN: lambda job: _or_never(job.expected_at),
    JobOrder.NAME: lambda job: job.id,
}


def _next_to_change(job: JobStatus) -> float:
    return _or_never(job.expected_at if job.state is JobState.WAITING else job.since)


def _or_never(moment: float | None) -> float:
    return math.inf if moment is None else moment
