"""Size of a rank's share of CPU memory, in pages."""

from __future__ import annotations

from tiered_kv.config import TierConfig
from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.errors import ConfigError


def slots_of(facts: EngineFacts, config: TierConfig) -> int:
    """Slots of a rank's share of the CPU tier, which is not off.

    Raises:
        ConfigError: it holds no page.
    """
    slots = facts.slots(config.cpu_bytes_per_rank(facts.ranks))
    if slots == 0:
        raise ConfigError(
            f"TIERED_KV_CPU_GIB={config.cpu_gib:g} holds no page: one takes "
            f"{facts.slot_bytes / (1 << 20):g} MiB on each of {facts.ranks} ranks. Give "
            "more, or 0."
        )
    return slots
