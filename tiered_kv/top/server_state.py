"""The state of a server at one moment, and its engines added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from tiered_kv.status import (
    Cpu,
    DecisionCount,
    Decisions,
    EngineStatus,
    JobCounts,
    JobStatus,
    LowerTier,
    Pins,
    Queues,
    Tiers,
    Transfers,
    Vram,
)

Part = TypeVar("Part", Vram, Cpu, LowerTier, Pins, JobCounts, Queues, Transfers)


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of an engine's counters over a time, seconds."""

    over_s: float
    counters: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server at one moment.

    Attributes:
        url: its address.
        engines: its engines, or those that are viewed; at least one.
        all_engines: ranks of all of its engines.
        growth: growth of their counters, by rank; none before the second poll.
        jobs: jobs that were read, in the order of the list.
        whole: True if these are all jobs, or were a while ago.
        problem: a sentence that says why this is not the current state; None if it is.
    """

    url: str
    version: str
    vllm_version: str
    engines: tuple[EngineStatus, ...]
    all_engines: tuple[int, ...]
    growth: Mapping[int, Growth]
    jobs: tuple[JobStatus, ...]
    whole: bool
    problem: str | None = None

    @property
    def total(self) -> EngineStatus:
        """The engines, added up."""
        return add_up(self.engines)

    @property
    def grown(self) -> Growth | None:
        """Growth of the engines' counters, added up; None before the second poll."""
        found = [growth for one in self.engines if (growth := self.growth.get(one.engine))]
        if not found:
            return None
        return Growth(max(one.over_s for one in found), _by_name(one.counters for one in found))

    def of_engine(self, engine: int) -> ServerState:
        """The part of one engine; all of it if there is none of that rank."""
        found = tuple(one for one in self.engines if one.engine == engine)
        if not found:
            return self
        jobs = tuple(job for job in self.jobs if job.engine == engine)
        return replace(self, engines=found, jobs=jobs)


def add_up(engines: Sequence[EngineStatus]) -> EngineStatus:
    """Several engines as one; whatever ``tiered-kv top`` does not show is that of the first. There
    is at least one."""
    if len(engines) == 1:
        return engines[0]
    lower, transfers = dict[str, list[LowerTier]](), dict[str, list[Transfers]]()
    kinds, begins = Counter[tuple[str | None, str]](), list[float]()
    for one in engines:
        for tier in one.tiers.lower:
            lower.setdefault(tier.tier, []).append(tier)
        for name, moving in one.transfers.items():
            transfers.setdefault(name, []).append(moving)
        for kind in one.decisions.counts:
            kinds[kind.gap_class, kind.tier] += kind.count
        if one.decisions.since is not None:
            begins.append(one.decisions.since)
    return replace(
        engines[0],
        now=max(one.now for one in engines),
        tiers=Tiers(
            vram=_sum([one.tiers.vram for one in engines]),
            cpu=_sum([one.tiers.cpu for one in engines]),
            lower=tuple(map(_sum, lower.values())),
        ),
        pins=_sum([one.pins for one in engines]),
        jobs=_sum([one.jobs for one in engines]),
        queues=_sum([one.queues for one in engines]),
        transfers={name: _sum(parts) for name, parts in transfers.items()},
        decisions=Decisions(
            last=sum(one.decisions.last for one in engines),
            since=min(begins, default=None),
            counts=tuple(DecisionCount(*kind, count) for kind, count in kinds.items()),
        ),
        counters=_by_name(one.counters for one in engines),
        gauges=_by_name(one.gauges for one in engines),
    )


_NO_AMOUNTS = ("tier", "block_tokens", "compressed_share")
"""Fields that are not added up: those of the first are kept."""


def _sum(parts: Sequence[Part]) -> Part:
    """Parts added up field by field. An amount that one of them lacks is None."""
    amounts = dict[str, Any]()
    for field in fields(parts[0]):
        if field.name not in _NO_AMOUNTS:
            found = [getattr(one, field.name) for one in parts]
            amounts[field.name] = None if None in found else sum(found)
    return replace(parts[0], **amounts)


def _by_name(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Numbers added up by name."""
    found = dict[str, float]()
    for part in parts:
        for name, amount in part.items():
            found[name] = found.get(name, 0) + amount
    return found
