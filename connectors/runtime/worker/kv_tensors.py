"""The engine's KV tensors: the allocation behind them, and what their type says of its speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiered_kv.errors import UnsupportedError

from .speed_probe import measure_flops


def flops_of(kv_caches: Sequence[Any]) -> float:
    """Speed of matrix products in the type of the KV cache, or what comes nearest."""
    import torch

    caches = [cache for cache in kv_caches if isinstance(cache, torch.Tensor)]
    if not caches:
        return 0.0
    dtype = caches[0].dtype
    usual = dtype in (torch.bfloat16, torch.float16, torch.float32)
    return measure_flops(caches[0].device, dtype if usual else torch.bfloat16)


def storage_of(kv_caches: Sequence[Any]) -> Any:
    """The one allocation behind all layers' KV tensors.

    Raises:
        UnsupportedError: the layers lie in several allocations, which the layout cannot name.
    """
    storages = {cache.untyped_storage().data_ptr(): cache for cache in kv_caches}
    if len(storages) != 1:
        raise UnsupportedError(
            f"the KV cache lies in {len(storages)} allocations where one was expected: "
            "set TIERED_KV_CPU_GIB=0 and report this model"
        )
    return next(iter(storages.values())).untyped_storage()
