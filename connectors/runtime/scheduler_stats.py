"""Counters and gauges of the scheduler half, as reported to the engine."""

from __future__ import annotations

from typing import Any

from tiered_kv.metrics import Counters

from .base import BlockPool
from .build import GapGroup
from .dependencies import Dependencies
from .parts import AdmissionGroup, Pages
from .turn import LiveTurns


class Stats:
    """Collects the counters of all components. Used on one thread."""

    def __init__(
        self,
        deps: Dependencies,
        counters: Counters,
        pages: Pages,
        admission: AdmissionGroup,
        gaps: GapGroup,
    ) -> None:
        self._tools = deps.tools
        self._facts = deps.facts
        self._counters = counters
        self._pages = pages
        self._admission = admission
        self._gaps = gaps
        self._gauges_told = False

    def take(self) -> dict[str, Any]:
        """Return counter increments and observed values since the last call, with the gauges; empty
        if nothing changed. The first call always returns the gauges."""
        for name, total in self._kept().items():
            self._counters.add(name, total - self._counters.totals[name])
        fresh: dict[str, Any] = self._counters.take() | self._counters.take_observed()
        if fresh or not self._gauges_told:
            self._gauges_told = True
            fresh |= self.gauges()
        return fresh

    def of_stuck(self, turns: LiveTurns, pool: BlockPool) -> dict[str, int]:
        """Return counts that describe, for the log, an engine that makes no progress although
        requests wait."""
        waiting = turns.by_id.values()
        return {
            "requests": len(turns),
            "new": sum(turn.hold.new for turn in waiting),
            "loading": sum(turn.loading for turn in waiting),
            "awaiting pages": sum(bool(turn.tiers.awaits) for turn in waiting),
            "pinned blocks": self._admission.pins.held_blocks,
            "free blocks": pool.num_free(),
            "orders in flight": self._pages.book.in_flight,
            "active jobs": len(self._admission.gate.jobs),
        }

    def totals(self) -> dict[str, float]:
        """Return the values of all counters since the start."""
        return self._counters.totals | self._kept()

    def _kept(self) -> dict[str, float]:
        """Return the totals of the counters that the components themselves keep."""
        gate, promoted, ranks = self._admission.gate, self._pages.index.promoted, self._facts.ranks
        return {
            "pages_evicted": self._pages.index.evictions,
            "pages_promoted_used": promoted.used,
            "pages_promoted_wasted": promoted.wasted,
            "bytes_promoted_used": promoted.used_bytes * ranks,
            "bytes_promoted_wasted": promoted.wasted_bytes * ranks,
            "pages_not_saved": self._pages.book.unsaved,
            "trace_dropped": self._gaps.log.dropped,
            "jobs_held": gate.refused,
            "answers_unread": self._tools.dropped,
            "tool_read_errors": self._tools.errors,
        }

    def gauges(self) -> dict[str, float]:
        """Return the current values of the gauges."""
        index, gate = self._pages.index, self._admission.gate
        slot_bytes = self._facts.slot_bytes * self._facts.ranks
        cold, used = index.cold.compressed, index.num_slots - index.free_slots
        # A page that is being compressed still occupies a whole slot.
        cold_slots = max(0, index.cold.num_slots - index.cold.being_compressed)
        return {
            "cpu_pages": len(index),
            "cpu_pages_compressed": cold,
            "cpu_slots": index.num_slots,
            "cpu_slots_compressed": index.cold.num_slots,
            "cpu_bytes": used * slot_bytes,
            "cpu_bytes_compressed": cold_slots * slot_bytes,
            "cpu_bytes_whole": (used - cold_slots + cold) * slot_bytes,
            "cpu_bytes_whole_compressed": cold * slot_bytes,
            "cpu_bytes_most": index.num_slots * slot_bytes,
            **self._pages.tiers.gauges(),
            "pinned_blocks": self._admission.pins.held_blocks,
            "orders_in_flight": self._pages.book.in_flight,
            "jobs": len(self._gaps.manager.jobs),
            "jobs_begun": len(gate.jobs),
            "jobs_waiting_for_room": len(gate.held),
            "room_ratio": gate.overcommit.share,
        }
