"""Wording: places and decisions in few characters, and the space of a frame."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from tiered_kv.formatting import NONE
from tiered_kv.status import DecisionCount, JobDecision, Where

PLACES = {Where.VRAM: "VRAM", Where.CPU: "CPU", Where.STORE: "SSD", Where.NOWHERE: "nowhere"}
TIERS = {"pin": "VRAM", "cpu": "CPU", "store": "SSD", "drop": "nowhere"}
"""Places by the names of the tiers that are decided for."""


@dataclass(frozen=True, slots=True)
class Canvas:
    """Room for a frame, in characters.

    Attributes:
        height: lines; None without end.
        unicode: True if it can show more than ASCII.
    """

    width: int
    height: int | None = None
    unicode: bool = True

    @property
    def is_wide(self) -> bool:
        """True if there is room for words beside the figures."""
        return self.width >= 100


def line(*parts: str | tuple[str, str]) -> Text:
    """A line that is cut where it is too long. Markup in it means nothing."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis", end="")


def decision(kind: JobDecision | DecisionCount | None) -> str:
    """A decision, as "fast: VRAM"."""
    if kind is None:
        return NONE
    tier = TIERS.get(kind.tier, kind.tier)
    return tier if kind.gap_class is None else f"{kind.gap_class}: {tier}"
