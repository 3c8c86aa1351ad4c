"""The page of a trace: figures, lanes, tiers over time, distributions, and the worst turns.

The worst turns are those that waited longest for their first token. Sentences explain their waits.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from tiered_kv.formatting import count, moment, plain, secs
from tiered_kv.trace.analysis import UNNAMED, Figures, analyze
from tiered_kv.trace.job_story import story
from tiered_kv.trace.trace_reader import TraceReader
from tiered_kv.trace.traced_jobs import TracedJobs
from tiered_kv.trace.turn_record import StoryEnd, TurnRecord
from tiered_kv.trace.turn_table import JobName, TurnTable

from .charts import (
    SOURCE_NAMES,
    SOURCES,
    Chart,
    OverTime,
    histogram_chart,
    lane_chart,
    stacked_charts,
)
from .html_page import Page, Section, Story, TextTable
from .kv_places import Lanes, Stays
from .page_style import CLASS_COLOURS, SOURCE_COLOURS

MOST_WORST = 10
"""Number of worst turns that are kept."""
MOST_JOBS = 8_192
"""Maximum number of jobs whose last turn is remembered. An engine expects the return of no more
jobs than this.
"""
_TELLING = 0.05
"""Minimum fraction of a wait that a reason must explain to be reported."""


@dataclass(frozen=True, slots=True)
class WorstTurn:
    """One of the turns that waited longest.

    Attributes:
        turn: the turn.
        before: the job's previous turn; None if unknown.
    """

    turn: TurnRecord
    before: TurnRecord | None

    @property
    def waited_s(self) -> float:
        """Time until the first token, or until the end of a turn without a first token, seconds."""
        return _waited_s(self.turn)

    def reasons(self) -> list[str]:
        """Return the reasons for the wait as sentences, longest part first."""
        parts = sorted(_parts(self), key=lambda part: -part[0])
        whole = max(self.waited_s, 1e-9)
        first, told = _first(self.turn), list[str]()
        for took_s, why in parts:
            if took_s / whole >= _TELLING:
                told.append(f"For {secs(took_s)} ({took_s / whole:.0%}) {why}.")
        return [first, *told]


class WorstTurns:
    """The worst turns of a stream of records. Memory use does not grow with the number of
    records.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, WorstTurn]] = []
        self._last: OrderedDict[tuple[object, ...], TurnRecord] = OrderedDict()
        self._seen = 0

    def watch(self, records: Iterable[TurnRecord]) -> Iterator[TurnRecord]:
        """Yield the records unchanged, and remember the worst turns."""
        for one in records:
            job = (one.job, one.client, one.replica)
            before = self._last.pop(job, None) if one.job is not None else None
            known = before if before is not None and before.turn < one.turn else None
            self._seen += 1
            entry = (_waited_s(one), -self._seen, WorstTurn(one, known))
            if len(self._heap) < MOST_WORST:
                heapq.heappush(self._heap, entry)
            elif entry[0] > self._heap[0][0]:
                heapq.heapreplace(self._heap, entry)
            if one.job is not None and one.gap.end is not StoryEnd.OVER:
                self._last[job] = one
                if len(self._last) > MOST_JOBS:
                    self._last.popitem(last=False)
            yield one

    def found(self) -> list[WorstTurn]:
        """Return the worst turns so far, worst first."""
        return [entry[2] for entry in sorted(self._heap, key=lambda entry: entry[:2], reverse=True)]


def _waited_s(one: TurnRecord) -> float:
    first_s = one.times.first_token_s
    return one.times.end_s if first_s is None else first_s


def _first(one: TurnRecord) -> str:
    if one.times.admitted_s is None:
        return f"It was never admitted, and ended after {secs(one.times.end_s)}."
    if one.times.first_token_s is None:
        return f"It ended after {secs(one.times.end_s)} without a first token."
    return f"Its first token arrived after {secs(one.times.first_token_s)}."


def _parts(worst: WorstTurn) -> Iterator[tuple[float, str]]:
    """Yield the parts of the wait, in seconds, each with its reason."""
    times, whole_s = worst.turn.times, worst.waited_s
    admitted_s = whole_s if times.admitted_s is None else times.admitted_s
    scheduled_s = whole_s if times.scheduled_s is None else times.scheduled_s
    yield times.held_s, "its new job was held back"
    yield times.pages_s, "it waited for pages to be promoted from the tiers below CPU memory"
    yield admitted_s - times.held_s - times.pages_s, "it waited for blocks of VRAM"
    if times.admitted_s is not None:
        yield scheduled_s - admitted_s, _restored_tokens(worst.turn)
        yield whole_s - scheduled_s, _computed(worst)


