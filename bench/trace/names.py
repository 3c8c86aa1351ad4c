"""Names under which ``/metrics`` and ``/tiered_kv/status`` have what is compared."""

from __future__ import annotations

from tiered_kv.doctor.running_server import events, totals

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

COUNTED = (
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
    "pins_ended_expired",
    "jobs_held",
    *FAULTS,
)
"""Counters of the connector, by the names that ``/tiered_kv/status`` has for them."""

GAUGED = ("cpu_pages", "ssd_pages", "pinned_blocks", "jobs")
"""Gauges of the connector, likewise."""

OF_VLLM = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "cached_tokens": "vllm:prompt_tokens_cached_total",
    "answer_tokens": "vllm:generation_tokens_total",
    "requests": "vllm:request_success_total",
    "preemptions": "vllm:num_preemptions_total",
}
"""Counters of vLLM's own."""


def read_metrics(text: str) -> dict[str, int]:
    """All of them in Prometheus' text, by name; 0 where there is none."""
    ours, all_of_it = events(text), totals(text)
    found = {name: ours.get(name, 0.0) for name in (*COUNTED, *GAUGED)}
    found |= {name: all_of_it.get(sample, 0.0) for name, sample in OF_VLLM.items()}
    return {name: round(value) for name, value in found.items()}
