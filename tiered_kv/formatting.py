"""Human-readable numbers, times and names."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime

NONE = "-"
"""Placeholder for a missing value."""


def size(nbytes: float) -> str:
    """Format a size, for example "1.5 GiB"."""
    value = max(0.0, nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def brief(seconds: float | None) -> str:
    """Format a time briefly, for example "12 s" or "3 h"; "-" for None."""
    if seconds is None:
        return NONE
    value = max(0.0, seconds)
    if value < 10:
        return f"{value:.1f} s"
    for unit, length, factor in (("s", 120, 60), ("min", 120, 60), ("h", 48, 24)):
        if value < length:
            return f"{value:.0f} {unit}"
        value /= factor
    return f"{value:.0f} d"


def duration(seconds: float) -> str:
    """Format an estimated time, for example "35 ms" or "2.5 s"."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.{seconds < 0.0095:d}f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"


def measured(seconds: float) -> str:
    """Format a measured time for a table column, for example "2.500 s"."""
    return f"{seconds:,.3f} s" if seconds < 100 else f"{seconds:,.0f} s"


def secs(seconds: float) -> str:
    """Format a measured time for a sentence, for example "2.5 s"."""
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


def moment(seconds: float, timespec: str = "milliseconds") -> str:
    """Format a time, given in seconds since the epoch, as a date and time in UTC. A time that the
    calendar cannot represent is formatted as "N s after 1970"."""
    with suppress(ValueError, OverflowError, OSError):  # a year out of range
        when = datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)
        return f"{when.isoformat(' ', timespec)} UTC"
    return f"{seconds:g} s after 1970"


def percent(share: float | None) -> str:
    """Format a fraction, for example "12.3%"; "-" for None."""
    return NONE if share is None else f"{100 * share:.1f}%"


def part_of(part: float, whole: float) -> str:
    """Format a part of a whole as a percentage, for example "12%", or "<1%" if small; "-" if the
    whole is 0."""
    if whole <= 0:
        return NONE
    share = 100 * part / whole
    return "<1%" if 0 < share < 1 else f"{share:.0f}%"


def count(amount: int, noun: str) -> str:
    """Format a number of things, for example "1 job" or "2,000 jobs"."""
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def thousands(amount: int) -> str:
    """Format a large number in up to five characters, for example "12.3k"."""
    if amount < 10_000:
        return f"{amount:,}"
    if amount < 1_000_000:
        return f"{amount / 1000:.1f}k" if amount < 100_000 else f"{amount / 1000:.0f}k"
    return f"{amount / 1_000_000:.1f}M"


def plain(text: str) -> str:
    """Replace unprintable characters by question marks."""
    return "".join(char if char.isprintable() else "?" for char in text)
