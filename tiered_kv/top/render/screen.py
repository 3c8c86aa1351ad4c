"""The screen: a frame of a snapshot, to fill a terminal or to be printed once."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.text import Text

from tiered_kv.doctor.running_server import FAILURES
from tiered_kv.top.job_sorting import in_order
from tiered_kv.top.readings import EngineReading
from tiered_kv.top.view import SORT_KEYS, Snapshot, View

from .job_rows import job_rows
from .side_panels import PANEL_LINES, PANELS_WIDTH, panel_lines, panels
from .tier_bars import tier_bars
from .wording import Canvas, count, line

ONCE_ROWS = 40
"""Jobs in a frame that is printed."""
LEAST_ROWS = 3
"""Lines that are kept for jobs before anything else is shown but the tiers."""


def frame(snapshot: Snapshot, view: View, canvas: Canvas) -> RenderableType:
    """A frame that fills the canvas. The view is one within it (``rows_of``)."""
    rows = rows_of(snapshot, view, canvas)
    parts = _above(snapshot, view, canvas)
    jobs, last = _jobs(snapshot, view, canvas, rows), _keys(snapshot, view, canvas, rows)
    layout = Layout()
    layout.split_column(
        *(Layout(part, size=lines) for part, lines in parts),
        Layout(jobs),
        Layout(last, size=1),
    )
    return layout


def rows_of(snapshot: Snapshot, view: View, canvas: Canvas) -> int:
    """Jobs that have room in a frame."""
    above = sum(lines for _, lines in _above(snapshot, view, canvas))
    return max(0, (canvas.height or 0) - above - 2)  # the titles, the keys


def printed(snapshot: Snapshot, view: View, canvas: Canvas) -> RenderableType:
    """A frame to be printed, as long as it is."""
    parts = [part for part, _ in _above(snapshot, view, canvas)]
    jobs, left_out = _jobs(snapshot, view, canvas, ONCE_ROWS), _left_out(snapshot, view)
    return Group(*parts, jobs, *([_lines(left_out)[0]] if left_out else []))


def _above(snapshot: Snapshot, view: View, canvas: Canvas) -> list[tuple[RenderableType, int]]:
    """Parts above the jobs, and how many lines each takes."""
    looked_at = view.of(snapshot)
    engine = looked_at.total
    head = [_head(looked_at, view), *_sentences(snapshot, view, canvas)]
    bars, counts = tier_bars(engine, canvas), [_counts(engine, canvas), *_failures(engine)]
    found: list[tuple[RenderableType, int]] = [_lines(head), _lines(bars)]
    left = (canvas.height or 1000) - len(head) - len(bars) - LEAST_ROWS - 2
    if left >= len(counts):
        left -= len(counts)
        found.append(_lines(counts))
    blank = _lines([Text(" ")])  # rich puts a placeholder where a text is empty
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


def _head(snapshot: Snapshot, view: View) -> Text:
    versions = f"tiered-kv {snapshot.version}, vLLM {snapshot.vllm_version}"
    return line((snapshot.url, "bold"), f"  {versions}, policy {snapshot.total.policy}")


def _sentences(snapshot: Snapshot, view: View, canvas: Canvas) -> list[Text]:
    """Sentences on what is not as usual, broken into lines."""
    found = list[Text]()
    if snapshot.problem is not None:
        found += _wrapped(f"{snapshot.problem} What follows was before.", "bold red", canvas)
    engines = len(snapshot.all_engines)
    if engines > 1 and view.engine is None:
        found += _wrapped(f"{engines} engines, added up: e shows each alone.", "yellow", canvas)
    elif engines > 1:
        words = f"Engine {view.engine} of {engines}: e goes on to the next, and then to all."
        found += _wrapped(words, "yellow", canvas)
    return found


def _wrapped(sentence: str, style: str, canvas: Canvas) -> list[Text]:
    lines, current = list[str](), ""
    for word in sentence.split():
        if current and len(current) + 1 + len(word) > canvas.width:
            lines.append(current)
            current = word
        else:
            current = f"{current} {word}" if current else word
    return [line((one, style)) for one in (*lines, current)]


def _counts(engine: EngineReading, canvas: Canvas) -> Text:
    jobs = engine.jobs
    held = (f"{jobs.held:,} held", "bold red" if jobs.held else "")
    turns = f"{jobs.running:,} running, {jobs.queued:,} queued, "
    known = f"; {count(jobs.known, 'job')}, {jobs.waiting:,} waiting"
    if not canvas.is_wide:
        return line(("turns ", "bold"), turns, held, known)
    blocks = f"{jobs.pinned_blocks:,} of {count(jobs.most_pinned, 'block')}"
    return line(
        (f"{'turns':<12} ", "bold"),
        turns,
        held,
        known,
        f"; {count(jobs.pins, 'pin')}, {blocks}",
        f"; {count(jobs.expected_up, 'context')} to come up in time",
    )


def _failures(engine: EngineReading) -> list[Text]:
    """A line with the failures, if there were any."""
    found = {name: engine.counters.get(name, 0) for name in FAILURES}
    words = ", ".join(f"{name} {times:,.0f}" for name, times in found.items() if times)
    return [line((f"{words}: see tiered-kv doctor URL", "red"))] if words else []


def _jobs(snapshot: Snapshot, view: View, canvas: Canvas, rows: int) -> RenderableType:
    looked_at = view.of(snapshot)
    jobs = in_order(looked_at.jobs, view.order, backwards=view.backwards)
    turned = ", backwards" if view.backwards else ""
    return job_rows(
        jobs[view.top : view.top + rows],
        looked_at.total.now,
        canvas.width,
        several=len(snapshot.all_engines) > 1,
        names=f"job, by {view.order.value}{turned}",
    )


def _left_out(snapshot: Snapshot, view: View) -> list[Text]:
    """A line with how many jobs are not shown, if there are such."""
    shown = len(view.of(snapshot).jobs)
    if shown <= ONCE_ROWS and snapshot.whole:
        return []
    words = f"The first {min(ONCE_ROWS, shown)} of {_known(snapshot, view)}."
    return [line((f"{words} GET /tiered_kv/jobs lists all.", "dim"))]


def _known(snapshot: Snapshot, view: View) -> str:
    looked_at = view.of(snapshot)
    seen, known = len(looked_at.jobs), looked_at.total.jobs.known
    return f"{seen:,}" if snapshot.whole else f"{seen:,} seen, {known:,} known"


def _keys(snapshot: Snapshot, view: View, canvas: Canvas, rows: int) -> Text:
    shown = len(view.of(snapshot).jobs)
    last = min(view.top + rows, shown)
    place = f"{min(view.top + 1, last):,}-{last:,} of {_known(snapshot, view)}"
    if canvas.is_wide:
        sorts = "  ".join(f"{key} {order.value}" for key, order in SORT_KEYS.items())
        keys = f"  q quit  {sorts}  space b arrows move"
    else:
        keys = f"  q quit  {' '.join(SORT_KEYS)} sort  space b move"
    more = "  e engine" if len(snapshot.all_engines) > 1 else ""
    return line((place, "bold"), (keys + more, "dim"))
