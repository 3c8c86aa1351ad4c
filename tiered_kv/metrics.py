"""Counters, gauges and histograms: pages, pins, jobs, decisions and failures.

The values in ``Counters`` never decrease. ``Counters.take`` returns the increments since its last
call, which are added to the engine's metrics. The names in this module are used in the code and in
``/tiered_kv/status``; ``metric_families`` has the names on ``/metrics``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from .tiers import TierId

GAP_CLASSES = ("fast", "slow", "uncertain", "unclassed")
"""Classes of gaps. ``unclassed`` is for policies without classes."""
DECIDED = ("pin", "cpu", "store", "drop")
"""Decisions of a policy: the tiers in which a turn's KV can be kept, and ``drop`` for none."""


HINT_INTENTS = ("retain", "pin", "prefetch", "demote", "release", "revise")
HINT_OUTCOMES = ("accepted", "clipped", "deferred", "rejected", "missing")


def hint_event(intent: str, outcome: str) -> str:
    """Return the counter name of hints with this intent and outcome."""
    return f"hints_{intent}_{outcome}"


def decision_event(tier: str, gap_class: str) -> str:
    """Return the counter name of decisions for this tier and gaps of this class."""
    return f"decided_{tier}_{gap_class}"


COUNTERS: Mapping[str, str] = {
    "prompt_tokens_vram": "Prompt tokens whose KV was found in VRAM.",
    "prompt_tokens_cpu": "Prompt tokens restored from CPU memory, including promoted ones.",
    "prompt_tokens_ssd": "Prompt tokens restored after a promotion from SSD.",
    "prompt_tokens_remote": "Prompt tokens restored after a read from the remote store.",
    "prompt_tokens_recomputed": "Prompt tokens whose KV had to be computed.",
    "turns": "Finished turns.",
    "pages_saved": "Pages saved from VRAM to CPU memory.",
    "pages_restored": "Pages restored from CPU memory to VRAM.",
    "bytes_saved": "Bytes saved, over all ranks.",
    "slot_bytes_unused": "Unused bytes in the CPU slots of saved pages.",
    "bytes_restored": "Bytes restored, over all ranks.",
    "save_seconds": "Seconds spent on saves, on the slowest rank.",
    "restore_seconds": "Seconds spent on restores, on the slowest rank.",
    "restores_sync": "Restores made before the forward pass.",
    "restores_async": "Restores made while the model runs.",
    "restores_in_pieces": "Restores split because CPU memory was full.",
    "pages_evicted": "Pages evicted from CPU memory.",
    "pages_compressed": "Pages compressed in CPU memory.",
    "pages_decompressed": "Restored pages that were compressed in CPU memory.",
    "bytes_compressed": "Bytes of these pages before they were compressed, over all ranks.",
    "bytes_decompressed": "Bytes of restored pages that were compressed, over all ranks.",
    "compression_seconds": "Seconds spent on compression, on the slowest rank.",
    "decompression_seconds": "Seconds spent on restoring compressed pages, on the slowest rank.",
    "compression_failures": "Pages lost because they could not be compressed.",
    "save_failures": "Pages whose copy to CPU memory failed.",
    "restore_failures": "Pages whose copy to VRAM failed; their tokens were recomputed.",
    "pages_not_saved": "Pages not saved because no slot was free.",
    "pages_demoted": "Pages written from CPU memory to SSD.",
    "pages_promoted": "Pages read from SSD into CPU memory.",
    "bytes_demoted": "Bytes of pages written to SSD, over all ranks, before compression.",
    "bytes_promoted": "Bytes of pages read from SSD, over all ranks, after decompression.",
    "demotion_seconds": "Seconds spent on writing pages to SSD, on the slowest rank.",
    "promotion_seconds": "Seconds spent on reading pages from SSD, on the slowest rank.",
    "pages_shared": "Pages written from CPU memory to the remote store.",
    "pages_fetched": "Pages read from the remote store into CPU memory.",
    "bytes_shared": "Bytes of pages written to the remote store, over all ranks, before "
    "compression.",
    "bytes_fetched": "Bytes of pages read from the remote store, over all ranks, after "
    "decompression.",
    "share_seconds": "Seconds spent on writing pages to the remote store, on the slowest rank.",
    "fetch_seconds": "Seconds spent on reading pages from the remote store, on the slowest rank.",
    "share_failures": "Pages that could not be written to the remote store.",
    "fetch_failures": "Pages that could not be read from the remote store, or were damaged.",
    "pages_not_shared": "Pages not written to the remote store because its queue was full.",
    "remote_bytes_written": "Bytes written to the remote store, over all ranks, as stored.",
    "remote_bytes_read": "Bytes read from the remote store, over all ranks, as stored.",
    "remote_pages_bad": "Values in the remote store that are not the requested page.",
    "remote_calls_failed": "Calls to the remote store that timed out or failed.",
    "remote_pages_refused": "Pages that the remote store rejected because it is full or read-only.",
    "remote_errors": "Internal errors of the remote tier.",
    "pages_promoted_ahead": "Pages whose promotion was ordered before their job returned.",
    "pages_promoted_used": "Promoted pages that were restored to VRAM.",
    "pages_promoted_wasted": "Promoted pages that were evicted before use.",
    "bytes_promoted_used": "Bytes of promoted pages that were restored to VRAM.",
    "bytes_promoted_wasted": "Bytes of promoted pages that were evicted before use.",
    "pages_superseded": "Pages that a later prompt of their job superseded.",
    "demotion_failures": "Pages that could not be written to SSD.",
    "promotion_failures": "Pages that could not be read from SSD, or were damaged.",
    "promotions_refused": "Promotions not made because recomputing is faster.",
    "lookups_overdue": "Turns that stopped waiting for a store's answer.",
    "promotions_overdue": "Turns that stopped waiting for their promotion.",
    "ssd_bytes_written": "Bytes written to SSD, over all ranks, as stored.",
    "ssd_bytes_read": "Bytes read from SSD, over all ranks, as stored.",
    "ssd_pages_bad": "Pages on SSD that failed a check and were dropped.",
    "ssd_segments_bad": "Segments on SSD that were unusable when their store was opened.",
    "ssd_pages_refused": "Pages not written to SSD because it failed or was full.",
    "ssd_pages_kept_compressed": "Compressed pages of CPU memory written to SSD unchanged.",
    "ssd_pages_recompressed": "Compressed pages of CPU memory that were recompressed for SSD.",
    "ssd_pages_reclaimed": "Pages deleted with their segment, over all ranks.",
    "ssd_errors": "Failed reads and writes of the SSD.",
    "pins": "Turns pinned in VRAM.",
    "pins_ended_returned": "Pins ended because the job's next turn arrived.",
    "pins_ended_expired": "Pins that expired.",
    "pins_ended_pressure": "Pins released for a request that needed the blocks more.",
    "pins_ended_revised": "Pins released because a tool call or a client revised the decision.",
    "pins_ended_given_up": "Pins released because their job is no longer expected.",
    "pins_ended_reset": "Pins released by a cache reset, the watchdog, or a failed hook.",
    "pins_ended_closed": "Pins released because the engine stopped.",
    "pins_refused": "Pins refused or reduced because the pin budget was exhausted.",
    "hints_ignored": "Invalid hints from clients.",
    **{
        hint_event(intent, outcome): f"Hints to {intent} KV that were {outcome}."
        for intent in HINT_INTENTS
        for outcome in HINT_OUTCOMES
    },
    "jobs_inferred": "Jobs inferred from requests without a job id.",
    "turns_unnamed": "Turns whose request named no job.",
    "ids_carried": "Turns whose ids the middleware read.",
    "snapshots_taken": "Snapshots created.",
    "snapshots_restored": "Snapshots restored.",
    "jobs_forked": "Jobs created as forks of others.",
    "kv_events": "KV events published for tiers outside VRAM.",
    "kv_event_pages_dropped": "Pages reported as removed because too many had been reported.",
    "answers_unread": "Answers whose tool calls were not read because the queue was full.",
    "tool_read_errors": "Tool calls that could not be read because the parser or tokenizer failed.",
    "concurrent_turns": "Turns that arrived during another turn of their job.",
    "jobs_held": "New jobs that were held back.",
    "watchdog_barks": "Times that the watchdog released all pins and held-back jobs.",
    "hook_errors": "Exceptions in hooks that were hidden from the engine.",
    "trace_dropped": "Turns and steps missing in the trace because its writer was slow or failed.",
    "resets": "Cache resets, and calls that may have changed weights. Both invalidate all pages.",
    "weight_updates": "Calls that may have changed weights.",
    **{
        decision_event(tier, gap_class): f"Gaps of class {gap_class} with decision {tier}."
        for gap_class in GAP_CLASSES
        for tier in DECIDED
    },
}

