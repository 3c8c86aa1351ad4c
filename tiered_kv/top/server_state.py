"""The state of a server at one time, and the sum of its engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from typing import Any

from tiered_kv.status import EngineStatus, JobStatus, ServerStatus


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of an engine's counters over a period.

    Attributes:
        over_s: length of the period, seconds.
        counters: growth of each counter, by name.
    """

    over_s: float
    counters: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server at one time.

    Attributes:
        url: address of the server.
        status: the status of the server's engines, or of the viewed engine; at least one.
        growth: growth of each engine's counters, by the engine's rank; empty before the second
            poll.
        jobs: jobs read so far, in list order.
        whole: True once all jobs have been read.
        problem: message that explains why this is not the current state; None if it is current.
    """

    url: str
    status: ServerStatus
    growth: Mapping[int, Growth]
    jobs: tuple[JobStatus, ...]
    whole: bool
    problem: str | None = None

    @property
    def total(self) -> EngineStatus:
        """Sum over all engines."""
        return add_up(self.status.engines)

    @property
    def grown(self) -> Growth | None:
        """Sum of the growth of the engines' counters; None before the second poll."""
        ranks = [one.engine for one in self.status.engines]
        found = [self.growth[rank] for rank in ranks if rank in self.growth]
        if not found:
            return None
        return Growth(max(one.over_s for one in found), _sum([one.counters for one in found]))

    def of_engine(self, engine: int) -> ServerState:
        """Return the part of the state that belongs to one engine; the whole state if no engine has
        that rank.
        """
        found = tuple(one for one in self.status.engines if one.engine == engine)
        if not found:
            return self
        jobs = tuple(job for job in self.jobs if job.engine == engine)
        return replace(self, status=replace(self.status, engines=found), jobs=jobs)


def add_up(engines: Sequence[EngineStatus]) -> EngineStatus:
    """Return the sum of several engines, with the rank and the settings of the first. ``engines``
    must not be empty.
    """
    if len(engines) == 1:
        return engines[0]
    total: EngineStatus = _sum(engines)
    begins = [one.decisions.since for one in engines if one.decisions.since is not None]
    return replace(
        total,
        now=max(one.now for one in engines),
        decisions=replace(total.decisions, since=min(begins, default=None)),
    )


_NO_AMOUNTS = ("engine", "block_tokens", "compressed_share")


def _sum(parts: Sequence[Any]) -> Any:
    """Return the sum of parts of one type: numbers, mappings by name, dataclasses by field, and
    tuples of tiers or of decisions by tier and gap class. Texts, and the fields in ``_NO_AMOUNTS``,
    are taken from the first part. A number that is None in one part is None in the sum.
    """
    first = parts[0]
    if isinstance(first, Mapping):
        named = dict[str, list[Any]]()
        for name, one in chain.from_iterable(part.items() for part in parts):
            named.setdefault(name, []).append(one)
        return {name: _sum(found) for name, found in named.items()}
    if isinstance(first, tuple):  # a tuple of tiers or of decisions
        kinds = dict[Any, list[Any]]()
        for one in chain.from_iterable(parts):
            kinds.setdefault((one.tier, getattr(one, "gap_class", None)), []).append(one)
        return tuple(map(_sum, kinds.values()))
    if is_dataclass(first) and not isinstance(first, type):
        amounts = [field.name for field in fields(first) if field.name not in _NO_AMOUNTS]
        return replace(
            first, **{name: _sum([getattr(one, name) for one in parts]) for name in amounts}
        )
    if isinstance(first, str):
        return first
    return None if None in parts else sum(parts)
