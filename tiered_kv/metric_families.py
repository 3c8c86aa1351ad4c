"""Prometheus metrics: families, their labels, and the counter or gauge that each series reports.

An event or measurement is a counter or gauge of the module ``metrics``. Label values are few and
fixed. The series of a counter never overlap, so they can be summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from .metrics import (
    COUNTERS,
    DECIDED,
    GAP_CLASSES,
    GAUGES,
    HINT_INTENTS,
    HINT_OUTCOMES,
    HISTOGRAMS,
    WOULD_HAVE_SAVED,
    decision_event,
    hint_event,
)

PREFIX = "vllm:tiered_kv_"
"""Prefix of every metric name. vLLM unregisters all metrics whose names contain ``vllm``."""


class MetricType(Enum):
    """Type of a metric, as written in its ``# TYPE`` line."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """All series with the same metric name.

    Attributes:
        name: name without ``PREFIX``, and without the ``_total`` of counters.
        kind: type of the metric.
        text: help text of the metric.
        buckets: upper bounds of a histogram's buckets.
    """

    name: str
    kind: MetricType
    text: str
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """Name of the metric on ``/metrics``."""
        return f"{PREFIX}{self.name}{'_total' if self.kind is MetricType.COUNTER else ''}"

    @property
    def labels(self) -> Mapping[str, tuple[str, ...]]:
        """Labels other than the engine's, with the values of each."""
        return _LABELS.get(self.name, {})


class Series(NamedTuple):
    """One series of a family, identified by its label values."""

    family: str
    labels: Mapping[str, str]


WAIT_BUCKETS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
RATIO_BUCKETS = (0.05, 0.1, 0.2, 0.5, 0.8, 1.0, 1.25, 2.0, 5.0, 10.0, 20.0)
"""Upper bounds of the buckets of histograms of ratios. The fraction of ratios up to 1 shows how
often the forecast was long enough."""

