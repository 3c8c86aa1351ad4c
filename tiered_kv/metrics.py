"""Events that are counted, and what is measured: pages, pins, jobs, decisions and failures.

A ``Counters`` only counts up; ``take`` returns the increments since the last call, which the
engine's metrics are updated with. Names here are those of the code and of ``/tiered_kv/status``;
``metric_families`` has the names on ``/metrics``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from .tiers import TierId

GAP_CLASSES = ("fast", "slow", "uncertain", "unclassed")
"""Classes of gaps; the last one is of policies that know none."""
DECIDED = ("pin", "cpu", "store", "drop")
"""Places where a turn's KV is to wait, as policies decide."""


def decision_event(tier: str, gap_class: str) -> str:
    """Name of the event that a gap of this class was decided so."""
    return f"decided_{tier}_{gap_class}"


COUNTERS: Mapping[str, str] = {
    "prompt_tokens_vram": "Prompt tokens whose KV was found in VRAM.",
    "prompt_tokens_cpu": "Prompt tokens whose KV was restored from CPU memory, from below or not.",
    "prompt_tokens_ssd": "Prompt tokens restored from CPU memory that came up from SSD before.",
    "prompt_tokens_remote": "Prompt tokens restored from CPU memory that came from the remote "
    "store before.",
    "prompt_tokens_recomputed": "Prompt tokens whose KV had to be computed.",
    "turns": "Finished turns.",
    "pages_saved": "Pages saved from VRAM to CPU memory.",
    "pages_restored": "Pages restored from CPU memory to VRAM.",
    "bytes_saved": "Bytes saved, over all ranks.",
    "slot_bytes_unused": "Unused bytes in the CPU slots of saved pages, over all ranks.",
    "bytes_restored": "Bytes restored, over all ranks.",
    "save_seconds": "Seconds that saves took, on the slowest rank.",
    "restore_seconds": "Seconds that restores took, on the slowest rank.",
    "restores_sync": "Restores made before the forward pass.",
    "restores_async": "Restores made beside the forward passes.",
    "restores_in_pieces": "Those of contexts that CPU memory had no room for at once.",
    "pages_evicted": "Pages evicted from CPU memory.",
    "pages_compressed": "Pages of CPU memory that were compressed.",
    "pages_decompressed": "Restored pages that were compressed in CPU memory.",
    "bytes_compressed": "Bytes of these pages before they were compressed, over all ranks.",
    "bytes_decompressed": "Bytes of restored pages that were compressed, over all ranks.",
    "compression_seconds": "Seconds that compressing took, on the slowest rank.",
    "decompression_seconds": "Seconds spent on restoring compressed pages, on the slowest rank.",
    "compression_failures": "Pages lost because they could not be compressed.",
    "save_failures": "Pages whose copy to CPU memory failed.",
    "restore_failures": "Pages whose copy to VRAM failed; their tokens were recomputed.",
    "pages_not_saved": "Pages not saved because no slot was free.",
    "pages_demoted": "Pages written from CPU memory to SSD.",
    "pages_promoted": "Pages read from SSD into CPU memory.",
    "bytes_demoted": "Bytes of pages written to SSD, over all ranks, before compression.",
    "bytes_promoted": "Bytes of pages read from SSD, over all ranks, once decompressed.",
    "demotion_seconds": "Seconds that writing pages to SSD took, on the slowest rank.",
    "promotion_seconds": "Seconds that reading pages from SSD took, on the slowest rank.",
    "pages_shared": "Pages written from CPU memory to the remote store.",
    "pages_fetched": "Pages read from the remote store into CPU memory.",
    "bytes_shared": "Bytes of pages written to the remote store, over all ranks, before "
    "compression.",
    "bytes_fetched": "Bytes of pages read from the remote store, over all ranks, once "
    "decompressed.",
    "share_seconds": "Seconds that writing pages to the remote store took, on the slowest rank.",
    "fetch_seconds": "Seconds that reading pages from it took, on the slowest rank.",
    "share_failures": "Pages that could not be written to the remote store.",
    "fetch_failures": "Pages that could not be read from the remote store, or were bad there.",
    "pages_not_shared": "Pages not written to the remote store because its queue was full.",
    "remote_bytes_written": "Bytes written to the remote store, over all ranks, as stored.",
    "remote_bytes_read": "Bytes read from the remote store, over all ranks, as stored.",
    "remote_pages_bad": "Values in the remote store that were not the page asked for.",
    "remote_calls_failed": "Calls of the remote store that were late, or that it did not answer.",
    "remote_pages_refused": "Pages that the remote store did not take: it is full or read-only.",
    "remote_errors": "Failures of the remote tier itself.",
    "pages_promoted_ahead": "Pages whose promotion from SSD was ordered before their job returned.",
    "pages_promoted_used": "Of the pages read from SSD, those that were then restored to VRAM.",
    "pages_promoted_wasted": "Of the pages read from SSD, those evicted before they were restored.",
    "bytes_promoted_used": "Bytes of pages read from SSD that were then restored to VRAM.",
    "bytes_promoted_wasted": "Bytes of pages read from SSD that were evicted before that.",
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
    "ssd_pages_kept_compressed": "Pages written to SSD as CPU memory had compressed them.",
    "ssd_pages_recompressed": "Pages that CPU memory had compressed otherwise than SSD does, and "
    "that were compressed once more.",
    "ssd_pages_reclaimed": "Pages that died with their segment, over all ranks.",
    "ssd_errors": "Reads and writes of the SSD that failed.",
    "pins": "Turns pinned in VRAM.",
    "pins_ended_returned": "Pins that the job's next turn took over.",
    "pins_ended_expired": "Pins whose time ran out.",
    "pins_ended_pressure": "Pins given up for a request that needed the blocks more.",
    "pins_ended_revised": "Pins given up as the tool call that was read did not warrant them.",
    "pins_ended_given_up": "Pins given up as their job is not waited for any longer.",
    "pins_ended_reset": "Pins given up with all others: a cache reset, the watchdog, a failure.",
    "pins_ended_closed": "Pins given up as the engine ended.",
    "pins_refused": "Pins refused or reduced because the pin budget was exhausted.",
    "hints_ignored": "Invalid hints from clients.",
    "jobs_inferred": "Jobs inferred from requests without a job id.",
    "snapshots_taken": "Snapshots created.",
    "snapshots_restored": "Snapshots restored.",
    "jobs_forked": "Jobs created as forks of others.",
    "answers_unread": "Answers whose tool calls were not read because the queue was full.",
    "tool_read_errors": "Failures while tool calls were read: of a parser, or of the tokenizer.",
    "concurrent_turns": "Turns that arrived while another turn of their job was running.",
    "jobs_held": "New jobs that were held back.",
    "watchdog_barks": "Times that nothing was computed for long and all that is held was given up.",
    "hook_errors": "Exceptions kept from the engine; each is logged once.",
    "trace_dropped": "Turns and steps missing in the trace: its writer was behind or failing.",
    "resets": "New page generations: after cache resets and calls that may have changed weights.",
    "weight_updates": "Calls to the engine that may have changed its weights.",
    **{
        decision_event(
            tier, gap_class
        ): f"Gaps of class {gap_class} whose KV was to wait in {tier}."
        for gap_class in GAP_CLASSES
        for tier in DECIDED
    },
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
    "cpu_slots_compressed": "Page slots that hold compressed pages.",
    "cpu_pages_compressed": "Of the pages in CPU memory, those that are kept compressed.",
    "cpu_bytes": "Bytes of CPU slots in use, over all ranks.",
    "cpu_bytes_compressed": "Of these bytes, those of slots that hold compressed pages.",
    "cpu_bytes_whole": "Bytes that the pages in CPU memory would take uncompressed.",
    "cpu_bytes_whole_compressed": "Of these bytes, those of the pages that are kept compressed.",
    "cpu_bytes_most": "Size of the CPU tier, over all ranks.",
    "ssd_pages": "Pages on SSD.",
    "ssd_bytes": "Bytes that pages take on SSD, over all ranks.",
    "ssd_bytes_whole": "Bytes that the pages on SSD would take uncompressed, over all ranks.",
    "ssd_bytes_most": "Size of the SSD tier, over all ranks.",
    "pinned_blocks": "Pinned VRAM blocks.",
    "orders_in_flight": "Orders not yet reported by every rank.",
    "jobs": "Known jobs.",
    "jobs_begun": "Admitted jobs that occupy KV space, or will again.",
    "jobs_waiting_for_room": "New jobs that are being held back.",
    "room_ratio": "Admission limit as a fraction of the KV pool; 1 without admission.",
}

