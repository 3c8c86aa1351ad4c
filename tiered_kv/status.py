"""Answers of the routes under ``/tiered_kv``, with a dataclass for each object that the program's
own clients read.

The engine builds the status and the list of jobs from these classes, and ``to_json`` writes their
fields in order. ``tiered-kv top`` and the commands for snapshots read the answers with
``from_json``, which ignores unknown fields.

Moments are seconds since the epoch. A moment that never comes, and a duration without a known end,
are None, which is null in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Self

from .json_fields import JsonObject, read

# -- engines ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Vram(JsonObject):
    """The VRAM block pool.

    Attributes:
        free_blocks: blocks without a reference, whether prompts can find them or not.
        cached_blocks: blocks that prompts can find, in use or not.
        block_tokens: tokens in a block.
    """

    blocks: int
    free_blocks: int
    cached_blocks: int
    pinned_blocks: int
    block_tokens: int
    bytes: int
    unneeded: ClassVar[Mapping[str, Any]] = {"block_tokens": 0}

    @property
    def running_blocks(self) -> int:
        """Blocks of running requests."""
        return max(0, self.blocks - self.free_blocks - self.pinned_blocks)

    @property
    def reusable_blocks(self) -> int:
        """Approximate number of free blocks that prompts can find. All blocks in use count as
        cached, although the last block of each request is not."""
        cached = self.cached_blocks - self.running_blocks - self.pinned_blocks
        return min(self.free_blocks, max(0, cached))


@dataclass(frozen=True, slots=True)
class Cpu(JsonObject):
    """The CPU tier.

    Attributes:
        slots: number of slots; 0 if the tier is disabled.
        bytes, used_bytes: size of all slots, and of the slots in use, over all ranks.
        compressed_share: compressed pages, as a fraction of all pages.
    """

    pages: int
    slots: int
    free_slots: int
    bytes: int
    used_bytes: int
    compressed_pages: int
    compressed_slots: int
    compressed_share: float
    unneeded: ClassVar[Mapping[str, Any]] = {"used_bytes": 0, "compressed_share": 0.0}


@dataclass(frozen=True, slots=True)
class LowerTier(JsonObject):
    """A tier below CPU memory.

    Attributes:
        tier: name of the tier.
        bytes: size of the tier; None if unknown.
        promoting_pages, demoting_pages: pages being promoted from the tier and demoted to it.
    """

    tier: str
    pages: int
    bytes: int | None
    used_bytes: int
    promoting_pages: int
    demoting_pages: int
    unneeded: ClassVar[Mapping[str, Any]] = {"promoting_pages": 0, "demoting_pages": 0}


@dataclass(frozen=True, slots=True)
class Tiers(JsonObject):
    """All tiers, fastest first. In JSON a list, in which each tier has its name as ``tier``."""

    vram: Vram
    cpu: Cpu
    lower: tuple[LowerTier, ...]

    def to_json(self) -> Any:
        """Convert the tiers to a list."""
        first = ({"tier": "vram", **self.vram.to_json()}, {"tier": "cpu", **self.cpu.to_json()})
        return [*first, *(one.to_json() for one in self.lower)]

    @classmethod
    def from_json(cls, found: object) -> Self:
        """Read the tiers from a list, in any order.

        Raises:
            ValueError: the list is not a list of objects, or a tier is missing or invalid.
        """
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise ValueError("the value is not a list of objects")
        lower = [one for one in found if one.get("tier") not in ("vram", "cpu")]
        upper = {one["tier"]: one for one in found if one.get("tier") in ("vram", "cpu")}
        return read(cls, {**upper, "lower": lower})


@dataclass(frozen=True, slots=True)
class Pins(JsonObject):
    """Pins between turns.

    Attributes:
        jobs: number of jobs with a pin.
        blocks: number of pinned blocks.
        most_blocks: maximum number of blocks that may be pinned.
    """

    jobs: int
    blocks: int
    most_blocks: int


@dataclass(frozen=True, slots=True)
class JobCounts(JsonObject):
    """Numbers of jobs.

    Attributes:
        known: all known jobs.
        begun: jobs that admission counts as started.
        waiting: jobs between two turns.
        held: new jobs that are held back.
    """

    known: int
    begun: int
    waiting: int
    held: int
    unneeded: ClassVar[Mapping[str, Any]] = {"begun": 0, "held": 0}


@dataclass(frozen=True, slots=True)
class Queues(JsonObject):
    """Numbers of turns by their state, of orders in flight, and of contexts that are scheduled for
    prefetch."""

    running: int
    queued: int
    held: int
    orders_in_flight: int
    prefetches: int
    unneeded: ClassVar[Mapping[str, Any]] = {"orders_in_flight": 0}


@dataclass(frozen=True, slots=True)
class Transfers(JsonObject):
    """Orders in flight of one type, and the number of their pages."""

    orders: int = 0
    pages: int = 0


@dataclass(frozen=True, slots=True)
class DecisionCount(JsonObject):
    """Number of decisions with the same class and tier.

    Attributes:
        gap_class: class of the gaps; None for policies without classes.
        tier: tier of the decisions.
    """

    renamed: ClassVar[Mapping[str, str]] = {"gap_class": "class"}
    gap_class: str | None
    tier: str
    count: int


@dataclass(frozen=True, slots=True)
class Decisions(JsonObject):
    """The most recent decisions.

    Attributes:
        last: number of decisions.
        since: time of the oldest decision; None without any.
        counts: number of decisions by class and tier, most frequent first.
    """

    last: int
    since: float | None
    counts: tuple[DecisionCount, ...]
    unneeded: ClassVar[Mapping[str, Any]] = {"last": 0}


@dataclass(frozen=True, slots=True)
class EngineStatus(JsonObject):
    """The status of an engine.

    Attributes:
        engine: data-parallel rank of the engine.
        transfers: orders in flight, by type.
        counters: totals since the engine started, as in ``/metrics``.
    """

    engine: int
    now: float
    steps: int
    mode: str
    policy: str
    eviction: str
    admission: str
    tiers: Tiers
    pins: Pins
    jobs: JobCounts
    queues: Queues
    transfers: Mapping[str, Transfers]
    decisions: Decisions
    counters: Mapping[str, float]
    gauges: Mapping[str, float]
    unneeded: ClassVar[Mapping[str, Any]] = {
        "steps": 0,
        "mode": "",
        "eviction": "",
        "admission": "",
        "gauges": {},
    }


@dataclass(frozen=True, slots=True)
class ServerStatus(JsonObject):
    """The answer of ``/tiered_kv/status``: the versions of tiered-kv and vLLM, and the status of
    every engine."""

    version: str
    vllm_version: str
    engines: tuple[EngineStatus, ...]


# -- jobs ---------------------------------------------------------------------------------


class JobState(Enum):
    """State of a job, or of one of its turns."""

    RUNNING = "running"
    """A turn has blocks, or had blocks before it was preempted."""
    QUEUED = "queued"
    """A turn has arrived and waits for blocks, or for its pages."""
    HELD = "held"
    """A turn has arrived; the job is new and is held back."""
    WAITING = "waiting"
    """Between two turns: the job's tool runs, and the next turn is expected."""
    SILENT = "silent"
    """Between two turns; the next turn is no longer expected."""


