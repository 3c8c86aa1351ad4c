"""Wording: numbers, times and places in few characters."""

from __future__ import annotations

from dataclasses import dataclass

from rich.filesize import pick_unit_and_suffix
from rich.text import Text

from tiered_kv.status import DecisionCount, JobDecision, Where

PLACES = {Where.VRAM: "VRAM", Where.CPU: "CPU", Where.STORE: "SSD", Where.NOWHERE: "nowhere"}
TIERS = {"pin": "VRAM", "cpu": "CPU", "store": "SSD", "drop": "nowhere"}
"""Places by the names of the tiers that are decided for."""
NONE = "-"


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


def size(nbytes: float) -> str:
    """A size, as "1.5 GiB"."""
    whole = max(0, int(nbytes))
    unit, suffix = pick_unit_and_suffix(whole, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024)
    value = whole / unit
    return f"{value:.0f} {suffix}" if unit == 1 or value >= 100 else f"{value:.1f} {suffix}"


def brief(seconds: float) -> str:
    """A time, as "12 s" or "3.5 h"."""
    value = max(0.0, seconds)
    if value < 10:
        return f"{value:.1f} s"
    for unit, length, factor in (("s", 120, 60), ("min", 120, 60), ("h", 48, 24)):
        if value < length:
            return f"{value:.0f} {unit}"
        value /= factor
    return f"{value:.0f} d"


def percent(part: float, whole: float) -> str:
    """A share, as "12%"; those that are small but not none as "<1%"."""
    if whole <= 0:
        return NONE
    share = 100 * part / whole
    return "<1%" if 0 < share < 1 else f"{share:.0f}%"


def count(amount: int, noun: str) -> str:
    """A number of things, as "1 job" or "2,000 jobs"."""
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def thousands(amount: int) -> str:
    """A large number in five characters, as "12.3k"."""
    if amount < 10_000:
        return f"{amount:,}"
    if amount < 1_000_000:
        return f"{amount / 1000:.1f}k" if amount < 100_000 else f"{amount / 1000:.0f}k"
    return f"{amount / 1_000_000:.1f}M"


def decision(kind: JobDecision | DecisionCount | None) -> str:
    """A decision, as "fast: VRAM"."""
    if kind is None:
        return NONE
    tier = TIERS.get(kind.tier, kind.tier)
    return tier if kind.gap_class is None else f"{kind.gap_class}: {tier}"
