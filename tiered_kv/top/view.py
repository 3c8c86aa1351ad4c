"""View: the part of a snapshot that is looked at, and the keys that change it.

Snapshot: all that a frame shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from .job_sorting import JobOrder
from .readings import EngineReading, JobReading, add_up, summed


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of an engine's counters over a time, seconds."""

    over_s: float
    counters: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A server at one moment.

    Attributes:
        url: its address.
        engines: its engines, or those that are looked at; at least one.
        all_engines: ranks of all of its engines.
        growth: growth of their counters, by rank; none before the second look.
        jobs: jobs that were seen, in the order of the list.
        whole: True if those are all that there are, or were a while ago.
        problem: a sentence that tells why this is not how the server is now; None if it is.
    """

    url: str
    version: str
    vllm_version: str
    engines: tuple[EngineReading, ...]
    all_engines: tuple[int | None, ...]
    growth: Mapping[int | None, Growth]
    jobs: tuple[JobReading, ...]
    whole: bool
    problem: str | None = None

    @property
    def total(self) -> EngineReading:
        """The engines, added up."""
        return add_up(self.engines)

    @property
    def grown(self) -> Growth | None:
        """Growth of the engines' counters, added up; None before the second look."""
        return _together([found for one in self.engines if (found := self.growth.get(one.engine))])

    def of_engine(self, engine: int) -> Snapshot:
        """The part of one engine; all of it if there is none of that rank."""
        found = tuple(one for one in self.engines if one.engine == engine)
        if not found:
            return self
        jobs = tuple(job for job in self.jobs if job.engine == engine)
        return replace(self, engines=found, jobs=jobs)


def _together(growths: Sequence[Growth]) -> Growth | None:
    if not growths:
        return None
    over_s = max(one.over_s for one in growths)
    return Growth(over_s, summed(one.counters for one in growths))


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
