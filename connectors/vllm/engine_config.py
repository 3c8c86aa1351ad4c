"""Reads the engine's configuration, and checks it for unsupported features."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from tiered_kv.connectors.runtime.base import EngineFacts, EngineLimits
from tiered_kv.errors import UnsupportedError
from tiered_kv.page_group import KvKind, PageGroup
from tiered_kv.sizing.block_layout import advise_block_size
from tiered_kv.vllm_versions import NEWEST_TESTED, OLDEST, SPECULATED_STATES, parse_version

from .kv_groups import read_groups, why_not_offloadable

logger = logging.getLogger(__name__)


def check_version(version: str) -> None:
    """Refuse a vLLM version that lacks required hooks. Warns once about an untested version.

    Raises:
        UnsupportedError: the version is older than 0.30.
    """
    found = parse_version(version)
    if found is None:
        logger.warning("vLLM version %r cannot be parsed, so compatibility is not checked", version)
        return
    if found < OLDEST:
        raise UnsupportedError(
            f"vLLM {version} is too old for TieredContinuumConnector: install vLLM 0.30 or newer."
        )
    if found > NEWEST_TESTED and version not in warned_versions:
        warned_versions.add(version)
        logger.warning(
            "TieredContinuumConnector is tested with vLLM 0.30 to 0.33; this is %s", version
        )


warned_versions: set[str] = set()
"""Versions about which a warning was logged in this process."""


def refuse_unsupported(vllm_config: Any) -> None:
    """Refuse configurations with which vLLM or the connector would give wrong results, or would not
    work.

    Raises:
        UnsupportedError: the message says what to change.
    """
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    if (
        parallel.decode_context_parallel_size > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        raise UnsupportedError(
            "TieredContinuumConnector does not support context parallelism: "
            "remove --decode-context-parallel-size and --prefill-context-parallel-size."
        )
    if getattr(vllm_config.model_config, "is_encoder_decoder", False):
        raise UnsupportedError(
            "TieredContinuumConnector does not support encoder-decoder models, because vLLM "
            "passes no cross-attention KV to connectors: remove --kv-transfer-config."
        )
    if is_diffusion(vllm_config):
        raise UnsupportedError(
            "TieredContinuumConnector does not support diffusion models, because they change "
            "tokens of full blocks: remove --kv-transfer-config."
        )
    if transfer.kv_role != "kv_both":
        raise UnsupportedError(
            "TieredContinuumConnector both saves and loads KV, which "
            f'"kv_role":"{transfer.kv_role}" does not allow: set "kv_role":"kv_both".'
        )
    if getattr(transfer, "kv_load_failure_policy", "fail") != "recompute":
        raise UnsupportedError(
            "by default vLLM fails a request if a page cannot be restored: add "
            '"kv_load_failure_policy":"recompute" to --kv-transfer-config.'
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        raise UnsupportedError(
            "TieredContinuumConnector needs prefix caching: remove --no-enable-prefix-caching. "
            "For some models vLLM turns prefix caching off: serve them without this connector."
        )


def report_speculation(vllm_config: Any) -> None:
    """Log what speculative decoding costs with this connector, and warn of vLLM's defect with
    recurrent states."""
    drafter = vllm_config.speculative_config
    if drafter is None:
        return
    if getattr(vllm_config.cache_config, "mamba_cache_mode", "none") != "none":
        logger.warning(
            "this model keeps states, and speculative decoding is on. %s", SPECULATED_STATES
        )
    if not hasattr(vllm_config, "num_hash_lookahead_tokens"):
        return  # before 0.33 vLLM drops the block without a connector too
    if drafter.use_eagle_block_drop() and not drafter.disable_lookahead_block_hashes:
        logger.info(
            "with EAGLE or MTP and any KV connector, vLLM does not reuse the last block of a "
            "prefix in VRAM; the block is restored from CPU memory, or recomputed"
        )


def report_block_size(facts: EngineFacts) -> None:
    """Log the advice to use longer blocks, if they would suit the engine's contexts better."""
    for group in facts.groups[:1]:
        if group.reach.kind is KvKind.FULL:
            advice = advise_block_size(group.block_size, facts.limits.context_tokens)
            if advice is not None:
                logger.info(advice)


