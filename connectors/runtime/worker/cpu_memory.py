"""A rank's share of the CPU tier: its size in pages, its memory (anonymous, or a file that outlives
the engine), and the allocation behind the engine's KV tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tiered_kv.config import TierConfig, check_cpu_size
from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.errors import ConfigError, UnsupportedError
from tiered_kv.keys import Fingerprint
from tiered_kv.machine import system_memory
from tiered_kv.transfer.host_memory import AnonymousMemory, HostMemory

from .lasting_pages import LastingPages, held_bytes, open_lasting
from .speed_probe import measure_flops


def make_memory(
    facts: EngineFacts,
    config: TierConfig,
    rank: int,
    slots: int,
    fingerprints: Callable[[], Sequence[Fingerprint]],
    *,
    on_gpu: bool,
    clock: Callable[[], float],
) -> tuple[HostMemory, LastingPages | None]:
    """Allocate memory for ``slots`` slots, pinned for a GPU.

    Returns:
        The memory, and the object that keeps its pages for later engines; None if the pages do not
        outlive this engine.

    Raises:
        ConfigError: the memory does not fit, or its file cannot be opened or created.
    """
    import torch

    local_ranks = min(facts.ranks, torch.cuda.device_count()) if on_gpu else facts.ranks
    total, available = system_memory()
    available += held_bytes(facts, config, rank)
    check_cpu_size(config, facts.ranks, local_ranks, total, available)
    lasting: LastingPages | None = None
    memory: HostMemory | None = None
    if config.cpu_path is not None:
        found = open_lasting(facts, config, rank, slots, fingerprints(), on_gpu=on_gpu, clock=clock)
        if found is not None:
            memory = found
            lasting = LastingPages(found, [group.page_bytes for group in facts.groups])
    if memory is None:
        memory = AnonymousMemory(slots * facts.slot_bytes)
    if on_gpu:
        from tiered_kv.transfer.cuda.pinned_memory import pinned

        memory = pinned(memory)
    return memory, lasting


def slots_of(facts: EngineFacts, config: TierConfig) -> int:
    """Return the number of slots of a rank's share of the CPU tier, which must be enabled.

    Raises:
        ConfigError: the share holds no page.
    """
    slots = facts.slots(config.cpu_bytes_per_rank(facts.ranks))
    if slots == 0:
        raise ConfigError(
            f"TIERED_KV_CPU_GIB={config.cpu_gib:g} is too small for a single page, which "
            f"takes {facts.slot_bytes / (1 << 20):g} MiB on each of {facts.ranks} ranks: "
            "raise it, or set it to 0 to keep no KV in CPU memory."
        )
    return slots


def flops_of(kv_caches: Sequence[Any]) -> float:
    """Measure matrix products in the KV cache's dtype, or in bfloat16 if the KV cache has an
    unusual dtype. Returns operations per second; 0 without tensors."""
    import torch

    caches = [cache for cache in kv_caches if isinstance(cache, torch.Tensor)]
    if not caches:
        return 0.0
    dtype = caches[0].dtype
    usual = dtype in (torch.bfloat16, torch.float16, torch.float32)
    return measure_flops(caches[0].device, dtype if usual else torch.bfloat16)


def storage_of(kv_caches: Sequence[Any]) -> Any:
    """Return the single allocation behind all layers' KV tensors.

    Raises:
        UnsupportedError: the layers have several allocations, which the layout cannot describe.
    """
    storages = {cache.untyped_storage().data_ptr(): cache for cache in kv_caches}
    if len(storages) != 1:
        raise UnsupportedError(
            f"the KV cache is split over {len(storages)} allocations, where one was expected: "
            "set TIERED_KV_CPU_GIB=0 and report this model"
        )
    return next(iter(storages.values())).untyped_storage()