class Where(Enum):
    """Location of a job's KV according to the last decision. Later evictions are not recorded per
    job."""

    VRAM = "vram"
    """VRAM: a turn is running there, or the KV is pinned."""
    CPU = "cpu"
    """CPU memory."""
    STORE = "store"
    """The lower tiers."""
    NOWHERE = "nowhere"
    """Outside all tiers: the KV may stay in VRAM until its blocks are reused."""


@dataclass(frozen=True, slots=True)
class JobKv(JsonObject):
    """The KV of a job.

    Attributes:
        until: time at which the job's pin ends; None without a pin, and while a turn of the job
            runs.
        back_at: time at which the job's pages should be in CPU memory again; None if they are not
            scheduled for promotion.
    """

    where: Where
    pinned_blocks: int
    until: float | None
    back_at: float | None


@dataclass(frozen=True, slots=True)
class Quantiles(JsonObject):
    """Quantiles of the length of a job's open gap, seconds from the start of the gap; None if a
    quantile exceeds the longest gap that the forecast covers."""

    q50_s: float | None
    q90_s: float | None


@dataclass(frozen=True, slots=True)
class JobDecision(JsonObject):
    """The last decision for a job.

    Attributes:
        tier: tier of the decision.
        ttl_s: maximum duration of the pin, seconds; 0 without a pin; None if unlimited, or if the
            server does not report it.
        gap_class: class of the gap; None for policies without classes.
    """

    renamed: ClassVar[Mapping[str, str]] = {"gap_class": "class"}
    tier: str
    ttl_s: float | None
    gap_class: str | None
    unneeded: ClassVar[Mapping[str, Any]] = {"ttl_s": None}