WOULD_HAVE_SAVED: Mapping[str, str] = {
    "would_have_saved_vram": "vram",
    "would_have_saved_cpu": "cpu",
    "would_have_saved_ssd": "ssd",
}
"""Counters of observe mode, each with its tier. They count computed prompt tokens that the
connector would have found in that tier. Reported as one metric family, by tier."""

GAUGES: Mapping[str, str] = {
    "cpu_pages": "Pages in CPU memory, including those being copied there.",
    "cpu_slots": "Page slots of the CPU tier.",
    "cpu_slots_compressed": "Page slots that hold compressed pages.",
    "cpu_pages_compressed": "Compressed pages in CPU memory.",
    "cpu_bytes": "Bytes of CPU slots in use, over all ranks.",
    "cpu_bytes_compressed": "Bytes of CPU slots that hold compressed pages, over all ranks.",
    "cpu_bytes_whole": "Bytes that the pages in CPU memory would occupy uncompressed.",
    "cpu_bytes_whole_compressed": "Uncompressed size of the compressed pages in CPU memory.",
    "cpu_bytes_most": "Size of the CPU tier, over all ranks.",
    "ssd_pages": "Pages on SSD.",
    "ssd_bytes": "Bytes that pages occupy on SSD, over all ranks.",
    "ssd_bytes_whole": "Bytes that the pages on SSD would occupy uncompressed, over all ranks.",
    "ssd_bytes_most": "Size of the SSD tier, over all ranks.",
    "pinned_blocks": "Pinned VRAM blocks.",
    "orders_in_flight": "Orders to workers that not every rank has reported as finished.",
    "jobs": "Known jobs.",
    "jobs_begun": "Admitted jobs that occupy KV space, or will in their next turn.",
    "jobs_waiting_for_room": "New jobs that are being held back.",
    "room_ratio": "Admission limit as a fraction of the KV pool; 1 without admission.",
}

