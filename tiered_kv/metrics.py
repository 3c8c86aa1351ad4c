"""Counters and gauges of pages, pins, jobs and hints.

A ``Counters`` only counts up; ``take`` returns the increments since the last call, which the
engine's metrics are updated with.
"""

from __future__ import annotations

from collections.abc import Mapping

from .tiers import TierId

COUNTERS: Mapping[str, str] = {
    "prompt_tokens_vram": "Prompt tokens whose KV was found in VRAM.",
    "prompt_tokens_cpu": "Prompt tokens whose KV was restored from CPU memory, from SSD or not.",
    "prompt_tokens_ssd": "Prompt tokens restored from CPU memory that came up from SSD before.",
    "prompt_tokens_recomputed": "Prompt tokens whose KV had to be computed.",
    "turns": "Turns finished.",
    "pages_saved": "Pages saved from VRAM to CPU memory.",
    "pages_restored": "Pages restored from CPU memory to VRAM.",
    "bytes_saved": "Bytes saved, over all ranks.",
    "slot_bytes_unused": "Bytes of CPU slots that saved pages left unused, over all ranks.",
    "bytes_restored": "Bytes restored, over all ranks.",
    "restores_sync": "Restores made before the forward pass.",
    "restores_async": "Restores made beside the forward passes.",
    "restores_in_pieces": "Those of contexts that CPU memory had no room for at once.",
    "pages_evicted": "Pages evicted from CPU memory.",
    "pages_compressed": "Pages of CPU memory that were compressed.",
    "pages_decompressed": "Of the pages restored, those that were compressed.",
    "compression_ms": "Milliseconds that compressing took, on the slowest rank.",
    "decompression_ms": "Milliseconds that restores of compressed pages took, on the slowest rank.",
    "compression_failures": "Pages lost because they could not be compressed.",
    "save_failures": "Pages whose copy to CPU memory failed.",
    "restore_failures": "Pages whose copy to VRAM failed; their tokens were recomputed.",
    "pages_not_saved": "Pages not saved because no slot was free.",
    "pages_demoted": "Pages written from CPU memory to SSD.",
    "pages_promoted": "Pages read from SSD into CPU memory.",
    "pages_promoted_ahead": "Of the pages read from SSD, those ordered before their job came back.",
    "pages_promoted_used": "Of the pages read from SSD, those that were then restored to VRAM.",
    "pages_promoted_wasted": "Of the pages read from SSD, those evicted before they were restored.",
    "demotion_failures": "Pages that could not be written to SSD.",
    "promotion_failures": "Pages that could not be read from SSD, or were bad there.",
    "promotions_refused": "Promotions not made because computing is faster.",
    "lookups_overdue": "Turns that no longer waited for a store's answer.",
    "promotions_overdue": "Turns that no longer waited for their promotion.",
    "ssd_bytes_written": "Bytes written to SSD, over all ranks, as stored.",
    "ssd_bytes_read": "Bytes read from SSD, over all ranks, as stored.",
    "ssd_pages_bad": "Pages on SSD that failed a check and were dropped.",
    "ssd_segments_bad": "Segments on SSD that could not be used when their store was opened.",
    "ssd_pages_refused": "Pages not written to SSD: it failed, or had no room.",
    "ssd_pages_reclaimed": "Pages that died with their segment, over all ranks.",
    "ssd_errors": "Reads and writes of the SSD that failed.",
    "pins": "Turns pinned in VRAM.",
    "pins_handed_over": "Pins taken over by the job's next turn.",
    "pins_expired": "Pins whose time ran out.",
    "pins_released": "Pins given up early: blocks were needed, the tool call that was read did not "
    "warrant one, its job was over, or the cache was reset.",
    "pins_refused": "Pins not made, or made smaller, for want of budget.",
    "hints_ignored": "Values from clients that could not be used.",
    "jobs_inferred": "Jobs begun by requests whose client named none.",
    "answers_unread": "Answers whose tool calls were not read, as too many were waiting.",
    "tool_read_errors": "Failures while tool calls were read: of a parser, or of the tokenizer.",
    "concurrent_turns": "Turns that arrived while another of their job was running.",
    "jobs_held": "New jobs that had to wait for room.",
    "watchdog_barks": "Times that nothing was computed for long and all that is held was given up.",
    "hook_errors": "Exceptions kept from the engine; each is logged once.",
    "trace_dropped": "Turns missing in the trace because its writer was behind or failing.",
    "resets": "Cache resets; each starts a new generation of pages.",
}

WOULD_HAVE_SAVED: Mapping[str, str] = {
    "would_have_saved_vram": "vram",
    "would_have_saved_cpu": "cpu",
    "would_have_saved_ssd": "ssd",
}
"""Counters of an engine that is only observed, and their tiers: prompt tokens that were computed
and that the connector would have found there. Told as one family, by tier."""

GAUGES: Mapping[str, str] = {
    "cpu_pages": "Pages in CPU memory or on their way there.",
    "cpu_slots": "Page slots of the CPU tier.",
    "cpu_pages_compressed": "Of the pages in CPU memory, those that are kept compressed.",
    "cpu_slots_compressed": "Of the page slots, those that hold compressed pages.",
    "ssd_pages": "Pages on SSD.",
    "ssd_bytes": "Bytes that pages take on SSD, over all ranks.",
    "pinned_blocks": "VRAM blocks under a pin.",
    "orders_in_flight": "Orders not yet reported by every rank.",
    "jobs": "Jobs remembered.",
    "jobs_begun": "Jobs that have begun and take room, or will again.",
    "room_percent": "Share of the KV pool that new jobs are let in for; 100 without admission.",
}


class Counters:
    """One number for each name in ``COUNTERS``. Not thread-safe."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._fresh: dict[str, int] = {}
        self._tiers: dict[TierId, TierCounters] = {}

    def add(self, name: str, amount: int = 1) -> None:
        """Count up. Raises KeyError for a name that is not in ``COUNTERS``."""
        if amount:
            self.totals[name] += amount
            self._fresh[name] = self._fresh.get(name, 0) + amount

    def of_tier(self, tier: TierId) -> TierCounters:
        """Counters of one tier; they count here too."""
        return self._tiers.setdefault(tier, TierCounters(self))

    def take(self) -> dict[str, int]:
        """Return the increments since the last call; empty if there were none."""
        fresh, self._fresh = self._fresh, {}
        return fresh


class TierCounters:
    """Counters of one tier below CPU memory, which count for all tiers together as well.

    Attributes:
        totals: totals of this tier, by name.
    """

    def __init__(self, counters: Counters) -> None:
        self.totals: dict[str, int] = {}
        self._counters = counters

    def add(self, name: str, amount: int = 1) -> None:
        """Count up. Raises KeyError for a name that is not in ``COUNTERS``."""
        self._counters.add(name, amount)
        if amount:
            self.totals[name] = self.totals.get(name, 0) + amount
