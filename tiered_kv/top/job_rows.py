"""Jobs as table rows: where the KV of each job is, how long it stays there, and when the job is
expected to return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from tiered_kv.formatting import NONE, brief, thousands
from tiered_kv.status import JobState, JobStatus, Where

from .wording import PLACES, decision

GAP = 2
"""Number of spaces between two columns."""
LEAST_NAME, MOST_NAME = 12, 60
"""Minimum and maximum width of job names, characters."""
STYLES = {
    JobState.HELD: "bold red",
    JobState.QUEUED: "yellow",
    JobState.RUNNING: "green",
    JobState.WAITING: "",
    JobState.SILENT: "dim",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of jobs, next to the column of names.

    Attributes:
        cell: function that returns the text of the column for a job at a given time, seconds since
            the epoch.
        is_number: True if the texts are numbers, which are aligned to the right.
        several: True if the column is shown only if there are several engines.
    """

    title: str
    width: int
    cell: Callable[[JobStatus, float], Text]
    is_number: bool = True
    several: bool = False


def _expected(job: JobStatus, now: float) -> Text:
    if job.expected_at is None:
        return Text(NONE)
    late = now - job.expected_at
    if late <= 0:
        return Text(f"in {brief(-late)}")
    return Text(f"late {brief(late)}", "yellow")


def _place(job: JobStatus, now: float) -> Text:
    pinned = job.kv.where is Where.VRAM and job.kv.pinned_blocks and job.kv.until is not None
    return Text("VRAM pin" if pinned else PLACES[job.kv.where], "magenta" if pinned else "")


def _span(begin: float | None, end: float | None) -> Text:
    return Text(NONE if begin is None or end is None else brief(end - begin))


def _forecast(job: JobStatus, now: float) -> Text:
    gap = job.forecast
    if gap is None or gap.q50_s is None:
        return Text(NONE)
    return Text(f"{brief(gap.q50_s)}, {brief(gap.q90_s) if gap.q90_s is not None else 'more'}")


COLUMNS = (
    Column("job is", 7, lambda job, now: Text(job.state.value, STYLES[job.state]), is_number=False),
    Column("KV in", 8, _place, is_number=False),
    Column("pinned", 7, lambda job, now: _span(now, job.kv.until)),
    Column("back", 12, _expected),
    Column("since", 7, lambda job, now: _span(job.since, now)),
    Column("context", 7, lambda job, now: Text(thousands(job.context_tokens))),
    Column("engine", 6, lambda job, now: Text(str(job.engine)), several=True),
    Column("turn", 5, lambda job, now: Text(thousands(job.turn))),
    Column("decided", 18, lambda job, now: Text(decision(job.decision)), is_number=False),
    Column("promoted", 8, lambda job, now: _span(now, job.kv.back_at)),
    Column("gap q50, q90", 17, _forecast),
)
"""Columns in order of importance. If space is short, the last columns are left out."""


def job_rows(
    jobs: Sequence[JobStatus], now: float, width: int, *, several: bool, names: str = "job"
) -> Table:
    """Return a table of jobs with a header line. Columns that do not fit into the width are left
    out.

    Args:
        now: current time of the server, seconds since the epoch.
        width: width of the table, characters.
        several: True if there are several engines.
        names: header of the column of names.
    """
    shown = fitting(width, several=several)
    rest = width - sum(column.width + GAP for column in shown)
    table = Table(
        box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold", show_edge=False
    )
    name_width = max(1, min(MOST_NAME, rest))
    table.add_column(names, width=name_width, no_wrap=True, overflow="ellipsis")
    for column in shown:
        table.add_column(
            column.title,
            justify="right" if column.is_number else "left",
            width=column.width,
            no_wrap=True,
            overflow="ellipsis",
        )
    for job in jobs:
        name = Text(job.id, no_wrap=True, overflow="ellipsis")
        table.add_row(name, *(column.cell(job, now) for column in shown))
    return table


def fitting(width: int, *, several: bool) -> list[Column]:
    """Return the columns that fit next to the column of names."""
    left = width - LEAST_NAME
    found = list[Column]()
    for column in COLUMNS:
        if column.several and not several:
            continue
        if column.width + GAP > left:
            break
        left -= column.width + GAP
        found.append(column)
    return found
