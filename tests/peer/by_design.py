"""Tests of vLLM that pass on stock vLLM and, by design, fail with this project's classes: the
reason for each mode and test."""

from __future__ import annotations

from tests.peer.peer_plugin import CONNECTOR, SCHEDULER

DIFFUSION = "diffusion models are refused: vLLM has a scheduler of its own for them"
CACHING = "with prefix caching, which ours needs and is switched on for it, it fails on stock too"
FIRST_STEP = "an engine that has made no step has one to make: vLLM exports gauges with steps only"
LAST_SAVE = "the last save of a request holds one to three blocks until the worker reports it"

_SCHEDULER = "tests.v1.core.test_scheduler::"
_RELEASE = f"{_SCHEDULER}test_kv_cache_release_rejects_nonresident_memory"
_DEFERRED = "tests.v1.core.test_deferred_block_free::"
_SWA = "tests.v1.core.test_swa_inflight_window_free::"

BY_DESIGN: dict[str, dict[str, str]] = {
    SCHEDULER: {
        f"{_SCHEDULER}test_diffusion_scheduler_is_selected_by_default[False]": DIFFUSION,
        f"{_SCHEDULER}test_diffusion_scheduler_is_selected_by_default[True]": DIFFUSION,
    },
    CONNECTOR: {
        f"{_SCHEDULER}test_diffusion_scheduler_is_selected_by_default[False]": DIFFUSION,
        f"{_SCHEDULER}test_diffusion_scheduler_is_selected_by_default[True]": DIFFUSION,
        f"{_SCHEDULER}test_cross_attn_blocks_not_over_allocated": CACHING,
        f"{_SCHEDULER}test_cross_attn_blocks_not_under_allocated": CACHING,
        f"{_SCHEDULER}test_cross_attn_zero_blocks_without_encoder_inputs": CACHING,
        f"{_SCHEDULER}test_variable_length_cross_attn_block_allocation": CACHING,
        f"{_SCHEDULER}test_prefix_cache_stats_not_recorded_when_caching_disabled": CACHING,
        f"{_SCHEDULER}test_priority_scheduling_preemption": CACHING,
        f"{_SWA}test_chunked_local_free_waits_for_in_flight_step": CACHING,
        f"{_DEFERRED}test_finish_defers_free_until_inflight_step_done": LAST_SAVE,
        f"{_DEFERRED}test_finish_frees_immediately_when_no_inflight_step": LAST_SAVE,
        f"{_DEFERRED}test_gate_disabled_without_connector": LAST_SAVE,
        f"{_DEFERRED}test_max_tokens_finish_frees_immediately_with_other_inflight": LAST_SAVE,
        f"{_DEFERRED}test_multiple_deferred_frees_drain_in_order": LAST_SAVE,
        f"{_SCHEDULER}test_memory_leak": LAST_SAVE,
        f"{_RELEASE}[full-sleep]": FIRST_STEP,
        f"{_RELEASE}[weights-only]": FIRST_STEP,
        f"{_RELEASE}[kv-only-or-repeated-release]": FIRST_STEP,
        f"{_SCHEDULER}test_prefix_cache_stats_counted_once_for_retried_then_scheduled_request": (
            "it reads the metadata of vLLM's own mock connector"
        ),
        f"{_SCHEDULER}test_reset_connector_cache_no_connector_is_no_op_success": (
            "it is about an engine without a connector"
        ),
    },
}
