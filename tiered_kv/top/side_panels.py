"""Panels side by side: tiers that prompts came from, decisions, and transfers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from tiered_kv.formatting import NONE, brief, count, part_of, size
from tiered_kv.status import EngineStatus, Transfers

from .server_state import Growth, ServerState
from .wording import TIERS, line

PANEL_LINES, PANELS_WIDTH = 6, 120
"""Height of the panels in lines, and the width that they need, characters."""
NO_CLASS = "no class"


class Way(NamedTuple):
    """A path of pages between tiers.

    Attributes:
        name: name of the path.
        transfer: type of the orders on this path, also used as a short name.
        counter: counter of the bytes moved on this path; None if there is no counter.
    """

    name: str
    transfer: str
    counter: str | None


WAYS = (
    Way("VRAM to CPU", "save", "bytes_saved"),
    Way("CPU to VRAM", "restore", "bytes_restored"),
    Way("CPU to SSD", "demote", "ssd_bytes_written"),
    Way("SSD to CPU", "promote", "ssd_bytes_read"),
    Way("compressed", "compress", None),
)


def panels(state: ServerState, engine: EngineStatus) -> Table:
    """Return the panels of prompts, decisions and transfers side by side, in ``PANEL_LINES``
    lines."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_row(_prompts(state, engine), _decided(engine), _moving(state, engine))
    return table


def panel_lines(state: ServerState, engine: EngineStatus) -> list[Text]:
    """Return the contents of the three panels, one line for each, for small terminals."""
    since, counters = "", engine.counters
    if (grown := state.grown) is not None and sum(sources(grown.counters).values()) > 0:
        since, counters = f", {brief(grown.over_s)}", grown.counters
    found = sources(counters)
    whole = sum(found.values())
    prompts = "  ".join(f"{name} {part_of(tokens, whole)}" for name, tokens in found.items())
    kinds = "  ".join(
        f"{kind.gap_class or NO_CLASS}: {TIERS.get(kind.tier, kind.tier)} {kind.count:,}"
        for kind in engine.decisions.counts
    )
    moving = "  ".join(
        f"{way.transfer} {count(found_.pages, 'page')}"
        for way in WAYS
        if (found_ := engine.transfers.get(way.transfer, Transfers())).orders
    )
    return [
        line((f"prompts{since} ", "bold"), prompts),
        line(("decided ", "bold"), kinds or NONE),
        line(("moving ", "bold"), moving or NONE),
    ]


def sources(counters: Mapping[str, float]) -> Mapping[str, float]:
    """Return the number of prompt tokens by the tier that their KV came from, and the number of
    computed prompt tokens under ``computed``."""
    ssd, remote = counters.get("prompt_tokens_ssd", 0), counters.get("prompt_tokens_remote", 0)
    shared = {"remote": remote} if remote else {}
    return {
        "VRAM": counters.get("prompt_tokens_vram", 0),
        "CPU": counters.get("prompt_tokens_cpu", 0) - ssd - remote,
        "SSD": ssd,
        **shared,
        "computed": counters.get("prompt_tokens_recomputed", 0),
    }


def _panel(*columns: str) -> Table:
    """Return a panel without rows. All columns except the first contain numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for at, name in enumerate(columns):
        table.add_column(name, justify="right" if at else "left", no_wrap=True)
    return table


def _prompts(state: ServerState, engine: EngineStatus) -> Table:
    grown = state.grown
    late = sources(grown.counters) if grown is not None else {}
    ever = sources(engine.counters)
    table = _panel("prompts", brief(grown.over_s) if grown is not None else "now", "since start")
    for name, tokens in ever.items():
        recent = part_of(late.get(name, 0), sum(late.values()))
        table.add_row(name, recent, part_of(tokens, sum(ever.values())))
    recent = f"{sum(late.values()):,.0f}" if grown is not None else NONE
    table.add_row("tokens", recent, f"{sum(ever.values()):,.0f}")
    return table


def _decided(engine: EngineStatus) -> Table:
    decided = engine.decisions
    by_class = dict[str, Counter[str]]()
    for kind in decided.counts:
        row = by_class.setdefault(kind.gap_class or NO_CLASS, Counter())
        row[TIERS.get(kind.tier, kind.tier)] += kind.count
    tiers = tuple(TIERS.values())[:3]
    over = "" if decided.since is None else f" in {brief(engine.now - decided.since)}"
    table = _panel(f"{count(sum(kind.count for kind in decided.counts), 'decision')}{over}", *tiers)
    for name, row in list(by_class.items())[: PANEL_LINES - 1]:
        table.add_row(Text(name), *(f"{row[tier]:,}" if row[tier] else NONE for tier in tiers))
    return table


def _moving(state: ServerState, engine: EngineStatus) -> Table:
    table = _panel("transfers", "orders", "pages", "per second")
    for way in WAYS:
        found = engine.transfers.get(way.transfer, Transfers())
        numbers = [f"{number:,}" if number else NONE for number in (found.orders, found.pages)]
        table.add_row(way.name, *numbers, _rate(way, state.grown))
    return table


def _rate(way: Way, grown: Growth | None) -> str:
    moved = grown.counters.get(way.counter, 0) if grown is not None and way.counter else 0
    return size(moved / grown.over_s) if grown is not None and moved else NONE