HISTOGRAMS: Mapping[str, str] = {
    "gap_over_median": "Length of a gap over the median that was forecast for it.",
    "gap_over_p90": "Length of a gap over the 90th percentile that was forecast for it.",
    "hold_seconds": "Seconds that a new job was held back, observed when its first turn ends.",
}

MOST_OBSERVED = 4096
"""Observations that are kept until they are taken: an engine without statistics takes none."""


class Counters:
    """One number for each name in ``COUNTERS``, and observations by the names in ``HISTOGRAMS``.
    Not thread-safe."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._fresh: dict[str, float] = {}
        self._observed: dict[str, deque[float]] = {}
        self._tiers: dict[TierId, TierCounters] = {}

    def start(self, names: Iterable[str]) -> None:
        """Count further names, from 0, which the next ``take`` returns."""
        zeros = dict.fromkeys(names, 0)
        self.totals |= zeros
        self._fresh |= zeros

    def add(self, name: str, amount: float = 1) -> None:
        """Count up. Raises KeyError for a name that is not in ``COUNTERS`` and was not started."""
        if amount:
            self.totals[name] += amount
            self._fresh[name] = self._fresh.get(name, 0) + amount

    def observe(self, name: str, value: float) -> None:
        """Note a value for a histogram; the oldest are forgotten if nobody takes them. Raises
        KeyError for a name that is not in ``HISTOGRAMS``."""
        if name not in HISTOGRAMS:
            raise KeyError(name)
        self._observed.setdefault(name, deque(maxlen=MOST_OBSERVED)).append(value)

    def of_tier(self, tier: TierId) -> TierCounters:
        """Counters of one tier; they count here too."""
        return self._tiers.setdefault(tier, TierCounters(self))

    def take(self) -> dict[str, float]:
        """Return the increments since the last call; empty if there were none."""
        fresh, self._fresh = self._fresh, {}
        return fresh

    def take_observed(self) -> dict[str, list[float]]:
        """Return what was observed since the last call, by name; empty if nothing was."""
        observed, self._observed = self._observed, {}
        return {name: list(values) for name, values in observed.items()}


class TierCounters:
    """Counters of one tier below CPU memory, which count for all tiers together as well.

    Attributes:
        totals: totals of this tier, by name.
    """

    def __init__(self, counters: Counters) -> None:
        self.totals: dict[str, float] = {}
        self._counters = counters

    def add(self, name: str, amount: float = 1) -> None:
        """Count up. Raises KeyError for a name that is not in ``COUNTERS``."""
        self._counters.add(name, amount)
        if amount:
            self.totals[name] = self.totals.get(name, 0) + amount