@dataclass(frozen=True, slots=True)
class JobStatus(JsonObject):
    """A job in the list of jobs.

    Attributes:
        number: position in the list of its engine's jobs.
        salted: True if its client uses a cache salt.
        turn: number of turns so far.
        began: time at which its first turn arrived; None if the server does not report it.
        since: time at which its gap started, or at which the first of its queued or running turns
            arrived; None if the job is silent.
        forecast: quantiles of its open gap; None without a forecast.
        session, agent, parent: as in the trace (``tiered_kv.trace.turn_record``).
    """

    id: str
    engine: int
    number: int
    salted: bool
    turn: int
    state: JobState
    began: float | None
    since: float | None
    context_tokens: int
    kv: JobKv
    forecast: Quantiles | None
    decision: JobDecision | None
    session: str | None = None
    agent: str | None = None
    parent: str | None = None
    unneeded: ClassVar[Mapping[str, Any]] = {"salted": False, "began": None}

    @property
    def expected_at(self) -> float | None:
        """Median forecast of the time at which the next turn arrives; None unless the job is
        between turns and has a forecast of the median."""
        q50_s = self.forecast.q50_s if self.forecast is not None else None
        if self.state is not JobState.WAITING or self.since is None or q50_s is None:
            return None
        return self.since + q50_s


@dataclass(frozen=True, slots=True, order=True)
class Cursor(JsonObject):
    """Position of a job in the list of all jobs: the engine's rank, then the job's number there. In
    JSON, the cursor is a text such as "0.57"."""

    engine: int = 0
    number: int = 0

    def __str__(self) -> str:
        return f"{self.engine}.{self.number}"

    def to_json(self) -> Any:
        """Convert the cursor to a text."""
        return str(self)

    @classmethod
    def from_json(cls, found: object) -> Self:
        """Read the cursor from a text such as "0.57".

        Raises:
            ValueError: the value is not such a text.
        """
        matched = _CURSOR.fullmatch(found) if isinstance(found, str) else None
        if matched is None:
            raise ValueError("the value is not a position in a list of jobs")
        return cls(int(matched[1]), int(matched[2]))


_CURSOR = re.compile(r"([0-9]{1,6})\.([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class JobPage(JsonObject):
    """The answer of ``/tiered_kv/jobs``: a part of the list of all engines' jobs, sorted by cursor.

    Attributes:
        known: number of all jobs.
        next: position of the last of these jobs; None if no further jobs follow.
    """

    now: float
    known: int
    jobs: tuple[JobStatus, ...]
    next: Cursor | None
    unneeded: ClassVar[Mapping[str, Any]] = {"now": 0.0, "known": 0}


# -- snapshots ----------------------------------------------------------------------------

DEFAULT_TIMEOUT_S, MOST_TIMEOUT_S = 60.0, 3600.0
"""Default and maximum time that a request waits for the end of an operation, seconds."""


@dataclass(frozen=True, slots=True)
class SnapshotMade(JsonObject):
    """The answer to a request for a snapshot.

    Attributes:
        tokens, kv_tokens: number of tokens of the job's context, and number of these tokens that
            have KV.
        stored_bytes, shared_bytes: size of all pages of the snapshot, and of its pages that other
            snapshots already had.
        name: name of the snapshot in the server's folder; None once the command has moved it to
            another path.
        capture_ms, durable_ms: time for which the job paused, and time until the snapshot was
            durable, milliseconds.
    """

    engine: int
    name: str | None
    job: str
    tokens: int
    kv_tokens: int
    pages: int
    stored_bytes: int
    shared_bytes: int
    exact: bool
    capture_ms: float
    durable_ms: float


@dataclass(frozen=True, slots=True)
class JobRestored(JsonObject):
    """The result of restoring a job on one engine.

    Attributes:
        cache_salt: the cache salt that the job's turns must send; None if none is needed.
        ms: duration of the restore, milliseconds.
    """

    engine: int
    job: str
    tokens: int
    kv_tokens: int
    pages: int
    cache_salt: str | None
    ms: float


@dataclass(frozen=True, slots=True)
class JobsRestored(JobRestored):
    """The answer to a request for a restore: the result of the first engine, and the results of the
    other engines."""

    others: tuple[JobRestored, ...] = ()


@dataclass(frozen=True, slots=True)
class JobForked(JsonObject):
    """The answer to a request for forks: the new jobs, and the pages that were saved for them."""

    engine: int
    jobs: tuple[str, ...]
    tokens: int
    kv_tokens: int
    cache_salt: str | None
    extra_pages: int
