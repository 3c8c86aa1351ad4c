"""The page of a trace: its figures, lanes, tiers over time, distributions and worst turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from tiered_kv.trace.analysis import UNNAMED, Figures, Spread, analyze
from tiered_kv.trace.job_story import moment, plain, secs, story
from tiered_kv.trace.trace_reader import TraceReader
from tiered_kv.trace.traced_jobs import TracedJobs
from tiered_kv.trace.turn_record import StoryEnd
from tiered_kv.trace.turn_table import Column, JobName, TurnTable

from .charts import (
    Chart,
    histogram_chart,
    lane_chart,
    prompt_chart,
    resting_chart,
    source_name,
)
from .colours import CLASS_COLOURS, SOURCE_COLOURS
from .histograms import histograms
from .html_page import Page, Section, Story, TextTable
from .kv_places import Stays
from .lanes import Lanes
from .over_time import SOURCES, OverTime
from .worst_turns import WorstTurn, WorstTurns

LEAST_S = 1e-3
"""Shortest time that a histogram tells from others, seconds."""
MOST_CLASSES = 6
"""Classes of gaps that are drawn, those with the most gaps. Policies have three."""
_LABEL = 26
"""Characters of a job's name beside its lane."""


@dataclass(frozen=True, slots=True)
class ReadTrace:
    """A trace, read once from its begin to its end.

    Attributes:
        figures: those of ``trace analyze``.
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
            FileNotFoundError: there is none.
        """
        worst = WorstTurns()
        table = TurnTable(worst.watch(reader))
        return cls(reader, table, analyze(table), worst.found())


