"""Memory for a rank's share of the CPU tier: of this engine alone, or a file that outlives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiered_kv.config import TierConfig, check_cpu_size
from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.keys import Fingerprint
from tiered_kv.machine.memory import system_memory
from tiered_kv.transfer.host_memory import AnonymousMemory, HostMemory

from .lasting_pages import LastingPages, NoLastingPages, held_bytes, open_lasting


def make_memory(
    facts: EngineFacts,
    config: TierConfig,
    rank: int,
    slots: int,
    fingerprints: Callable[[], Sequence[Fingerprint]],
    *,
    on_gpu: bool,
    clock: Callable[[], float],
) -> tuple[HostMemory, LastingPages | NoLastingPages]:
    """Make memory for so many slots, pinned for a GPU, and what becomes of its pages afterwards.

    Raises:
        ConfigError: it does not fit, or its file cannot be had.
    """
    import torch

    local_ranks = min(facts.ranks, torch.cuda.device_count()) if on_gpu else facts.ranks
    total, available = system_memory()
    available += held_bytes(facts, config, rank)
    check_cpu_size(config, facts.ranks, local_ranks, total, available)
    memory: HostMemory | None = None
    lasting: LastingPages | NoLastingPages = NoLastingPages()
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