_C, _G, _H = MetricType.COUNTER, MetricType.GAUGE, MetricType.HISTOGRAM

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("prompt_tokens", _C, "Prompt tokens, by where their KV was found."),
        Family(
            "would_have_saved_tokens",
            _C,
            "Computed prompt tokens that would have been found. Only in observe mode.",
        ),
        Family("turns", _C, "Finished turns."),
        Family("transferred_pages", _C, "Pages moved from one tier to another."),
        Family("transferred_bytes", _C, "Bytes of these pages, uncompressed."),
        Family(
            "transfer_seconds",
            _C,
            "Seconds spent on moving pages, on the slowest rank.",
        ),
        Family("decompressed_pages", _C, COUNTERS["pages_decompressed"]),
        Family("decompressed_bytes", _C, COUNTERS["bytes_decompressed"]),
        Family("decompression_seconds", _C, COUNTERS["decompression_seconds"]),
        Family("ssd_io_bytes", _C, "Bytes of SSD I/O, as stored."),
        Family(
            "remote_io_bytes",
            _C,
            "Bytes exchanged with the remote store, as stored.",
        ),
        Family("unshared_pages", _C, COUNTERS["pages_not_shared"]),
        Family(
            "ssd_compressed_pages",
            _C,
            "Compressed pages written to SSD unchanged (kept) or recompressed (renewed), on each "
            "rank.",
        ),
        Family("unused_slot_bytes", _C, COUNTERS["slot_bytes_unused"]),
        Family(
            "restores", _C, "Restores before a forward pass (sync) or while the model runs (async)."
        ),
        Family(
            "restores_in_pieces",
            _C,
            COUNTERS["restores_in_pieces"],
        ),
        Family(
            "evicted_pages",
            _C,
            "Pages evicted to make space. SSD evictions are counted on each rank.",
        ),
        Family("superseded_pages", _C, COUNTERS["pages_superseded"]),
        Family("unsaved_pages", _C, COUNTERS["pages_not_saved"]),
        Family(
            "promoted_pages",
            _C,
            "Promoted pages that were restored to VRAM (used) or evicted unused (wasted).",
        ),
        Family("promoted_bytes", _C, "Bytes of these pages, uncompressed."),
        Family("promoted_ahead_pages", _C, COUNTERS["pages_promoted_ahead"]),
        Family(
            "promotions_forgone",
            _C,
            "Promotions skipped, and turns that stopped waiting for a lookup or a promotion.",
        ),
        Family(
            "faults", _C, "Failures. Kinds that concern pages count pages; others count events."
        ),
        Family("pins", _C, COUNTERS["pins"]),
        Family("pins_ended", _C, "Ended pins, by reason."),
        Family("pins_refused", _C, COUNTERS["pins_refused"]),
        Family("decisions", _C, "Gaps, by class and by the tier chosen for their KV."),
        Family(
            "hints",
            _C,
            "KV hints. A deferred hint is counted again with its final outcome.",
        ),
        Family("hints_ignored", _C, COUNTERS["hints_ignored"]),
        Family("jobs_inferred", _C, COUNTERS["jobs_inferred"]),
        Family("turns_unnamed", _C, COUNTERS["turns_unnamed"]),
        Family("ids_carried", _C, COUNTERS["ids_carried"]),
        Family("snapshots_taken", _C, COUNTERS["snapshots_taken"]),
        Family("snapshots_restored", _C, COUNTERS["snapshots_restored"]),
        Family("jobs_forked", _C, COUNTERS["jobs_forked"]),
        Family("kv_events", _C, COUNTERS["kv_events"]),
        Family("kv_event_dropped_pages", _C, COUNTERS["kv_event_pages_dropped"]),
        Family("answers_unread", _C, COUNTERS["answers_unread"]),
        Family("concurrent_turns", _C, COUNTERS["concurrent_turns"]),
        Family("holds", _C, COUNTERS["jobs_held"]),
        Family("resets", _C, COUNTERS["resets"]),
        Family("weight_updates", _C, COUNTERS["weight_updates"]),
        Family("tier_pages", _G, "Pages in a tier."),
        Family("tier_bytes", _G, "Bytes that these pages occupy."),
        Family("tier_uncompressed_bytes", _G, "Bytes that these pages would occupy uncompressed."),
        Family("tier_capacity_bytes", _G, "Capacity of a tier."),
        Family("cpu_slots", _G, GAUGES["cpu_slots"]),
        Family("cpu_slots_compressed", _G, GAUGES["cpu_slots_compressed"]),
        Family("pinned_blocks", _G, GAUGES["pinned_blocks"]),
        Family("orders_in_flight", _G, GAUGES["orders_in_flight"]),
        Family("known_jobs", _G, GAUGES["jobs"]),
        Family("begun_jobs", _G, GAUGES["jobs_begun"]),
        Family("held_jobs", _G, GAUGES["jobs_waiting_for_room"]),
        Family("room_ratio", _G, GAUGES["room_ratio"]),
        Family(
            "forecast_error_ratio",
            _H,
            "Length of an ended gap divided by its forecast.",
            RATIO_BUCKETS,
        ),
        Family("hold_seconds", _H, HISTOGRAMS["hold_seconds"], WAIT_BUCKETS),
    )
}


def _moved(pages: str, nbytes: str, seconds: str, source: str, target: str) -> dict[str, Series]:
    labels = {"source": source, "target": target}
    return {
        pages: Series("transferred_pages", labels),
        nbytes: Series("transferred_bytes", labels),
        seconds: Series("transfer_seconds", labels),
    }


def _plain(*names: str) -> dict[str, Series]:
    return {name: Series(name, {}) for name in names}


def _by(family: str, label: str, events: Mapping[str, str]) -> dict[str, Series]:
    return {event: Series(family, {label: value}) for event, value in events.items()}


_TIER_OF_DECISION = dict(zip(DECIDED, ("vram", "cpu", "ssd", "none"), strict=True))

