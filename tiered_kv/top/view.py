"""View: the part of a snapshot that is looked at, and the keys that change it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from .job_sorting import JobOrder
from .snapshot import Snapshot


class Action(Enum):
    """Action of a key."""

    QUIT = auto()
    NEXT_ROW = auto()
    PREVIOUS_ROW = auto()
    NEXT_PAGE = auto()
    PREVIOUS_PAGE = auto()
    FIRST = auto()
    LAST = auto()
    NEXT_ENGINE = auto()


SORT_KEYS = {
    "s": JobOrder.STATE,
    "c": JobOrder.CONTEXT,
    "p": JobOrder.UNTIL,
    "r": JobOrder.RETURN,
    "a": JobOrder.AGE,
    "n": JobOrder.NAME,
}
"""Keys that sort."""


@dataclass(frozen=True, slots=True)
class View:
    """A view.

    Attributes:
        backwards: True for the order turned round.
        top: jobs above the first that is shown.
        engine: rank of the engine that is looked at; None for all.
    """

    order: JobOrder = JobOrder.STATE
    backwards: bool = False
    top: int = 0
    engine: int | None = None

    def of(self, snapshot: Snapshot) -> Snapshot:
        """The part of a snapshot that is looked at."""
        return snapshot if self.engine is None else snapshot.of_engine(self.engine)

    def within(self, jobs: int, rows: int) -> View:
        """The view of that many jobs, of which so many have room."""
        return replace(self, top=max(0, min(self.top, jobs - rows)))

    def sorted_by(self, order: JobOrder) -> View:
        """The view in another order, from its top; in the same one, turned round."""
        return replace(
            self, order=order, backwards=order is self.order and not self.backwards, top=0
        )

    def moved(self, action: Action, snapshot: Snapshot, rows: int) -> View:
        """The view after a key.

        Args:
            snapshot: all that can be looked at.
            rows: jobs that have room.
        """
        jobs = len(self.of(snapshot).jobs)
        page = max(1, rows)
        match action:
            case Action.NEXT_ROW:
                return replace(self, top=self.top + 1).within(jobs, rows)
            case Action.PREVIOUS_ROW:
                return replace(self, top=self.top - 1).within(jobs, rows)
            case Action.NEXT_PAGE:
                return replace(self, top=self.top + page).within(jobs, rows)
            case Action.PREVIOUS_PAGE:
                return replace(self, top=self.top - page).within(jobs, rows)
            case Action.FIRST:
                return replace(self, top=0)
            case Action.LAST:
                return replace(self, top=jobs).within(jobs, rows)
            case Action.NEXT_ENGINE:
                return replace(self, engine=self._next_engine(snapshot), top=0)
            case Action.QUIT:
                return self

    def _next_engine(self, snapshot: Snapshot) -> int | None:
        """The next rank; None, for all of them, after the last."""
        ranks = [engine for engine in snapshot.all_engines if engine is not None]
        if len(ranks) < 2:
            return None
        return min(
            (rank for rank in ranks if self.engine is None or rank > self.engine), default=None
        )
