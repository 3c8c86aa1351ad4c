"""Readings: what the routes of a server say of its engines and jobs at one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class VramReading:
    """The pool of VRAM, in blocks.

    Attributes:
        free: blocks without a reference, whether prompts can find them or not.
        findable: blocks that prompts can find, in use or not.
    """

    blocks: int
    free: int
    findable: int
    pinned: int
    nbytes: int

    @property
    def running(self) -> int:
        """Blocks that running requests have."""
        return max(0, self.blocks - self.free - self.pinned)

    @property
    def cached(self) -> int:
        """Free blocks that prompts can find, about: those in use count as findable, but for the
        last of each request."""
        return min(self.free, max(0, self.findable - self.running - self.pinned))


@dataclass(frozen=True, slots=True)
class CpuReading:
    """CPU memory. Without it, there are no slots."""

    slots: int
    free_slots: int
    compressed_slots: int
    pages: int
    compressed_pages: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LowerReading:
    """A tier below CPU memory.

    Attributes:
        nbytes: its size; None if it has no known end.
    """

    name: str
    pages: int
    nbytes: int | None
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Orders in flight of one kind, and their pages."""

    orders: int
    pages: int


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of a decision: the class of its gap, None without classes, and its tier."""

    gap_class: str | None
    tier: str


@dataclass(frozen=True, slots=True)
class Decided:
    """The last decisions.

    Attributes:
        since: when the oldest was made, seconds since the epoch; None without any.
    """

    since: float | None
    counts: Mapping[Kind, int]


@dataclass(frozen=True, slots=True)
class JobCounts:
    """Jobs and turns of an engine, and the pins between turns.

    Attributes:
        known: jobs remembered.
        waiting: jobs between two turns.
        running, queued, held: turns; those that are held are of new jobs.
        pins, pinned_blocks, most_pinned: jobs that have a pin, its blocks, and how many may be
            pinned.
        expected_up: contexts that are to come up from the tiers below in time.
    """

    known: int
    waiting: int
    running: int
    queued: int
    held: int
    pins: int
    pinned_blocks: int
    most_pinned: int
    expected_up: int


@dataclass(frozen=True, slots=True)
class EngineReading:
    """An engine, or several added up.

    Attributes:
        engine: its rank; None for several.
        now: when it said so, seconds since the epoch.
        below: tiers below CPU memory, fastest first.
        transfers: orders in flight, by kind.
        counters: totals since it started, as in ``/metrics``.
    """

    engine: int | None
    now: float
    policy: str
    vram: VramReading
    cpu: CpuReading
    below: tuple[LowerReading, ...]
    jobs: JobCounts
    transfers: Mapping[str, Transfer]
    decided: Decided
    counters: Mapping[str, float]


class State(Enum):
    """State of a job, in the order in which an operator cares."""

    HELD = "held"
    QUEUED = "queued"
    RUNNING = "running"
    WAITING = "waiting"
    SILENT = "silent"


class Place(Enum):
    """Place of a job's KV."""

    VRAM = "vram"
    CPU = "cpu"
    STORE = "store"
    NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True)
class JobReading:
    """A job. Moments are seconds since the epoch, None for those that never come.

    Attributes:
        name: its id, made harmless.
        number: its place in the list of its engine's jobs.
        since: when its gap began, or its turn came.
        until: the end of its pin.
        back_at: when its pages are to be up again.
        q50_s, q90_s: quantiles of its gap's length; None without a forecast.
        kind: what was decided last; None before.
    """

    name: str
    engine: int
    number: int
    turn: int
    state: State
    since: float | None
    context_tokens: int
    place: Place
    pinned_blocks: int
    until: float | None
    back_at: float | None
    q50_s: float | None
    q90_s: float | None
    kind: Kind | None

    @property
    def expected_at(self) -> float | None:
        """Time by which its next turn comes as likely as not; None if nobody can tell."""
        if self.state is not State.WAITING or self.since is None or self.q50_s is None:
            return None
        return self.since + self.q50_s


Part = TypeVar("Part", VramReading, CpuReading, JobCounts)


def _sum(kind: type[Part], parts: Sequence[Part]) -> Part:
    """Parts of which every field is a count, added up field by field."""
    names = [field.name for field in fields(kind)]
    return kind(**{name: sum(getattr(one, name) for one in parts) for name in names})


def add_up(engines: Sequence[EngineReading]) -> EngineReading:
    """Several engines as one. There is at least one."""
    if len(engines) == 1:
        return engines[0]
    kinds = Counter[Kind]()
    transfers, below = dict[str, Transfer](), dict[str, LowerReading]()
    for one in engines:
        kinds.update(one.decided.counts)
        for name, more in one.transfers.items():
            had = transfers.get(name, Transfer(0, 0))
            transfers[name] = Transfer(had.orders + more.orders, had.pages + more.pages)
        for tier in one.below:
            below[tier.name] = _both(below[tier.name], tier) if tier.name in below else tier
    begins = [one.decided.since for one in engines if one.decided.since is not None]
    return EngineReading(
        engine=None,
        now=max(one.now for one in engines),
        policy=engines[0].policy,
        vram=_sum(VramReading, [one.vram for one in engines]),
        cpu=_sum(CpuReading, [one.cpu for one in engines]),
        below=tuple(below.values()),
        jobs=_sum(JobCounts, [one.jobs for one in engines]),
        transfers=transfers,
        decided=Decided(min(begins, default=None), kinds),
        counters=summed(one.counters for one in engines),
    )


def summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Counters added up by name."""
    found = dict[str, float]()
    for part in parts:
        for name, amount in part.items():
            found[name] = found.get(name, 0) + amount
    return found


def _both(one: LowerReading, other: LowerReading) -> LowerReading:
    ends = None if one.nbytes is None or other.nbytes is None else one.nbytes + other.nbytes
    used = one.used_bytes + other.used_bytes
    return LowerReading(one.name, one.pages + other.pages, ends, used)