def _restored_tokens(one: TurnRecord) -> str:
    count = one.tokens.cpu + one.tokens.ssd
    return f"its {count:,} tokens outside VRAM were restored" if count else "it waited for a step"


def _computed(worst: WorstTurn) -> str:
    tokens, before = worst.turn.tokens, worst.before
    what = f"it computed {tokens.recomputed:,} of its {tokens.prompt:,} prompt tokens"
    if not tokens.lost:
        return f"{what}, {tokens.new:,} of which were new" if tokens.new else what
    had = f"{what}, {tokens.lost:,} of which had KV before"
    if before is None:
        return had
    pin = before.pin.end
    how = f"its pin ended ({pin.value})" if pin is not None else "it was not pinned"
    return f"{had}: its KV was lost in the gap of {secs(before.gap.gap_s or 0.0)}, where {how}"


MOST_CLASSES = 6
"""Maximum number of gap classes that are drawn, by number of gaps. Built-in policies have three."""
_LABEL = 26
"""Maximum length of a job's name next to its lane, characters."""


@dataclass(frozen=True, slots=True)
class ReadTrace:
    """A trace, read once from start to end.

    Attributes:
        reader: the reader of the trace.
        table: the turns as columns.
        figures: the figures of ``trace analyze``.
        worst: the turns that waited longest.
    """

    reader: TraceReader
    table: TurnTable
    figures: Figures
    worst: Sequence[WorstTurn]

    @classmethod
    def of(cls, reader: TraceReader) -> ReadTrace:
        """Read a trace.

        Raises:
            FileNotFoundError: the trace does not exist.
        """
        worst = WorstTurns()
        table = TurnTable(worst.watch(reader))
        return cls(reader, table, analyze(table), worst.found())


def page_of(trace: ReadTrace, headline: Mapping[str, str], tables: Sequence[TextTable]) -> Page:
    """Return the page of a trace.

    Args:
        headline: the most important figures, as texts.
        tables: all figures, as texts.
    """
    jobs = TracedJobs.of(trace.table)
    sections = list[Section]()
    if len(trace.table):
        stays = Stays.of(trace.table, jobs)
        sections = [
            _lanes(trace.table, jobs, stays),
            _over_time(OverTime.of(trace.table, stays)),
            _distributions(trace, jobs),
            _worst(trace.worst),
        ]
    text = "The figures of tiered-kv trace analyze, which docs/trace.md defines."
    sections.append(Section("Figures", text, tables=tables))
    return Page(f"Trace {trace.reader.path.name}", _about(trace), headline, sections)


def _about(trace: ReadTrace) -> list[str]:
    table, reader = trace.table, trace.reader
    if not len(table):
        return ["This trace has no turns whose gap has ended."]
    begin = float(table["arrived"].min())
    span = secs(trace.figures.span_s)
    told = [f"{moment(begin)} to {moment(begin + trace.figures.span_s)}, {span}."]
    engines = {(one.replica, one.started): one for one in reader.headers}
    for one in list(engines.values())[-1:]:
        model = PurePath(one.model).name if one.model.startswith("/") else one.model
        many = f" This is the last of {len(engines):,} engines." if len(engines) > 1 else ""
        told.append(
            f"Model {model}, policy {one.policy}, {one.vram_blocks:,} blocks of VRAM of "
            f"{one.block_size:,} tokens, tiered-kv {one.version}.{many}"
        )
    if reader.bad_lines:
        told.append(f"Ignored {count(reader.bad_lines, 'line')} of the trace that cannot be read.")
    return told


# -- lanes --------------------------------------------------------------------------------------


def _lanes(table: TurnTable, jobs: TracedJobs, stays: Stays) -> Section:
    heading = "Jobs"
    if not len(jobs.begins):
        return Section(heading, "No turn of this trace belongs to a job.")
    lanes = Lanes.of(table, jobs, stays)
    names = [_label(table.job_name(int(jobs.name[one])).job) for one in lanes.job]
    told = [
        _told(table.job_name(int(jobs.name[one])), jobs, int(one), int(drawn), float(began))
        for one, drawn, began in zip(lanes.job, lanes.drawn, lanes.began, strict=True)
    ]
    text = (
        "Each lane is a job. Thick bars are its turns. The thin bars between them show where "
        "its KV was: pinned, where the next turn found most of it, or, without a next turn, "
        "where it was placed. Grey is KV that was lost and recomputed. Drag to zoom into a "
        "chart; double-click to reset it."
    )
    if lanes.left_out:
        text += (
            f" Of {len(jobs.begins):,} jobs, {len(names):,} are drawn: the {lanes.slowest:,} "
            f"that took longest, and an even sample of the others. {lanes.left_out:,} are "
            "left out."
        )
    cut = int((lanes.drawn < jobs.turns[lanes.job]).sum())
    if cut:
        text += f" Of {cut:,} jobs, only the first {int(lanes.drawn.max()):,} turns are drawn."
    if lanes.apart:
        text += " The time of each lane starts with its job."
    return Section(heading, text, {"": lane_chart(lanes, names, told)})


