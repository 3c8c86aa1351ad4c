"""Converts vLLM's KV cache groups to page groups."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from math import prod
from types import ModuleType
from typing import Any

from tiered_kv.codecs.base import ElementType, Section
from tiered_kv.page_group import KvKind, KvReach, PageGroup, Placement, page_layout

NO_LAYER_BYTES = 512
"""Page size of a group for which a rank has no layer, bytes. Nothing reads the group's blocks on
that rank."""
_ELEMENTS = {
    "bfloat16": ElementType.BF16,
    "float16": ElementType.FP16,
    "half": ElementType.FP16,
    "fp8": ElementType.FP8_E4M3,
    "fp8_e4m3": ElementType.FP8_E4M3,
    "fp8_e5m2": ElementType.FP8_E5M2,
}
_STATE_ELEMENTS = {**_ELEMENTS, "float32": ElementType.FP32}
"""Element types of recurrent states by vLLM's names. Only states may be float32: attention KV in
float32 is treated as opaque."""


def planning() -> ModuleType:
    """Return the module in which vLLM groups layers: ``kv_cache_planning`` since 0.33,
    ``kv_cache_utils`` before."""
    try:
        return importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ModuleNotFoundError:
        return importlib.import_module("vllm.v1.core.kv_cache_utils")


def read_groups(vllm_config: Any, kv_cache_config: Any) -> tuple[PageGroup, ...]:
    """Return the groups that take part in prefix caching, full attention first.

    Requires that ``why_not_offloadable`` returns None.
    """
    found = [
        _group(vllm_config, kv_cache_config, index) for index in cacheable_groups(kv_cache_config)
    ]
    return tuple(sorted(found, key=lambda group: group.reach.kind is not KvKind.FULL))


def cacheable_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """Return the indices of the groups whose blocks can be found by hash."""
    groups = kv_cache_config.kv_cache_groups
    every = tuple(range(len(groups)))
    return tuple(getattr(kv_cache_config, "prefix_cacheable_group_ids", every))


def _group(vllm_config: Any, kv_cache_config: Any, index: int) -> PageGroup:
    group = kv_cache_config.kv_cache_groups[index]
    only, spec = len(kv_cache_config.kv_cache_groups) == 1, group.kv_cache_spec
    reach = read_reach(spec)
    assert isinstance(reach, KvReach)
    tensors = [
        one
        for one in kv_cache_config.kv_cache_tensors
        if only or one.layers[0] in group.layer_names
    ]
    placements = [
        Placement(
            len(t.layers),
            t.layer_stride,
            t.block_stride,
            t.offset,
            _used_bytes(spec, t, kv_cache_config.num_blocks, only=only),
        )
        for t in tensors
    ]
    if not placements:  # a pipeline rank without such layers
        some = kv_cache_config.kv_cache_tensors[0]
        whole = kv_cache_config.num_blocks * some.block_stride
        placements = [Placement(1, whole, some.block_stride, 0, NO_LAYER_BYTES)]
    sections = [section for t in tensors for _ in t.layers for section in _state_sections(spec)]
    return PageGroup(
        index=index,
        block_size=spec.block_size,
        layout=page_layout(placements, kv_cache_config.num_blocks),
        element=_element(vllm_config),
        sections=tuple(sections),
        reach=reach,
        draft_tokens=0
        if reach.kind is KvKind.STATE  # drafters have no recurrent states
        else _draft_tokens(vllm_config, kv_cache_config, index),
        arrangement=_arrangement(vllm_config, kv_cache_config),
    )


def _state_sections(spec: Any) -> Iterator[Section]:
    """Yield the parts of a layer's recurrent state, whose dtypes may differ. Attention layers have
    none."""
    for shape, dtype in zip(getattr(spec, "shapes", ()), getattr(spec, "dtypes", ()), strict=True):
        name = str(dtype).removeprefix("torch.")
        yield Section(_STATE_ELEMENTS.get(name, ElementType.OPAQUE), prod(shape) * dtype.itemsize)


def _draft_tokens(vllm_config: Any, kv_cache_config: Any, index: int) -> int:
    """Return the number of following tokens that a token's KV depends on in the drafter's layers.
    EAGLE and MTP also read the next token. If vLLM marks no group as the drafter's, all groups
    count as the drafter's."""
    drafter = vllm_config.speculative_config
    if drafter is None or not drafter.use_eagle():
        return 0
    groups = kv_cache_config.kv_cache_groups
    known = [bool(getattr(group, "is_eagle_group", False)) for group in groups]
    if any(known) and not known[index]:
        return 0
    ahead = getattr(vllm_config, "num_prefill_lookahead_tokens", None)
    if ahead is None:  # before 0.31
        ahead = drafter.num_speculative_tokens if drafter.use_multi_module_mtp() else 1
    return max(1, int(ahead))


