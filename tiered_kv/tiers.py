"""The lower tiers: their names, and the facts that both halves must agree on."""

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
    """A tier's stores of one page group: one on each rank.

    Attributes:
        tier: the tier.
        group: position of the page group among the engine's.
    """

    tier: TierId
    group: int


class Knowledge(Enum):
    """Authority on the pages that a tier has."""

    KNOWN = "known"
    """The scheduler half: its index is complete, since only this engine writes to the tier."""
    ASKED = "asked"
    """The store alone: other engines write to it too, so it must be queried, and answers expire."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier below CPU memory.

    Attributes:
        tier: name of the tier.
        knowledge: authority on the pages that it has.
        capacity_bytes: size of the tier, all ranks together, bytes; None without a known limit.
        shared: True if engines share pages through the tier. Contexts whose job will return are
            written to it when a turn ends; no page is demoted to it to free CPU memory.
        in_runs: True if its stores need to know which pages are contiguous in a context.
    """

    tier: TierId
    knowledge: Knowledge = Knowledge.KNOWN
    capacity_bytes: int | None = None
    shared: bool = False
    in_runs: bool = False