def _label(job: str) -> str:
    short = plain(job) or "(empty)"
    return short if len(short) <= _LABEL else f"{short[: _LABEL - 8]}…{short[-7:]}"


def _told(name: JobName, jobs: TracedJobs, job: int, drawn: int, began_s: float) -> str:
    turns, took = int(jobs.turns[job]), secs(float(jobs.completion_s[job]))
    shown = f", of which {drawn:,} are drawn" if drawn < turns else ""
    client = f" of client {plain(name.client)}" if name.client else ""
    return (
        f"{plain(name.job)}{client}: {turns:,} turns{shown}, {took}, "
        f"from {secs(began_s)} after the first arrival"
    )


# -- tiers and distributions --------------------------------------------------------------------


def _over_time(curves: OverTime) -> Section:
    text = (
        "The contexts of jobs by place, as in the lanes. Tokens shared by jobs count once per "
        "job. Lost KV was recomputed."
    )
    names = ("KV of all jobs by tier", "Prompts by where they were found")
    both = zip(names, stacked_charts(curves), strict=True)
    charts = {name: chart for name, chart in both if chart["data"]}
    return Section("Tiers over time", text if charts else "No turn was admitted.", charts)


def _distributions(trace: ReadTrace, jobs: TracedJobs) -> Section:
    table, figures = trace.table, trace.figures
    whole = jobs.whole.astype(bool)
    waits = figures.waits
    times = {
        "Job completion time": (jobs.completion_s[whole], "jobs", figures.jobs.completion_s),
        "Wait for admission": (table["times.admitted_s"], "turns", waits.queue_s),
        "Time to the first token": (table["times.first_token_s"], "turns", waits.first_token_s),
    }
    found = {
        **{
            name: histogram_chart({"": values}, what, spread=spread)
            for name, (values, what, spread) in times.items()
        },
        "Gaps that ended with a turn, by class": _gaps(table),
        "Prompt tokens of a turn, by where they were found": _restored(table),
    }
    charts = {name: chart for name, chart in found.items() if chart is not None}
    text = "Bar widths are logarithmic. Times below 1 ms count as 1 ms."
    if missing := [name for name, chart in found.items() if chart is None]:
        text += f" The trace has no data for: {', '.join(missing).lower()}."
    return Section("Distributions", text, charts)


def _gaps(table: TurnTable) -> Chart | None:
    returned = table.says("gap.end", StoryEnd.RETURNED.value)
    counts = np.bincount(table["decision.gap_class"][returned])
    words = [table.words["decision.gap_class"].of[at] for at in np.argsort(-counts)[:MOST_CLASSES]]
    names = {word: plain(word) or UNNAMED for word in sorted(words)}
    sets = {
        word: table["gap.gap_s"][returned & table.says("decision.gap_class", word)]
        for word in names
    }
    return histogram_chart(sets, "gaps", colours=CLASS_COLOURS, names=names)


def _restored(table: TurnTable) -> Chart | None:
    sets = {source: table[source][table[source] > 0] for source in SOURCES}
    return histogram_chart(sets, "turns", times=False, colours=SOURCE_COLOURS, names=SOURCE_NAMES)


# -- worst turns --------------------------------------------------------------------------------


def _worst(worst: Sequence[WorstTurn]) -> Section:
    text = "The turns that waited longest for their first token, or for their end if they had none."
    return Section("Worst turns", text, stories=[_story(one) for one in worst])


def _story(worst: WorstTurn) -> Story:
    one = worst.turn
    job = f"job {plain(one.job)}" if one.job is not None else "no job"
    more = [" ".join(story(one))]
    if worst.before is not None:
        more.insert(0, " ".join(story(worst.before)))
    return Story(f"Turn {one.turn} of {job}", " ".join(worst.reasons()), more)
