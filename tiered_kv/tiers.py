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
    """A tier's stores of one page group: one on each rank.

    Attributes:
        tier: the tier.
        group: position of the page group among the engine's.
    """

    tier: TierId
    group: int


class Knowledge(Enum):
    """Authority on which pages a tier has."""

    KNOWN = "known"
    """The scheduler half: its index is complete, since this engine alone writes there."""
    ASKED = "asked"
    """The store alone: others write there too, so it must be asked, and an answer grows old."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier below CPU memory.

    Attributes:
        tier: name of the tier.
        knowledge: authority on which pages it has.
        capacity_bytes: size of the tier, all ranks together; None if it has no known end.
        shared: True if engines leave pages there for each other: contexts whose job will return
            go there when a turn ends, and nothing goes there to make room.
        in_runs: True if its stores want to know which pages follow each other in a context.
    """

    tier: TierId
    knowledge: Knowledge = Knowledge.KNOWN
    capacity_bytes: int | None = None
    shared: bool = False
    in_runs: bool = False