SERIES: Mapping[str, Series] = {
    **_by(
        "prompt_tokens",
        "source",
        {
            "prompt_tokens_vram": "vram",
            "prompt_tokens_cpu": "cpu",
            "prompt_tokens_ssd": "ssd",
            "prompt_tokens_remote": "remote",
            "prompt_tokens_recomputed": "computed",
        },
    ),
    **_by("would_have_saved_tokens", "tier", WOULD_HAVE_SAVED),
    **_moved("pages_saved", "bytes_saved", "save_seconds", "vram", "cpu"),
    **_moved("pages_restored", "bytes_restored", "restore_seconds", "cpu", "vram"),
    **_moved(
        "pages_compressed", "bytes_compressed", "compression_seconds", "cpu", "cpu_compressed"
    ),
    **_moved("pages_demoted", "bytes_demoted", "demotion_seconds", "cpu", "ssd"),
    **_moved("pages_promoted", "bytes_promoted", "promotion_seconds", "ssd", "cpu"),
    **_moved("pages_shared", "bytes_shared", "share_seconds", "cpu", "remote"),
    **_moved("pages_fetched", "bytes_fetched", "fetch_seconds", "remote", "cpu"),
    **_by(
        "remote_io_bytes",
        "operation",
        {"remote_bytes_written": "write", "remote_bytes_read": "read"},
    ),
    **_by("ssd_io_bytes", "operation", {"ssd_bytes_written": "write", "ssd_bytes_read": "read"}),
    **_by(
        "ssd_compressed_pages",
        "compression",
        {"ssd_pages_kept_compressed": "kept", "ssd_pages_recompressed": "renewed"},
    ),
    **_by("restores", "mode", {"restores_sync": "sync", "restores_async": "async"}),
    **_by("evicted_pages", "tier", {"pages_evicted": "cpu", "ssd_pages_reclaimed": "ssd"}),
    **_by(
        "promoted_pages", "use", {"pages_promoted_used": "used", "pages_promoted_wasted": "wasted"}
    ),
    **_by(
        "promoted_bytes", "use", {"bytes_promoted_used": "used", "bytes_promoted_wasted": "wasted"}
    ),
    **_by(
        "promotions_forgone",
        "reason",
        {
            "promotions_refused": "computing_is_faster",
            "lookups_overdue": "no_answer",
            "promotions_overdue": "overdue",
        },
    ),
    **_by(
        "faults",
        "kind",
        {
            "save_failures": "save",
            "restore_failures": "restore",
            "compression_failures": "compression",
            "demotion_failures": "demotion",
            "promotion_failures": "promotion",
            "share_failures": "share",
            "fetch_failures": "fetch",
            "remote_pages_bad": "remote_page",
            "remote_calls_failed": "remote_call",
            "remote_pages_refused": "remote_refused",
            "remote_errors": "remote",
            "ssd_pages_bad": "ssd_page",
            "ssd_segments_bad": "ssd_segment",
            "ssd_errors": "ssd_io",
            "ssd_pages_refused": "ssd_refused",
            "hook_errors": "hook",
            "watchdog_barks": "watchdog",
            "tool_read_errors": "tool_call",
            "trace_dropped": "trace",
        },
    ),
    **{
        event: Series("pins_ended", {"end": event.removeprefix("pins_ended_")})
        for event in COUNTERS
        if event.startswith("pins_ended_")
    },
    **{
        decision_event(tier, gap_class): Series(
            "decisions", {"gap_class": gap_class, "tier": _TIER_OF_DECISION[tier]}
        )
        for gap_class in GAP_CLASSES
        for tier in DECIDED
    },
    **{
        hint_event(intent, outcome): Series("hints", {"intent": intent, "outcome": outcome})
        for intent in HINT_INTENTS
        for outcome in HINT_OUTCOMES
    },
    **_plain("turns", "restores_in_pieces", "pins", "pins_refused", "hints_ignored"),
    **_plain("snapshots_taken", "snapshots_restored", "jobs_forked"),
    **_plain("turns_unnamed", "ids_carried"),
    **_plain("jobs_inferred", "answers_unread", "concurrent_turns", "resets"),
    **_plain("weight_updates", "kv_events"),
    "kv_event_pages_dropped": Series("kv_event_dropped_pages", {}),
    "pages_decompressed": Series("decompressed_pages", {}),
    "bytes_decompressed": Series("decompressed_bytes", {}),
    "decompression_seconds": Series("decompression_seconds", {}),
    "slot_bytes_unused": Series("unused_slot_bytes", {}),
    "pages_superseded": Series("superseded_pages", {}),
    "pages_not_saved": Series("unsaved_pages", {}),
    "pages_not_shared": Series("unshared_pages", {}),
    "pages_promoted_ahead": Series("promoted_ahead_pages", {}),
    "jobs_held": Series("holds", {}),
    **_by(
        "tier_pages",
        "tier",
        {"cpu_pages": "cpu", "cpu_pages_compressed": "cpu_compressed", "ssd_pages": "ssd"},
    ),
    **_by(
        "tier_bytes",
        "tier",
        {"cpu_bytes": "cpu", "cpu_bytes_compressed": "cpu_compressed", "ssd_bytes": "ssd"},
    ),
    **_by(
        "tier_uncompressed_bytes",
        "tier",
        {
            "cpu_bytes_whole": "cpu",
            "cpu_bytes_whole_compressed": "cpu_compressed",
            "ssd_bytes_whole": "ssd",
        },
    ),
    **_by("tier_capacity_bytes", "tier", {"cpu_bytes_most": "cpu", "ssd_bytes_most": "ssd"}),
    **_plain("cpu_slots", "cpu_slots_compressed", "pinned_blocks", "orders_in_flight"),
    **_plain("room_ratio", "hold_seconds"),
    "jobs": Series("known_jobs", {}),
    "jobs_begun": Series("begun_jobs", {}),
    "jobs_waiting_for_room": Series("held_jobs", {}),
    **_by("forecast_error_ratio", "forecast", {"gap_over_median": "median", "gap_over_p90": "p90"}),
}
"""The series that reports each counter, gauge or histogram of the module ``metrics``, by the name
in that module."""

