"""Snapshot: all that a frame shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
