"""Names under which ``/metrics`` has what is compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Metric:
    """Samples on ``/metrics`` that are summed up.

    Attributes:
        sample: their name.
        labels: labels that they have, among others.
    """

    sample: str
    labels: Mapping[str, str] = field(default_factory=dict)


COUNTED = {
    name: Metric(f"vllm:tiered_kv_{name}_total")
    for name in (
        "turns",
        "prompt_tokens_vram",
        "prompt_tokens_cpu",
        "prompt_tokens_ssd",
        "prompt_tokens_recomputed",
        "pages_restored",
        "pages_evicted",
        "pages_promoted",
        "pages_promoted_used",
        "pages_demoted",
        "pins",
        "pins_expired",
        "jobs_held",
        "save_failures",
        "restore_failures",
        "demotion_failures",
        "promotion_failures",
        "compression_failures",
        "ssd_errors",
        "hook_errors",
        "trace_dropped",
    )
}
"""Counters of the connector by the names that ``/tiered_kv/status`` has for them."""

GAUGED = {
    name: Metric(f"vllm:tiered_kv_{name}")
    for name in ("cpu_pages", "ssd_pages", "pinned_blocks", "jobs")
}
"""Gauges of the connector, likewise."""

OF_VLLM = {
    "prompt_tokens": Metric("vllm:prompt_tokens_total"),
    "cached_tokens": Metric("vllm:prompt_tokens_cached_total"),
    "answer_tokens": Metric("vllm:generation_tokens_total"),
    "requests": Metric("vllm:request_success_total"),
    "preemptions": Metric("vllm:num_preemptions_total"),
}
"""Counters of vLLM's own."""

FAULTS = (
    "save_failures",
    "restore_failures",
    "demotion_failures",
    "promotion_failures",
    "compression_failures",
    "ssd_errors",
    "hook_errors",
    "trace_dropped",
)
"""Counters that stay 0 where nothing goes wrong."""


def read_metrics(text: str) -> dict[str, int]:
    """All of them in Prometheus' text, by name; 0 where there is none."""
    wanted = {**COUNTED, **GAUGED, **OF_VLLM}
    found = dict.fromkeys(wanted, 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for name, metric in wanted.items():
                if sample.name == metric.sample and metric.labels.items() <= sample.labels.items():
                    found[name] += sample.value
    return {name: round(value) for name, value in found.items()}