PART_OF: Mapping[str, str] = {
    "prompt_tokens_ssd": "prompt_tokens_cpu",
    "prompt_tokens_remote": "prompt_tokens_cpu",
    "cpu_pages_compressed": "cpu_pages",
    "cpu_bytes_compressed": "cpu_bytes",
    "cpu_bytes_whole_compressed": "cpu_bytes_whole",
}
"""Counters and gauges whose value is included in another counter or gauge, by name, with the name
of the other. Both are always reported together."""


def _labels_of_families() -> dict[str, dict[str, tuple[str, ...]]]:
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for series in SERIES.values():
        labels = found.setdefault(series.family, {})
        for label, value in series.labels.items():
            if value not in (before := labels.get(label, ())):
                labels[label] = (*before, value)
    return found


_LABELS = _labels_of_families()
_EVENT_OF = {
    (FAMILIES[one.family].full_name, frozenset(one.labels.items())): event
    for event, one in SERIES.items()
    if event not in HISTOGRAMS
}


def event_of(name: str, labels: Mapping[str, str]) -> str | None:
    """Return the name of the counter or gauge that a sample on ``/metrics`` reports, as in the
    module ``metrics``; None if the sample belongs to another program or to a histogram.

    Args:
        name: name of the sample.
        labels: labels of the sample, including the engine's label.
    """
    family = FAMILIES.get(name.removeprefix(PREFIX).removesuffix("_total"))
    if family is None:
        return None
    own = frozenset((label, labels[label]) for label in family.labels if label in labels)
    return _EVENT_OF.get((name, own))