def page_of(trace: ReadTrace, headline: Mapping[str, str], tables: Sequence[TextTable]) -> Page:
    """The page of a trace.

    Args:
        headline, tables: its figures as texts: the first to be seen, and all of them.
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
    text = "The figures of tiered-kv trace analyze. docs/trace.md has their definitions."
    sections.append(Section("Figures", text, tables=tables))
    return Page(f"Trace {trace.reader.path.name}", _about(trace), headline, sections)


def _about(trace: ReadTrace) -> list[str]:
    table, reader = trace.table, trace.reader
    if not len(table):
        return ["This trace holds no turn whose story is over."]
    begin = float(table["arrived"].min())
    span = secs(trace.figures.span_s)
    told = [f"{moment(begin)} to {moment(begin + trace.figures.span_s)}, {span}."]
    engines = {(one.replica, one.started): one for one in reader.headers}
    for one in list(engines.values())[-1:]:
        model = PurePath(one.model).name if one.model.startswith("/") else one.model
        many = f" The last of {len(engines):,} engines." if len(engines) > 1 else ""
        told.append(
            f"Model {model}, policy {one.policy}, {one.vram_blocks:,} blocks of VRAM of "
            f"{one.block_size:,} tokens, tiered-kv {one.version}.{many}"
        )
    if reader.bad_lines:
        told.append(f"{reader.bad_lines:,} lines of the trace are no records, and left out.")
    return told


# -- lanes --------------------------------------------------------------------------------------


def _lanes(table: TurnTable, jobs: TracedJobs, stays: Stays) -> Section:
    heading = "Jobs"
    if not len(jobs.begins):
        return Section(heading, "No turn of this trace was of a job.")
    lanes = Lanes.of(table, jobs, stays)
    names = [_label(table.job_name(int(jobs.name[one])).job) for one in lanes.job]
    told = [
        _told(table.job_name(int(jobs.name[one])), jobs, int(one), int(drawn), float(began))
        for one, drawn, began in zip(lanes.job, lanes.drawn, lanes.began, strict=True)
    ]
    text = (
        "A lane is a job. Thick bars are its turns. The thin bars between them say where its KV "
        "lay: pinned, where the next turn found most of it, or, if none followed, where it was to "
        "wait. Grey is KV that was lost, and had to be computed again. Drag over a part of any "
        "chart to see it larger; a double click shows all of it again."
    )
    if lanes.left_out:
        text += (
            f" Of {len(jobs.begins):,} jobs {len(names):,} are drawn: the {lanes.slowest:,} that "
            f"took longest, and an even sample of the others. {lanes.left_out:,} are left out."
        )
    cut = int((lanes.drawn < jobs.turns[lanes.job]).sum())
    if cut:
        text += f" Of {cut:,} jobs only the first {int(lanes.drawn.max()):,} turns are drawn."
    if lanes.apart:
        text += " The time of each lane begins with its job."
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
        "The contexts of jobs, by where they lay as the lanes tell it. Tokens that jobs share are "
        "counted for each of them, and what is nowhere was lost and computed again."
    )
    charts = {
        "KV of all jobs by tier": resting_chart(curves),
        "Prompts by where they were found": prompt_chart(curves),
    }
    charts = {name: chart for name, chart in charts.items() if chart["data"]}
    return Section("Tiers over time", text if charts else "No turn was admitted.", charts)


def _distributions(trace: ReadTrace, jobs: TracedJobs) -> Section:
    table, figures = trace.table, trace.figures
    whole = jobs.whole.astype(bool)
    found = {
        "Job completion time": _times(jobs.completion_s[whole], "jobs", figures.jobs.completion_s),
        "Wait for admission": _times(table["times.admitted_s"], "turns", figures.waits.queue_s),
        "Time to the first token": _times(
            table["times.first_token_s"], "turns", figures.waits.first_token_s
        ),
        "Gaps that a job came back from, by class": _gaps(table),
        "Prompt tokens of a turn, by where they were found": _restored(table),
    }
    charts = {name: chart for name, chart in found.items() if chart is not None}
    text = "The bars' widths grow with the powers of ten. Times below 1 ms are counted at 1 ms."
    if missing := [name for name, chart in found.items() if chart is None]:
        text += f" The trace tells nothing of: {', '.join(missing).lower()}."
    return Section("Distributions", text, charts)


def _times(values: Column, what: str, spread: Spread | None) -> Chart | None:
    found = histograms({"": values}, LEAST_S)
    if not found:
        return None
    return histogram_chart(found, {}, y=what, spread=spread)


def _gaps(table: TurnTable) -> Chart | None:
    returned = table.says("gap.end", StoryEnd.RETURNED.value)
    counts = np.bincount(table["decision.gap_class"][returned])
    words = [table.words["decision.gap_class"].of[at] for at in np.argsort(-counts)[:MOST_CLASSES]]
    names = {word: plain(word) or UNNAMED for word in sorted(words)}
    sets = {
        word: table["gap.gap_s"][returned & table.says("decision.gap_class", word)]
        for word in names
    }
    found = histograms(sets, LEAST_S)
    if not found:
        return None
    return histogram_chart(found, CLASS_COLOURS, y="gaps", names=names)


def _restored(table: TurnTable) -> Chart | None:
    sets = {source: table[source][table[source] > 0] for source in SOURCES}
    found = histograms(sets, 1.0)
    if not found:
        return None
    names = {source: source_name(source) for source in SOURCES}
    return histogram_chart(found, SOURCE_COLOURS, y="turns", times=False, names=names)


# -- worst turns --------------------------------------------------------------------------------


def _worst(worst: Sequence[WorstTurn]) -> Section:
    text = "Those that waited longest for their first token, or for their end if they had none."
    return Section("Worst turns", text, stories=[_story(one) for one in worst])


def _story(worst: WorstTurn) -> Story:
    one = worst.turn
    job = f"job {plain(one.job)}" if one.job is not None else "no job"
    more = [" ".join(story(one))]
    if worst.before is not None:
        more.insert(0, " ".join(story(worst.before)))
    return Story(f"Turn {one.turn} of {job}", " ".join(worst.reasons()), more)
