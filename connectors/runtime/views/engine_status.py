"""Status of an engine: its tiers, pins, jobs, queues, counters and gauges.

Times on the scheduler's clock are converted to seconds since the epoch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from tiered_kv.connectors.runtime.dependencies import Dependencies
from tiered_kv.connectors.runtime.scheduler import SchedulerHalf
from tiered_kv.policies.base import GapClass
from tiered_kv.status import (
    Cpu,
    DecisionCount,
    Decisions,
    EngineStatus,
    JobCounts,
    LowerTier,
    Pins,
    Queues,
    Tiers,
    Transfers,
    Vram,
)


class Moments:
    """A simultaneous reading of both clocks, to convert times between them.

    Attributes:
        now: seconds on the scheduler's clock.
        wall: seconds since the epoch.
    """

    def __init__(self, deps: Dependencies) -> None:
        self.now, self.wall = deps.clock(), deps.wall()

    def since_epoch(self, at: float) -> float | None:
        """Convert a time of the scheduler's clock to seconds since the epoch, rounded to
        milliseconds; None if it is infinite."""
        return round(self.wall + at - self.now, 3) if math.isfinite(at) else None


def finite(seconds: float) -> float | None:
    """Return a number of seconds rounded to 0.1 ms; None for values that JSON cannot represent."""
    return round(seconds, 4) if math.isfinite(seconds) else None


MOST_ORDERS = 1_000
"""Maximum number of orders in flight that are counted by type, oldest first."""


def status(half: SchedulerHalf) -> EngineStatus:
    """Return the whole status. The time taken does not grow with pages, blocks, jobs or
    requests."""
    config, turns, admission, gaps = half.deps.config, half.turns, half.admission, half.gaps
    held = len(admission.gate.held)
    return EngineStatus(
        engine=half.facts.replica,
        now=round(half.deps.wall(), 3),
        steps=half.step,
        mode=_mode(half),
        policy=config.policy,
        eviction=config.eviction,
        admission=config.admission,
        tiers=Tiers(_vram(half), _cpu(half), tuple(_lower(half))),
        pins=Pins(len(admission.pins), admission.pins.held_blocks, admission.pins.budget),
        jobs=JobCounts(
            known=len(gaps.manager.jobs),
            begun=len(admission.gate.jobs),
            waiting=len(gaps.manager.open),
            held=held,
        ),
        queues=Queues(
            running=turns.running,
            queued=len(turns) - turns.running - held,
            held=held,
            orders_in_flight=half.pages.book.in_flight,
            prefetches=len(gaps.manager.prefetch),
        ),
        transfers=_transfers(half),
        decisions=_decisions(half),
        counters=half.stats.totals(),
        gauges=half.stats.gauges(),
    )


def _mode(half: SchedulerHalf) -> str:
    if half.deps.config.observes:
        return "observe"
    return "offload" if half.pages.index.num_slots else "vram"


def _vram(half: SchedulerHalf) -> Vram:
    facts = half.facts
    return Vram(
        blocks=facts.usable_blocks,
        free_blocks=half.pool.num_free(),
        cached_blocks=half.pool.num_cached(),
        pinned_blocks=half.admission.pins.held_blocks,
        block_tokens=facts.block_size,
        bytes=facts.usable_blocks * facts.slot_bytes * facts.ranks,
    )


def _cpu(half: SchedulerHalf) -> Cpu:
    index, slot_bytes = half.pages.index, half.facts.slot_bytes * half.facts.ranks
    pages = len(index)
    return Cpu(
        pages=pages,
        slots=index.num_slots,
        free_slots=index.free_slots,
        bytes=index.num_slots * slot_bytes,
        used_bytes=(index.num_slots - index.free_slots) * slot_bytes,
        compressed_pages=index.cold.compressed,
        compressed_slots=index.cold.num_slots,
        compressed_share=round(index.cold.compressed / pages, 4) if pages else 0.0,
    )


def _lower(half: SchedulerHalf) -> Iterator[LowerTier]:
    for tier, found in half.pages.tiers.totals().items():
        yield LowerTier(
            tier=tier,
            pages=found.pages,
            bytes=found.capacity_bytes,
            used_bytes=found.stored_bytes,
            promoting_pages=found.promoting,
            demoting_pages=found.demoting,
        )


def _transfers(half: SchedulerHalf) -> dict[str, Transfers]:
    """Return the number of orders in flight and of their pages, by type."""
    orders, pages = Counter[str](), Counter[str]()
    for flight in islice(half.pages.book.flights(), MOST_ORDERS):
        kind = flight.order.kind.status_name
        orders[kind] += 1
        pages[kind] += len(flight.keys)
    return {kind: Transfers(orders[kind], pages[kind]) for kind in orders}


def _decisions(half: SchedulerHalf) -> Decisions:
    """Return how many of the latest decisions were made for each class and tier."""
    decided = half.gaps.manager.decided
    since = decided.since
    return Decisions(
        last=len(decided),
        since=Moments(half.deps).since_epoch(since) if since is not None else None,
        counts=tuple(
            DecisionCount(gap_class_name(kind.gap_class), kind.tier.value, times)
            for kind, times in decided.counts()
        ),
    )


def gap_class_name(gap_class: GapClass | None) -> str | None:
    """Return the name of a gap class in replies; None if the policy has no classes."""
    return gap_class.value if gap_class is not None else None