def _used_bytes(spec: Any, tensor: Any, num_blocks: int, *, only: bool) -> int | None:
    """Return the page size of a layer, bytes, if the space between its pages belongs to other
    layers; otherwise None."""
    if hasattr(spec, "shapes"):  # a recurrent state, padded to the size of other groups' pages
        return int(spec.real_page_size_bytes)
    packed = tensor.layer_stride < num_blocks * tensor.block_stride
    return int(spec.page_size_bytes) if packed and not only else None


def read_reach(spec: Any) -> KvReach | str:
    """Return the reach of a group's layers (which tokens' KV they keep); if the group is not
    supported, the reason as a text."""
    reaches = {_layer_reach(one) for one in _layer_specs(spec)}
    if len(reaches) > 1:
        return f"layers of one group keep different types of KV ({type(spec).__name__})"
    return reaches.pop()


def _layer_specs(spec: Any) -> Iterator[Any]:
    layers = getattr(spec, "kv_cache_specs", None)
    yield from layers.values() if layers else (spec,)


def _layer_reach(spec: Any) -> KvReach | str:
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
        is_full_attention_spec,
    )

    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode != "align":
            return f"its states are kept in mamba_cache_mode {spec.mamba_cache_mode}, not align"
        return KvReach(KvKind.STATE)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return KvReach(KvKind.CHUNK, spec.attention_chunk_size)
    if isinstance(spec, SlidingWindowSpec):
        extra = int(getattr(spec, "extra_retained_tokens", 0))
        return KvReach(KvKind.WINDOW, spec.sliding_window, extra)
    if is_full_attention_spec(spec) and type(spec).__name__ != "RSWASpec":
        return KvReach()
    return f"its {type(spec).__name__} is not supported yet"


def why_not_offloadable(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Return the reason why this model's pages cannot be copied to CPU memory; None if they can."""
    groups, indices = kv_cache_config.kv_cache_groups, cacheable_groups(kv_cache_config)
    if not indices:
        return "vLLM supports prefix caching for none of its layers"
    for index in indices:
        reach = read_reach(groups[index].kv_cache_spec)
        if isinstance(reach, str):
            return reach
    only = groups[0].kv_cache_spec
    if len(groups) == 1 and only.block_size != vllm_config.cache_config.block_size:
        return "its block size differs from the block size of its block hashes"
    if any(t.host_resident for t in kv_cache_config.kv_cache_tensors):
        return "its KV cache is already in CPU memory"
    return None


def _arrangement(vllm_config: Any, kv_cache_config: Any) -> str:
    """Describe vLLM's KV layout, and the settings on which its choice of an attention backend
    depends."""
    import vllm
    from vllm.platforms import current_platform

    layout = getattr(kv_cache_config, "kv_cache_layout", None)
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    try:
        device = f"{current_platform.device_type} {current_platform.get_device_capability()}"
    except Exception:  # platforms differ in what they report
        device = str(current_platform.device_type)
    version = ".".join(vllm.__version__.split(".")[:2])
    return f"{layout} {backend} {device} vllm-{version}"


def _element(vllm_config: Any) -> ElementType:
    """Return the element type of the KV cache; opaque if it is unknown."""
    stored = str(vllm_config.cache_config.cache_dtype)
    if stored == "auto":
        stored = str(vllm_config.model_config.dtype).removeprefix("torch.")
    return _ELEMENTS.get(stored, ElementType.OPAQUE)