def is_diffusion(vllm_config: Any) -> bool:
    """True if the model is a diffusion model, whose tokens may still change after they were
    computed. vLLM has a separate scheduler for such models."""
    declared = getattr(vllm_config, "diffusion_config", None) is not None
    return declared or bool(getattr(vllm_config.model_config, "is_diffusion", False))


def read_engine(vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
    """Convert vLLM's configuration. Both halves get the same result, except for the tokens per
    block hash, which only vLLM's KV cache manager knows (``with_hash_units``)."""
    groups: tuple[PageGroup, ...] = ()
    if why_not_offloadable(vllm_config, kv_cache_config) is None:
        groups = read_groups(vllm_config, kv_cache_config)
    block_size = groups[0].block_size if groups else vllm_config.cache_config.block_size
    # With pipeline parallelism several batches are in flight, as with asynchronous scheduling.
    pipelines = vllm_config.parallel_config.pipeline_parallel_size > 1
    ahead = bool(vllm_config.scheduler_config.async_scheduling) or pipelines
    # vLLM rewinds a request whose sync restore failed only if no later step was scheduled yet, and
    # only in its older model runner (vllm-project/vllm#49250). Otherwise the request would continue
    # with wrong KV. With recurrent states, a sync restore comes too late; with several groups, it
    # must not fail.
    plain = len(groups) == 1 and groups[0].reach.kind is KvKind.FULL
    # Since 0.33, vLLM drops external hits that end within a block if it is configured to return the
    # experts that each token used.
    returned = getattr(vllm_config, "aux_output_config", None)
    return EngineFacts(
        ranks=vllm_config.parallel_config.world_size,
        block_size=block_size,
        hash_tokens=block_size,
        hit_tokens=block_size,
        num_blocks=kv_cache_config.num_blocks,
        placeholders=1,  # the null block
        publishes_events=publishes_events(vllm_config),
        groups=groups,
        replica=vllm_config.parallel_config.data_parallel_index,
        ahead=ahead,
        speculates=vllm_config.speculative_config is not None,
        whole_blocks=returned is not None and returned.enabled,
        sync_restores=plain and not (ahead or vllm_config.use_v2_model_runner),
        model=str(getattr(vllm_config.model_config, "model", "")),
        limits=_limits(vllm_config),
    )


def publishes_events(vllm_config: Any) -> bool:
    """Return True if vLLM publishes KV events."""
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def _limits(vllm_config: Any) -> EngineLimits:
    scheduler = vllm_config.scheduler_config
    named = scheduler.scheduler_cls or ""  # a class, or its path
    name = named if isinstance(named, str) else named.__name__
    ours = name.rpartition(".")[2] == "ContinuumScheduler"
    return EngineLimits(
        step_tokens=int(scheduler.max_num_batched_tokens),
        running=int(scheduler.max_num_seqs),
        context_tokens=int(vllm_config.model_config.max_model_len),
        job_order=ours and scheduler.policy == "fcfs",
        priorities=scheduler.policy == "priority",
    )


def with_hash_units(facts: EngineFacts, kv_cache_manager: Any) -> EngineFacts:
    """Return the facts with the tokens per block hash, and the granularity of prefix hits, that
    vLLM's KV cache manager uses."""
    first = kv_cache_manager.coordinator.single_type_managers[0]
    hash_tokens = int(kv_cache_manager.block_pool.hash_block_size)
    hit_tokens = getattr(first, "cache_hit_alignment_tokens", first.scheduler_block_size)
    return replace(facts, hash_tokens=hash_tokens, hit_tokens=int(hit_tokens))
