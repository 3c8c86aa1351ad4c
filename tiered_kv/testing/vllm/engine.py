"""vLLM's configuration and scheduler for engines without a model or its weights.

vLLM and torch are imported when one is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CONNECTOR_MODULE = "tiered_kv.testing.vllm.connector"


@dataclass(frozen=True, slots=True)
class EngineSize:
    """Size of an engine: the facts of its machine.

    Attributes:
        blocks: of the VRAM pool, vLLM's null block included.
        kv_bytes: of a token; a multiple of 8.
        policy: vLLM's order of requests, ``fcfs`` or ``priority``.
        vocabulary: token ids.
        ahead: asynchronous scheduling.
    """

    blocks: int
    block_size: int
    kv_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    policy: str
    vocabulary: int = 1000
    ahead: bool = False


def engine_config(
    folder: Path,
    size: EngineSize,
    extra: Mapping[str, Any] | None,
    around: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Any:
    """A ``VllmConfig``.

    Args:
        folder: where the model's config.json is written.
        extra: the connector's settings, or None for stock vLLM.
        around: makes the engine's transfer configuration from the connector's, where that is not
            the only connector.
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
    cache = CacheConfig(block_size=size.block_size, enable_prefix_caching=True)
    cache.num_gpu_blocks = size.blocks
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True
        ),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=size.max_num_seqs,
            max_num_batched_tokens=size.max_batched_tokens,
            max_model_len=size.max_model_len,
            is_encoder_decoder=False,
            async_scheduling=False,
            policy=size.policy,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )
    config.cache_config.num_gpu_blocks = size.blocks
    config.scheduler_config.async_scheduling = size.ahead  # vLLM itself refuses it on CPUs
    return config


def kv_config(size: EngineSize) -> Any:
    """A ``KVCacheConfig`` of one layer that has all of a token's KV."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )

    head = min(128, size.kv_bytes // 4)  # K and V of two bytes each
    page = size.block_size * size.kv_bytes
    spec = FullAttentionSpec(
        block_size=size.block_size,
        num_kv_heads=size.kv_bytes // 4 // head,
        head_size=head,
        dtype=torch.bfloat16,
    )
    assert spec.page_size_bytes == page
    tensor = KVCacheTensor(
        size=page * size.blocks,
        layers=["layer.0"],
        layer_stride=page * size.blocks,
        block_stride=page,
        offset=0,
    )
    return KVCacheConfig(
        num_blocks=size.blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)],
    )


def make_scheduler(
    config: Any, kv_cache_config: Any, *, log_stats: bool, in_job_order: bool = False
) -> Any:
    """vLLM's scheduler, or ours over it; it makes its connector itself."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from tiered_kv.connectors.vllm.engine_scheduler import ContinuumScheduler

    structured = SimpleNamespace(
        accept_tokens=lambda *a, **k: True, should_advance=lambda *a, **k: False
    )
    block_size = config.cache_config.block_size
    stock = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    made: Any = ContinuumScheduler if in_job_order else stock
    return made(
        config,
        kv_cache_config,
        structured,
        block_size=block_size,
        hash_block_size=block_size,
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
    if not weights.exists():  # a test may have put others there
        weights.write_bytes(b"never loaded: they make the model one that can be recognised")
