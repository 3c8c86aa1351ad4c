"""Counters and gauges of the scheduler half, as the engine is told them."""

from __future__ import annotations

from tiered_kv.metrics import Counters

from .base import BlockPool
from .build import AdmissionGroup, GapGroup, Pages
from .dependencies import Dependencies
from .live_turns import LiveTurns


class Stats:
    """Gathers what the components count. One thread."""

    def __init__(
        self,
        given: Dependencies,
        counters: Counters,
        pages: Pages,
        admission: AdmissionGroup,
        gaps: GapGroup,
    ) -> None:
        self._tools = given.tools
        self._counters = counters
        self._pages = pages
        self._admission = admission
        self._gaps = gaps
        self._gauges_told = False

    def take(self) -> dict[str, int]:
        """Counters added since the last call, with the gauges; empty if nothing happened. The
        first time, the gauges at least."""
        for name, total in self._kept().items():
            self._counters.add(name, total - self._counters.totals[name])
        fresh = self._counters.take()
        if fresh or not self._gauges_told:
            self._gauges_told = True
            fresh |= self.gauges()
        return fresh

    def of_stuck(self, turns: LiveTurns, pool: BlockPool) -> dict[str, int]:
        """State of an engine that does nothing although requests wait."""
        waiting = turns.by_id.values()
        return {
            "requests": len(turns),
            "new": sum(turn.hold.new for turn in waiting),
            "loading": sum(turn.loading for turn in waiting),
            "awaiting pages": sum(bool(turn.tiers.awaits) for turn in waiting),
            "pinned blocks": self._admission.pins.held_blocks,
            "free blocks": pool.num_free(),
            "orders in flight": self._pages.book.in_flight,
            "active jobs": self._admission.gate.num_active,
        }

    def totals(self) -> dict[str, int]:
        """Every counter, since the start."""
        return self._counters.totals | self._kept()

    def _kept(self) -> dict[str, int]:
        """Counters that the components keep themselves, since the start."""
        gate = self._admission.gate
        return {
            "pages_evicted": self._pages.index.evictions,
            "pages_promoted_used": self._pages.index.promoted.used,
            "pages_promoted_wasted": self._pages.index.promoted.wasted,
            "pages_not_saved": self._pages.book.unsaved,
            "trace_dropped": self._gaps.log.dropped,
            "jobs_held": gate.refused,
            "answers_unread": self._tools.dropped,
            "tool_read_errors": self._tools.errors,
        }

    def gauges(self) -> dict[str, int]:
        """Gauges, as they are now."""
        index, gate = self._pages.index, self._admission.gate
        return {
            "cpu_pages": len(index),
            "cpu_slots": index.num_slots,
            "cpu_pages_compressed": len(index.cold),
            "cpu_slots_compressed": index.cold.num_slots,
            **self._pages.tiers.gauges(),
            "pinned_blocks": self._admission.pins.held_blocks,
            "orders_in_flight": self._pages.book.in_flight,
            "jobs": len(self._gaps.manager.jobs),
            "jobs_begun": gate.num_active,
            "room_percent": round(100 * gate.share),
        }
