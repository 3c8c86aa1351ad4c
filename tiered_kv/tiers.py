"""The tiers below CPU memory: their names, and the facts that both halves must agree on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

TierId = NewType("TierId", str)
"""Name of a tier; unique within an engine."""

SSD = TierId("ssd")
"""The tier of segment stores on a local disk."""
REMOTE = TierId("remote")
"""The tier of a store that many machines share."""


class StoreId(NamedTuple):
    """The stores of one page group in a tier: one store on each rank.

    Attributes:
        tier: the tier.
        group: position of the page group among the engine's groups.
    """

    tier: TierId
    group: int


class Knowledge(Enum):
    """The side that knows which pages a tier has."""

    KNOWN = "known"
    """The scheduler half knows: its index is complete, because only this engine writes to the
    tier."""
    ASKED = "asked"
    """Only the store knows: other engines write to it too, so it must be queried, and its answers
    expire."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier below CPU memory.

    Attributes:
        tier: name of the tier.
        knowledge: the side that knows which pages the tier has.
        capacity_bytes: size of the tier, all ranks together, bytes; None without a known limit.
        shared: True if engines share pages through the tier. Contexts whose job will return are
            written to it when a turn ends; no page is demoted to it to free CPU memory.
        in_runs: True if the tier's stores need to know which pages are contiguous in a context.
    """

    tier: TierId
    knowledge: Knowledge = Knowledge.KNOWN
    capacity_bytes: int | None = None
    shared: bool = False
    in_runs: bool = False
