"""Tiers as bars: what each holds, and how much of it is free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from tiered_kv.top.readings import CpuReading, EngineReading, LowerReading, VramReading

from .wording import Canvas, count, line, percent, size

LABEL = {True: 12, False: 5}
"""Width of the tiers' names, by whether there is room."""
LEAST_BAR, MOST_BAR = 10, 80


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tier.

    Attributes:
        word, short: its name.
        glyph, ascii: what its cells of the bar are filled with.
    """

    amount: float
    word: str
    short: str
    glyph: str
    ascii: str
    style: str


def tier_bars(engine: EngineReading, canvas: Canvas) -> list[Text]:
    """A line for each tier."""
    found = [_vram(engine.vram, canvas), _cpu(engine.cpu, canvas)]
    found += [_lower(tier, canvas) for tier in engine.below]
    return found if engine.below else [*found, _off("SSD", "TIERED_KV_SSD_PATH is unset", canvas)]


def _vram(vram: VramReading, canvas: Canvas) -> Text:
    parts = (
        Part(vram.running, "running", "run", "█", "#", "green"),
        Part(vram.pinned, "pinned", "pin", "▓", "=", "magenta"),
        Part(vram.cached, "cached", "cache", "▒", "-", "cyan"),
        Part(vram.free - vram.cached, "free", "free", "·", ".", "dim"),
    )
    whole = size(vram.nbytes) if vram.nbytes else count(vram.blocks, "block")
    return _bar("VRAM", "VRAM", parts, whole, canvas)


def _cpu(cpu: CpuReading, canvas: Canvas) -> Text:
    if not cpu.slots:
        return _off("CPU memory", "TIERED_KV_CPU_GIB is 0, or KV of this kind stays", canvas)
    hot = cpu.slots - cpu.free_slots - cpu.compressed_slots
    parts = (
        Part(hot, "hot", "hot", "█", "#", "green"),
        Part(cpu.compressed_slots, "compressed", "compr", "▓", "=", "magenta"),
        Part(cpu.free_slots, "free", "free", "·", ".", "dim"),
    )
    pages = f"{size(cpu.nbytes)}, {count(cpu.pages, 'page')}"
    if cpu.compressed_pages:
        pages += f", {cpu.compressed_pages:,} compressed"
    return _bar("CPU memory", "CPU", parts, pages if canvas.is_wide else size(cpu.nbytes), canvas)


def _lower(tier: LowerReading, canvas: Canvas) -> Text:
    name = "SSD" if tier.name == "ssd" else tier.name
    pages = count(tier.pages, "page")
    if tier.nbytes is None:
        label = LABEL[canvas.is_wide]
        return line((f"{_cut(name, label)} ", "bold"), f"{size(tier.used_bytes)}, {pages}")
    parts = (
        Part(min(tier.used_bytes, tier.nbytes), "used", "used", "█", "#", "green"),
        Part(max(0, tier.nbytes - tier.used_bytes), "free", "free", "·", ".", "dim"),
    )
    whole = size(tier.nbytes)
    return _bar(name, name, parts, f"{whole}, {pages}" if canvas.is_wide else whole, canvas)


def _off(name: str, why: str, canvas: Canvas) -> Text:
    label = LABEL[canvas.is_wide]
    short = name if canvas.is_wide else name.split()[0]
    return line((f"{_cut(short, label)} ", "bold"), (f"off: {why}", "dim"))


def _bar(name: str, short: str, parts: Sequence[Part], whole: str, canvas: Canvas) -> Text:
    total = sum(part.amount for part in parts)
    label = LABEL[canvas.is_wide]
    words = list[tuple[str, str]]()
    for part in parts:
        word = part.word if canvas.is_wide else part.short
        words.append((f" {word} {percent(part.amount, total)}", _readable(part.style)))
    words.append((f" of {whole}", ""))
    taken = label + 1 + sum(len(text) for text, _ in words)
    width = min(MOST_BAR, canvas.width - taken)
    if width < LEAST_BAR:  # rather no size than no bar
        width = min(MOST_BAR, width + len(words.pop()[0]))
    cells = [(text, style) for text, style in _cells(parts, total, max(0, width), canvas)]
    shown = name if canvas.is_wide else short
    return line((f"{_cut(shown, label)} ", "bold"), *cells, *words)


def _cells(
    parts: Sequence[Part], total: float, width: int, canvas: Canvas
) -> Iterator[tuple[str, str]]:
    """The cells of a bar: their number is exact, their borders are rounded."""
    seen, at = 0.0, 0
    for part in parts:
        seen += part.amount
        end = round(width * seen / total) if total else 0
        yield (part.glyph if canvas.unicode else part.ascii) * (end - at), part.style
        at = end
    yield " " * (width - at), ""


def _readable(style: str) -> str:
    return "" if style == "dim" else style


def _cut(name: str, width: int) -> str:
    return f"{name[:width]:<{width}}"
