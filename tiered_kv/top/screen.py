"""The screen: a frame that shows a state and fills a terminal, or is printed once."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.text import Text

from tiered_kv.doctor.running_server import FAILURES
from tiered_kv.formatting import count
from tiered_kv.metrics import HINT_INTENTS, HINT_OUTCOMES, hint_event
from tiered_kv.status import EngineStatus

from .job_rows import job_rows
from .server_state import ServerState
from .side_panels import PANEL_LINES, PANELS_WIDTH, panel_lines, panels
from .tier_bars import tier_bars
from .view import SORT_KEYS, View
from .wording import Canvas, line

ONCE_ROWS = 40
"""Maximum number of jobs in a printed frame."""
LEAST_ROWS = 3
"""Number of lines reserved for jobs before parts other than the tiers are shown."""


def frame(state: ServerState, view: View, canvas: Canvas) -> RenderableType:
    """Return a frame that fills the canvas. Before the call, limit the view to the number of rows
    that ``rows_of`` returns.
    """
    rows = rows_of(state, view, canvas)
    parts = _above(state, view, canvas)
    jobs, last = _jobs(state, view, canvas, rows), _keys(state, view, canvas, rows)
    layout = Layout()
    layout.split_column(
        *(Layout(part, size=lines) for part, lines in parts),
        Layout(jobs),
        Layout(last, size=1),
    )
    return layout


def rows_of(state: ServerState, view: View, canvas: Canvas) -> int:
    """Return the number of jobs that fit into a frame; 0 if the canvas has no height limit."""
    above = sum(lines for _, lines in _above(state, view, canvas))
    return max(0, (canvas.height or 0) - above - 2)  # the lines with the column titles and the keys


def printed(state: ServerState, view: View, canvas: Canvas) -> RenderableType:
    """Return a frame to be printed, of any height, with at most ``ONCE_ROWS`` jobs."""
    parts = [part for part, _ in _above(state, view, canvas)]
    jobs, left_out = _jobs(state, view, canvas, ONCE_ROWS), _left_out(state, view)
    return Group(*parts, jobs, *([_lines(left_out)[0]] if left_out else []))


def _above(state: ServerState, view: View, canvas: Canvas) -> list[tuple[RenderableType, int]]:
    """Return the parts above the jobs, and the number of lines of each part."""
    looked_at = view.of(state)
    engine = looked_at.total
    head = [_head(looked_at, view), *_sentences(state, view, canvas)]
    bars = tier_bars(engine.tiers, canvas)
    counts = [_counts(engine, canvas), *_hints(engine, canvas), *_failures(engine)]
    found: list[tuple[RenderableType, int]] = [_lines(head), _lines(bars)]
    left = (canvas.height or 1000) - len(head) - len(bars) - LEAST_ROWS - 2
    if left >= len(counts):
        left -= len(counts)
        found.append(_lines(counts))
    blank = _lines([Text(" ")])  # rich shows a placeholder for an empty text
    if canvas.width >= PANELS_WIDTH and left >= PANEL_LINES + 2:
        table = panels(looked_at, engine)
        return [*found, blank, (table, PANEL_LINES), blank]
    short = panel_lines(looked_at, engine)
    if left >= len(short):
        found.append(_lines(short))
        left -= len(short)
    return [*found, blank] if left >= 1 else found


def _lines(texts: Sequence[Text]) -> tuple[RenderableType, int]:
    whole = Text("\n", no_wrap=True, overflow="ellipsis").join(texts)
    return whole, len(texts)


def _head(state: ServerState, view: View) -> Text:
    versions = f"tiered-kv {state.status.version}, vLLM {state.status.vllm_version}"
    observes = ", observe mode: no KV is moved" if state.total.mode == "observe" else ""
    return line((state.url, "bold"), f"  {versions}, policy {state.total.policy}{observes}")


def _sentences(state: ServerState, view: View, canvas: Canvas) -> list[Text]:
    """Return messages about unusual conditions, wrapped into lines."""
    found = list[Text]()
    if state.problem is not None:
        found += _wrapped(f"{state.problem} The last known state follows.", "bold red", canvas)
    engines = len(state.status.engines)
    if engines > 1 and view.engine is None:
        found += _wrapped(
            f"Sum of {engines} engines. Press e to show the engines one by one.", "yellow", canvas
        )
    elif engines > 1:
        words = f"Engine {view.engine} of {engines}. Press e for the next engine, and finally all."
        found += _wrapped(words, "yellow", canvas)
    return found


def _wrapped(sentence: str, style: str, canvas: Canvas) -> list[Text]:
    lines = wrap(sentence, canvas.width, break_long_words=False, break_on_hyphens=False)
    return [line((one, style)) for one in lines]


def _counts(engine: EngineStatus, canvas: Canvas) -> Text:
    jobs, queues, pins = engine.jobs, engine.queues, engine.pins
    held = (f"{queues.held:,} held", "bold red" if queues.held else "")
    turns = f"{queues.running:,} running, {queues.queued:,} queued, "
    known = f"; {count(jobs.known, 'job')}, {jobs.waiting:,} waiting"
    if not canvas.is_wide:
        return line(("turns ", "bold"), turns, held, known)
    blocks = f"{pins.blocks:,} of {count(pins.most_blocks, 'block')}"
    return line(
        (f"{'turns':<12} ", "bold"),
        turns,
        held,
        known,
        f"; {count(pins.jobs, 'pin')}, {blocks}",
        f"; {count(queues.prefetches, 'context')} to prefetch",
    )


def _hints(engine: EngineStatus, canvas: Canvas) -> list[Text]:
    """Return a line with the number of KV hints by outcome; empty if no client has sent any."""
    by_outcome = {
        outcome: sum(engine.counters.get(hint_event(one, outcome), 0) for one in HINT_INTENTS)
        for outcome in HINT_OUTCOMES
    }
    words = ", ".join(f"{times:,.0f} {outcome}" for outcome, times in by_outcome.items() if times)
    name = f"{'hints':<12} " if canvas.is_wide else "hints "
    return [line((name, "bold"), words)] if words else []


def _failures(engine: EngineStatus) -> list[Text]:
    """Return a line with the failure counters that are not 0; empty if there are none."""
    found = {name: engine.counters.get(name, 0) for name in FAILURES}
    words = ", ".join(f"{name} {times:,.0f}" for name, times in found.items() if times)
    return [line((f"{words}: run tiered-kv doctor URL", "red"))] if words else []


def _jobs(state: ServerState, view: View, canvas: Canvas, rows: int) -> RenderableType:
    looked_at = view.of(state)
    jobs = view.in_order(looked_at.jobs)
    turned = ", reversed" if view.backwards else ""
    return job_rows(
        jobs[view.top : view.top + rows],
        looked_at.total.now,
        canvas.width,
        several=len(state.status.engines) > 1,
        names=f"job, by {view.order.value}{turned}",
    )


def _left_out(state: ServerState, view: View) -> list[Text]:
    """Return a line with the number of jobs that are not shown; empty if all jobs are shown."""
    shown = len(view.of(state).jobs)
    if shown <= ONCE_ROWS and state.whole:
        return []
    words = f"Showing the first {min(ONCE_ROWS, shown)} of {_known(state, view)} jobs."
    return [line((f"{words} GET /tiered_kv/jobs lists all jobs.", "dim"))]


def _known(state: ServerState, view: View) -> str:
    looked_at = view.of(state)
    seen, known = len(looked_at.jobs), looked_at.total.jobs.known
    return f"{seen:,}" if state.whole else f"{seen:,} seen, {known:,} known"


def _keys(state: ServerState, view: View, canvas: Canvas, rows: int) -> Text:
    shown = len(view.of(state).jobs)
    last = min(view.top + rows, shown)
    place = f"{min(view.top + 1, last):,}-{last:,} of {_known(state, view)}"
    if canvas.is_wide:
        sorts = "  ".join(f"{key} {order.value}" for key, order in SORT_KEYS.items())
        keys = f"  q quit  {sorts}  space b arrows move"
    else:
        keys = f"  q quit  {' '.join(SORT_KEYS)} sort  space b move"
    more = "  e engine" if len(state.status.engines) > 1 else ""
    return line((place, "bold"), (keys + more, "dim"))
