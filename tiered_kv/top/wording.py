"""Short names of places and decisions, and the size of a frame."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from tiered_kv.formatting import NONE
from tiered_kv.status import DecisionCount, JobDecision, Where

PLACES = {Where.VRAM: "VRAM", Where.CPU: "CPU", Where.STORE: "SSD", Where.NOWHERE: "nowhere"}
TIERS = {"pin": "VRAM", "cpu": "CPU", "store": "SSD", "drop": "nowhere"}
"""Names of places by the tier of a decision."""


@dataclass(frozen=True, slots=True)
class Canvas:
    """Size and capabilities of the output.

    Attributes:
        width: characters per line.
        height: lines; None for no limit.
        unicode: True if characters outside ASCII can be shown.
    """

    width: int
    height: int | None = None
    unicode: bool = True

    @property
    def is_wide(self) -> bool:
        """True if there is space for words next to the figures."""
        return self.width >= 100


def line(*parts: str | tuple[str, str]) -> Text:
    """Return a line that is truncated if it is too long. Markup in the texts is not interpreted."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis", end="")


def decision(kind: JobDecision | DecisionCount | None) -> str:
    """Return a decision as text, for example "fast: VRAM"."""
    if kind is None:
        return NONE
    tier = TIERS.get(kind.tier, kind.tier)
    return tier if kind.gap_class is None else f"{kind.gap_class}: {tier}"
