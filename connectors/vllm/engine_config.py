"""The engine's configuration, read once and checked for unsupported features."""

from __future__ import annotations

import logging
import re
from typing import Any

from tiered_kv.codecs.base import ElementType
from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.errors import UnsupportedError
from tiered_kv.layout import Placement, page_layout
from tiered_kv.page_group import PageGroup

logger = logging.getLogger(__name__)

OLDEST = (0, 30)
NEWEST_TESTED = (0, 32)


def check_version(version: str) -> None:
    """Refuse a vLLM that lacks required hooks; warn once about an untested one.

    Raises:
        UnsupportedError: older than 0.30.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        logger.warning("vLLM %r has no version we can read; going on untested", version)
        return
    found = (int(match[1]), int(match[2]))
    if found < OLDEST:
        raise UnsupportedError(
            f"vLLM {version} is too old for TieredContinuumConnector: install vLLM 0.30 or newer."
        )
    if found > NEWEST_TESTED and version not in warned_versions:
        warned_versions.add(version)
        logger.warning(
            "TieredContinuumConnector is tested with vLLM 0.30 to 0.32; this is %s", version
        )


warned_versions: set[str] = set()
"""Versions that were warned of in this process."""


def refuse_unsupported(vllm_config: Any) -> None:
    """Refuse configurations that would give wrong or no results.

    Raises:
        UnsupportedError: the message tells what to change.
    """
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedError(
            "TieredContinuumConnector does not support pipeline parallelism: "
            "use --tensor-parallel-size instead of --pipeline-parallel-size."
        )
    if (
        parallel.decode_context_parallel_size > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        raise UnsupportedError(
            "TieredContinuumConnector does not support context parallelism: "
            "remove --decode-context-parallel-size and --prefill-context-parallel-size."
        )
    if vllm_config.speculative_config is not None:
        raise UnsupportedError(
            "TieredContinuumConnector does not support speculative decoding: "
            "remove --speculative-config."
        )
    if is_diffusion(vllm_config):
        raise UnsupportedError(
            "TieredContinuumConnector does not support diffusion models, which change the tokens "
            "of blocks that are full: leave --kv-transfer-config out."
        )
    if transfer.kv_role != "kv_both":
        raise UnsupportedError(
            f'kv_role "{transfer.kv_role}" makes no sense for a cache: write "kv_role":"kv_both".'
        )
    if getattr(transfer, "kv_load_failure_policy", "fail") != "recompute":
        raise UnsupportedError(
            "a page that cannot be restored must be recomputed, not fail its request: "
            'add "kv_load_failure_policy":"recompute" to --kv-transfer-config.'
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        raise UnsupportedError(
            "TieredContinuumConnector needs prefix caching: remove --no-enable-prefix-caching. "
            "vLLM turns it off for some models; serve those without this connector."
        )


def is_diffusion(vllm_config: Any) -> bool:
    """True if tokens may still change once they are computed. vLLM has a separate scheduler for
    such models."""
    declared = getattr(vllm_config, "diffusion_config", None) is not None
    return declared or bool(getattr(vllm_config.model_config, "is_diffusion", False))


def read_engine(vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
    """Turn vLLM's configuration into ours. Both halves get the same answer."""
    groups: tuple[PageGroup, ...] = ()
    if why_not_offloadable(vllm_config, kv_cache_config) is None:
        placements = [
            Placement(len(t.layers), t.layer_stride, t.block_stride, t.offset)
            for t in kv_cache_config.kv_cache_tensors
        ]
        group = PageGroup(
            index=0,
            block_size=vllm_config.cache_config.block_size,
            layout=page_layout(placements, kv_cache_config.num_blocks),
            element=_element(vllm_config),
            arrangement=_arrangement(vllm_config, kv_cache_config),
        )
        groups = (group,)
    ahead = bool(vllm_config.scheduler_config.async_scheduling)
    # vLLM rewinds a request whose sync restore failed only where no later step was scheduled yet,
    # and only for its older model runner (vllm-project/vllm#49250); elsewhere it would go on with
    # wrong KV.
    return EngineFacts(
        ranks=vllm_config.parallel_config.world_size,
        block_size=vllm_config.cache_config.block_size,
        num_blocks=kv_cache_config.num_blocks,
        placeholders=1,  # the null block
        groups=groups,
        replica=vllm_config.parallel_config.data_parallel_index,
        ahead=ahead,
        sync_restores=not (ahead or vllm_config.use_v2_model_runner),
    )


def _arrangement(vllm_config: Any, kv_cache_config: Any) -> str:
    """Describe vLLM's KV layout, and what its choice of an attention backend depends on."""
    import vllm
    from vllm.platforms import current_platform

    layout = getattr(kv_cache_config, "kv_cache_layout", None)
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    try:
        device = f"{current_platform.device_type} {current_platform.get_device_capability()}"
    except Exception:  # platforms differ in what they can say
        device = str(current_platform.device_type)
    version = ".".join(vllm.__version__.split(".")[:2])
    return f"{layout} {backend} {device} vllm-{version}"


def _element(vllm_config: Any) -> ElementType:
    """Element type of the KV cache; opaque if unknown."""
    stored = str(vllm_config.cache_config.cache_dtype)
    if stored == "auto":
        stored = str(vllm_config.model_config.dtype).removeprefix("torch.")
    return {
        "bfloat16": ElementType.BF16,
        "float16": ElementType.FP16,
        "half": ElementType.FP16,
        "fp8": ElementType.FP8_E4M3,
        "fp8_e4m3": ElementType.FP8_E4M3,
        "fp8_e5m2": ElementType.FP8_E5M2,
    }.get(stored, ElementType.OPAQUE)


def why_not_offloadable(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Reason why this model's pages cannot be copied to CPU memory; None if they can."""
    from vllm.v1.kv_cache_interface import is_full_attention_spec

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"it has {len(groups)} KV cache groups, and only a single one can be offloaded yet"
    spec = groups[0].kv_cache_spec
    if not is_full_attention_spec(spec):
        return f"its {type(spec).__name__} is not full attention"
    if spec.block_size != vllm_config.cache_config.block_size:
        return "its blocks and its block hashes differ in size"
    if any(t.host_resident for t in kv_cache_config.kv_cache_tensors):
        return "its KV cache already lies in host memory"
    return None
