"""Tiers as bars: how much of each tier is used, and how much is free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from tiered_kv.formatting import count, part_of, size
from tiered_kv.status import Cpu, LowerTier, Tiers, Vram

from .wording import Canvas, line

LABEL = {True: 12, False: 5}
"""Width of the column of tier names, characters, by whether the canvas is wide."""
LEAST_BAR, MOST_BAR = 10, 80


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tier.

    Attributes:
        amount: size of the part, in any unit that all parts of the tier share.
        word, short: long and short name of the part.
        glyph, ascii: characters that fill the part's cells of the bar.
    """

    amount: float
    word: str
    short: str
    glyph: str
    ascii: str
    style: str


def tier_bars(tiers: Tiers, canvas: Canvas) -> list[Text]:
    """Return one line for each tier."""
    found = [_vram(tiers.vram, canvas), _cpu(tiers.cpu, canvas)]
    found += [_lower(tier, canvas) for tier in tiers.lower]
    return found if tiers.lower else [*found, _off("SSD", "TIERED_KV_SSD_PATH is unset", canvas)]


def _vram(vram: Vram, canvas: Canvas) -> Text:
    parts = (
        Part(vram.running_blocks, "running", "run", "█", "#", "green"),
        Part(vram.pinned_blocks, "pinned", "pin", "▓", "=", "magenta"),
        Part(vram.reusable_blocks, "cached", "cache", "▒", "-", "cyan"),
        Part(vram.free_blocks - vram.reusable_blocks, "free", "free", "·", ".", "dim"),
    )
    whole = size(vram.bytes) if vram.bytes else count(vram.blocks, "block")
    return _bar("VRAM", "VRAM", parts, whole, canvas)


def _cpu(cpu: Cpu, canvas: Canvas) -> Text:
    if not cpu.slots:
        why = "TIERED_KV_CPU_GIB is 0, or the model's KV cannot be offloaded"
        return _off("CPU memory", why, canvas)
    hot = cpu.slots - cpu.free_slots - cpu.compressed_slots
    parts = (
        Part(hot, "hot", "hot", "█", "#", "green"),
        Part(cpu.compressed_slots, "compressed", "compr", "▓", "=", "magenta"),
        Part(cpu.free_slots, "free", "free", "·", ".", "dim"),
    )
    pages = f"{size(cpu.bytes)}, {count(cpu.pages, 'page')}"
    if cpu.compressed_pages:
        pages += f", {cpu.compressed_pages:,} compressed"
    return _bar("CPU memory", "CPU", parts, pages if canvas.is_wide else size(cpu.bytes), canvas)


def _lower(tier: LowerTier, canvas: Canvas) -> Text:
    name = "SSD" if tier.tier == "ssd" else tier.tier
    pages = count(tier.pages, "page")
    if tier.bytes is None:
        return _named(name, canvas, f"{size(tier.used_bytes)}, {pages}")
    parts = (
        Part(min(tier.used_bytes, tier.bytes), "used", "used", "█", "#", "green"),
        Part(max(0, tier.bytes - tier.used_bytes), "free", "free", "·", ".", "dim"),
    )
    whole = size(tier.bytes)
    return _bar(name, name, parts, f"{whole}, {pages}" if canvas.is_wide else whole, canvas)


def _off(name: str, why: str, canvas: Canvas) -> Text:
    short = name if canvas.is_wide else name.split()[0]
    return _named(short, canvas, (f"off: {why}", "dim"))


def _bar(name: str, short: str, parts: Sequence[Part], whole: str, canvas: Canvas) -> Text:
    total = sum(part.amount for part in parts)
    words = list[tuple[str, str]]()
    for part in parts:
        word = part.word if canvas.is_wide else part.short
        style = part.style if part.style != "dim" else ""  # text must be readable
        words.append((f" {word} {part_of(part.amount, total)}", style))
    words.append((f" of {whole}", ""))
    taken = LABEL[canvas.is_wide] + 1 + sum(len(text) for text, _ in words)
    width = min(MOST_BAR, canvas.width - taken)
    if width < LEAST_BAR:  # the bar is more important than the total size
        width = min(MOST_BAR, width + len(words.pop()[0]))
    cells = _cells(parts, total, max(0, width), canvas)
    return _named(name if canvas.is_wide else short, canvas, *cells, *words)


def _cells(
    parts: Sequence[Part], total: float, width: int, canvas: Canvas
) -> Iterator[tuple[str, str]]:
    """Yield the cells of a bar as texts with styles. The total number of cells is exact; borders
    are rounded.
    """
    seen, at = 0.0, 0
    for part in parts:
        seen += part.amount
        end = round(width * seen / total) if total else 0
        yield (part.glyph if canvas.unicode else part.ascii) * (end - at), part.style
        at = end
    yield " " * (width - at), ""


def _named(name: str, canvas: Canvas, *parts: str | tuple[str, str]) -> Text:
    width = LABEL[canvas.is_wide]
    return line((f"{name[:width]:<{width}} ", "bold"), *parts)
