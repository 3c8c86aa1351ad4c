"""vLLM's configuration and scheduler for engines without a model.

vLLM and torch are imported when an engine is created.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tiered_kv.page_group import KvKind
from tiered_kv.testing.checked_kv import CELL, VOCABULARY

from .groups import GroupPages, GroupSpec, group_pages

CONNECTOR_MODULE = "tiered_kv.testing.vllm.connector"


@dataclass(frozen=True, slots=True)
class EngineSize:
    """Size and settings of an engine.

    Attributes:
        blocks: blocks of the VRAM pool, including vLLM's null block.
        block_size: tokens per block of the only group, which has full attention, if ``groups`` is
            empty.
        kv_bytes: KV bytes per token, a multiple of 8. With several groups, per token in the group
            with the largest blocks.
        policy: vLLM's order of requests, ``fcfs`` or ``priority``.
        vocabulary: number of token ids.
        ahead: True for asynchronous scheduling.
        groups: KV type of each page group; empty for a single group with full attention.
        retention: vLLM's ``prefix_cache_retention_interval``: distance in tokens between windows
            and states that can be found again. 0 keeps only the windows and states at the ends of
            prompts, None keeps all.
        match_unit: vLLM's ``prefix_match_unit``: tokens per block hash; None uses a common divisor
            of all block sizes.
        long_prefill: vLLM's ``long_prefill_token_threshold``.
        prefix_caching: vLLM's ``enable_prefix_caching``.
    """

    blocks: int = 64
    block_size: int = 16
    kv_bytes: int = CELL
    max_model_len: int = 512
    max_num_seqs: int = 64
    max_batched_tokens: int = 256
    policy: str = "fcfs"
    vocabulary: int = VOCABULARY
    ahead: bool = False
    groups: tuple[GroupSpec, ...] = ()
    retention: int | None = 0
    match_unit: int | None = None
    long_prefill: int = 0
    prefix_caching: bool = True

    def pages(self) -> tuple[GroupPages, ...]:
        """Return the page geometry of each group."""
        specs = self.groups or (GroupSpec(block_size=self.block_size),)
        return group_pages(specs, self.kv_bytes)


def engine_config(
    folder: Path,
    size: EngineSize,
    extra: Mapping[str, Any] | None,
    around: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Any:
    """Return a ``VllmConfig``.

    Args:
        folder: folder for the model's config.json.
        size: size and settings of the engine.
        extra: the connector's settings; None for stock vLLM.
        around: builds the engine's transfer configuration from the connector's, if the engine has
            other connectors too; None if it has no others.
    """
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    _write_model(folder, size)
    transfer = None
    if extra is not None:
        ours: dict[str, Any] = {
            "kv_connector": "TieredContinuumConnector",
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": dict(extra),
        }
        transfer = KVTransferConfig(**(around(ours) if around is not None else ours))
    cache = CacheConfig(
        block_size=min(pages.spec.block_size for pages in size.pages()),
        enable_prefix_caching=size.prefix_caching,
        prefix_cache_retention_interval=size.retention,
        prefix_match_unit=size.match_unit,
    )
    cache.num_gpu_blocks = size.blocks
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True
        ),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=size.max_num_seqs,
            max_num_batched_tokens=size.max_batched_tokens,
            long_prefill_token_threshold=size.long_prefill,
            max_model_len=size.max_model_len,
            is_encoder_decoder=False,
            async_scheduling=False,
            policy=size.policy,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )
    config.cache_config.num_gpu_blocks = size.blocks
    if any(pages.spec.kind is KvKind.STATE for pages in size.pages()):
        config.cache_config.mamba_cache_mode = (
            "align"  # vLLM reads this from the model, which does not specify it
        )
    config.scheduler_config.async_scheduling = (
        size.ahead
    )  # set late, because vLLM refuses the setting on CPUs
    return config


def kv_config(size: EngineSize) -> Any:
    """Return a ``KVCacheConfig`` with one layer per group. The layer contains a token's whole KV,
    or the whole state.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    groups = size.pages()
    return KVCacheConfig(
        num_blocks=size.blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=pages.page_bytes * size.blocks,
                layers=[pages.layer],
                layer_stride=pages.page_bytes * size.blocks,
                block_stride=pages.page_bytes,
                offset=0,
            )
            for pages in groups
        ],
        kv_cache_groups=[KVCacheGroupSpec([one.layer], one.vllm_spec()) for one in groups],
        prefix_cache_retention_interval=size.retention,
    )


def resolve_block_sizes(config: Any, kv_cache_config: Any) -> tuple[int, int]:
    """Return the tokens per scheduler block and per block hash, as vLLM's engine computes them. For
    vLLM 0.32 and later, also stores the block hash size and the cache hit alignment in
    ``kv_cache_config``, as the engine does.
    """
    from vllm.v1.core import kv_cache_utils

    sizes = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, config)
    scheduled, hashed = sizes
    if hasattr(kv_cache_utils, "resolve_cache_hit_alignment_tokens"):  # since vLLM 0.32
        kv_cache_config.hash_block_size = hashed
        kv_cache_config.cache_hit_alignment_tokens = (
            kv_cache_utils.resolve_cache_hit_alignment_tokens(
                kv_cache_config, config, scheduled, hashed
            )
        )
    return scheduled, hashed


def make_scheduler(
    config: Any, kv_cache_config: Any, *, log_stats: bool, in_job_order: bool = False
) -> Any:
    """Create the configured scheduler, which creates the connector.

    Args:
        in_job_order: True to create ``ContinuumScheduler`` instead.
    """
    from tiered_kv.connectors.vllm.engine_scheduler import ContinuumScheduler

    structured = SimpleNamespace(
        accept_tokens=lambda *a, **k: True, should_advance=lambda *a, **k: False
    )
    block_size, hash_block_size = resolve_block_sizes(config, kv_cache_config)
    named = config.scheduler_config.get_scheduler_cls()
    made: Any = ContinuumScheduler if in_job_order else named
    return made(
        config,
        kv_cache_config,
        structured,
        block_size=block_size,
        hash_block_size=hash_block_size,
        log_stats=log_stats,
    )


def _write_model(folder: Path, size: EngineSize) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": size.max_model_len,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    if not weights.exists():  # a test may have replaced the weights
        weights.write_bytes(b"never loaded: they make the model one that can be recognised")