HISTOGRAMS: Mapping[str, str] = {
    "gap_over_median": "Length of a gap divided by its median forecast.",
    "gap_over_p90": "Length of a gap divided by its 90th percentile forecast.",
    "hold_seconds": "Seconds that a job was held back, observed when its first turn ends.",
}

MOST_OBSERVED = 4096
"""Maximum number of observations kept per histogram, because ``take_observed`` is never called if
vLLM's statistics are off."""


class Counters:
    """One number for each name in ``COUNTERS``, and observations by the names in ``HISTOGRAMS``.
    Not thread-safe."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._fresh: dict[str, float] = {}
        self._observed: dict[str, deque[float]] = {}
        self._tiers: dict[TierId, TierCounters] = {}

    def start(self, names: Iterable[str]) -> None:
        """Add counters that are not in ``COUNTERS``, with the value 0. The next ``take`` returns
        their names with an increment of 0."""
        zeros = dict.fromkeys(names, 0)
        self.totals |= zeros
        self._fresh |= zeros

    def add(self, name: str, amount: float = 1) -> None:
        """Increment a counter. Raises KeyError for a name that is not in ``COUNTERS`` and was not
        passed to ``start``."""
        if amount:
            self.totals[name] += amount
            self._fresh[name] = self._fresh.get(name, 0) + amount

    def observe(self, name: str, value: float) -> None:
        """Record a value for a histogram. If the values are never taken, the oldest are dropped.
        Raises KeyError for a name that is not in ``HISTOGRAMS``."""
        if name not in HISTOGRAMS:
            raise KeyError(name)
        self._observed.setdefault(name, deque(maxlen=MOST_OBSERVED)).append(value)

    def of_tier(self, tier: TierId) -> TierCounters:
        """Return the counters of one tier. Their increments also count in these totals."""
        return self._tiers.setdefault(tier, TierCounters(self))

    def take(self) -> dict[str, float]:
        """Return the increments since the last call; empty if there were none."""
        fresh, self._fresh = self._fresh, {}
        return fresh

    def take_observed(self) -> dict[str, list[float]]:
        """Return the observations since the last call, by name."""
        observed, self._observed = self._observed, {}
        return {name: list(values) for name, values in observed.items()}


class TierCounters:
    """Counters of one tier below CPU memory. Increments also count in the totals of all tiers.

    Attributes:
        totals: totals of this tier, by name.
    """

    def __init__(self, counters: Counters) -> None:
        self.totals: dict[str, float] = {}
        self._counters = counters

    def add(self, name: str, amount: float = 1) -> None:
        """Increment a counter. Raises KeyError for a name that is not in ``COUNTERS``."""
        self._counters.add(name, amount)
        if amount:
            self.totals[name] = self.totals.get(name, 0) + amount
