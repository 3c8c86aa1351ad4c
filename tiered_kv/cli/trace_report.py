"""Reports of ``tiered-kv trace``, as tables."""

from __future__ import annotations

from tiered_kv.formatting import NONE, count, measured, percent, size
from tiered_kv.trace.analysis import Decisions, Figures, Spread
from tiered_kv.trace.comparison import Comparison
from tiered_kv.trace.page.html_page import TextTable
from tiered_kv.trace.steps.step_figures import StepFigures

from .terminal import print_table

_SPREAD = {"mean": True, "P50": True, "P90": True, "P95": True, "P99": True}
_DECISIONS = {
    "gaps": True,
    "gap P50": True,
    "P90": True,
    "in VRAM": True,
    "below q50": True,
    "below q90": True,
    "saved": True,
    "cost": True,
    "best": True,
    "regret": True,
}


def print_figures(title: str, figures: Figures) -> None:
    """Print the figures of one trace."""
    for table in figure_tables(title, figures):
        print_table(table.columns, [[*row] for row in table.rows])


def headline(figures: Figures) -> dict[str, str]:
    """Return the most important figures, by name."""
    found = {"jobs": f"{figures.jobs.jobs:,}", "turns": f"{figures.turns:,}"}
    for name, spread in _spreads(figures).items():
        if spread is not None:
            found |= {f"{name}, P50": measured(spread.p50), f"{name}, P95": measured(spread.p95)}
    shares = _found_in(figures).items()
    found |= {f"prompts from {where}": percent(share) for where, share in shares}
    return found | {"prompts lost": percent(figures.prompts.lost)}


def _spreads(figures: Figures) -> dict[str, Spread | None]:
    return {
        "job completion": figures.jobs.completion_s,
        "wait for admission": figures.waits.queue_s,
        "first token": figures.waits.first_token_s,
    }


def _found_in(figures: Figures) -> dict[str, float | None]:
    prompts = figures.prompts
    return {"VRAM": prompts.vram, "CPU memory": prompts.cpu, "SSD": prompts.ssd}


def figure_tables(title: str, figures: Figures) -> list[TextTable]:
    """Return the figures of one trace as tables, without empty tables."""
    jobs, prompts, moved = figures.jobs, figures.prompts, figures.promotions
    waits, saved_s = figures.waits, figures.prompts.prefill_saved_s
    rows = [
        [
            "turns",
            f"{figures.turns:,} in {measured(figures.span_s)}, {figures.alone:,} without a job",
        ],
        ["jobs", f"{jobs.jobs:,}, {jobs.cut:,} started before the trace, {jobs.waiting:,} open"],
        ["prompts", f"{count(prompts.tokens, 'token')}: {_sources(figures)}"],
        ["prefill saved", measured(saved_s)],
        *_would_have_saved(figures),
        ["held", f"{measured(waits.held_s)} for space, {measured(waits.pages_s)} for pages"],
        [
            "promoted",
            f"{count(moved.pages, 'page')}, {size(moved.nbytes)} for turns; {_waste(figures)}",
        ],
        ["demoted", count(figures.demoted, "page")],
        ["superseded", f"{count(figures.superseded, 'page')} of earlier contexts"],
    ]
    tables = [TextTable({title: False, "": False}, rows)]
    rows = [[name, *_spread(spread)] for name, spread in _spreads(figures).items()]
    tables.append(TextTable({"seconds": False, **_SPREAD}, rows))
    rows = [[end, f"{one.pins:,}", *_spread(one.held_s)] for end, one in figures.pins.items()]
    tables.append(TextTable({"pins, seconds held": False, "pins": True, **_SPREAD}, rows))
    every = {"all": figures.decisions}
    for name, group in {"": every, "tool": figures.by_tool, "class": figures.by_class}.items():
        rows = [[name, *_decisions(one)] for name, one in group.items() if one.gaps]
        heading = f"decisions by {name}" if name else "decisions"
        tables.append(TextTable({heading: False, **_DECISIONS}, rows))
    return [table for table in tables if table.rows]


def print_steps(figures: StepFigures) -> None:
    """Print the step figures of one trace."""
    said = f"{count(figures.steps, 'step')} in {measured(figures.span_s)}"
    tokens = f"{figures.prefill_tokens:,} tokens of prompts, {figures.decode_tokens:,} of answers"
    rows = [[name, *_level(name, level.mean, level.peak)] for name, level in figures.levels.items()]
    print_table({f"{said}; {tokens}": False, "mean": True, "peak": True}, rows)


def _level(name: str, mean: float, peak: int) -> list[str]:
    if name.startswith("nbytes."):
        return [size(round(mean)), size(peak)]
    return [f"{mean:,.2f}", f"{peak:,}"]


def print_comparison(compared: Comparison) -> None:
    """Print the differences of two traces."""
    columns = {"first": True, "second": True, "difference": True, "95%": True}
    only = f"{compared.only_first:,} and {compared.only_second:,}"
    title = f"{count(compared.jobs, 'job')} in both, {only} in one"
    rows = [
        [
            name,
            f"{one.first:,.4g}",
            f"{one.second:,.4g}",
            f"{one.difference:+,.4g}",
            f"{one.low:+,.4g} to {one.high:+,.4g}",
        ]
        for name, one in compared.differences.items()
    ]
    print_table({title: False, **columns}, rows)


def _sources(figures: Figures) -> str:
    shares = {**_found_in(figures), "computed": figures.prompts.recomputed}
    said = ", ".join(f"{percent(share)} {where}" for where, share in shares.items())
    return f"{said} ({percent(figures.prompts.lost)} lost)"


def _would_have_saved(figures: Figures) -> list[list[str]]:
    """Return the row with the savings that the connector would have achieved, for a trace of
    observe mode.
    """
    would = figures.would_have_saved
    if not would.tokens:
        return []
    where = f"{would.vram:,} in VRAM, {would.cpu:,} in CPU memory, {would.ssd:,} on SSD"
    share = f"{percent(would.share)} of prompts, {measured(would.prefill_s)} of prefill"
    return [["would have saved", f"{would.tokens:,} tokens ({share}): {where}"]]


def _waste(figures: Figures) -> str:
    moved = figures.promotions
    return f"{moved.used:,} used, {percent(moved.waste)} wasted"


def _spread(spread: Spread | None) -> list[str]:
    if spread is None:
        return [NONE] * len(_SPREAD)
    values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99)
    return [f"{value:,.3f}" for value in values]


def _decisions(one: Decisions) -> list[str]:
    gap = one.gap_s
    return [
        f"{one.gaps:,}",
        measured(gap.p50) if gap is not None else NONE,
        measured(gap.p90) if gap is not None else NONE,
        percent(one.in_vram),
        percent(one.below_q50),
        percent(one.below_q90),
        measured(one.saved_s),
        measured(one.cost_s),
        measured(one.best_s),
        measured(one.regret_s),
    ]
