"""``tiered-kv trace``: analyze traces, print a job's timeline, and convert traces for other
programs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from tiered_kv.trace.analysis import analyze
from tiered_kv.trace.comparison import compare
from tiered_kv.trace.job_story import of_job, story
from tiered_kv.trace.page.html_page import html_of
from tiered_kv.trace.page.trace_page import ReadTrace, page_of
from tiered_kv.trace.perfetto import Event, perfetto_events
from tiered_kv.trace.steps.step_figures import step_figures
from tiered_kv.trace.steps.step_tracks import StepReader, has_steps, step_events
from tiered_kv.trace.trace_header import recorder_events
from tiered_kv.trace.trace_reader import RecordReader, TraceReader
from tiered_kv.trace.turn_table import TurnTable

from .bench_commands import answer_what_if
from .terminal import AsJson, Command, exit_unless, one_sentence, print_json, refuse
from .trace_report import (
    figure_tables,
    headline,
    print_comparison,
    print_figures,
    print_steps,
)

app = typer.Typer(
    help="Analyze, draw and convert a server's trace.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Where = Annotated[
    Path, typer.Argument(metavar="PATH", help="Trace file (the value of TIERED_KV_TRACE).")
]


@app.callback()
def trace() -> None:
    """Analyze, draw and convert a server's trace."""


@app.command("analyze", cls=Command, short_help="Print statistics of a trace.")
def analyze_command(
    path: Where,
    other: Annotated[
        Path | None,
        typer.Argument(metavar="[PATH]", help="Second trace of the same jobs, to compare."),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Print the timeline of this job instead of statistics."),
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="Simulate the jobs under this policy instead: a name, module:Class, or stock.",
        ),
    ] = None,
    recorded: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help=(
                "Policy that was in use when the trace was written. Required with --what-if if "
                "that policy was given as module:Class."
            ),
        ),
    ] = None,
    job_order: Annotated[
        bool | None,
        typer.Option(
            "--job-order/--arrival-order",
            help="Request order for --what-if. Defaults to the order of the trace.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print statistics of a trace: jobs, waits, where prompts were found, pins, forecasts,
    decisions, and steps if the trace contains any. With two traces, compare their jobs. With
    --what-if, simulate the jobs under another policy. docs/trace.md defines every figure.

    Exits with 1 if a line is not a record.
    """
    paths = [path] if other is None else [path, other]
    if job is not None and other is not None:
        refuse("--job takes a single trace: remove the second PATH")
    if what_if is not None:
        if job is not None or other is not None:
            refuse("--what-if takes a single trace: remove the second PATH and --job")
        answer_what_if(path, what_if, recorded=recorded, job_order=job_order, as_json=as_json)
        return
    if job_order is not None or recorded is not None:
        refuse("--recorded, --job-order and --arrival-order need --what-if")
    with _reading(paths, quiet=as_json) as traces:
        if job is not None:
            _tell(traces[0].turns, job, as_json=as_json)
        else:
            _analyze(traces, as_json=as_json)


class _Trace(NamedTuple):
    """The readers of a trace.

    Attributes:
        turns: reader of the turns.
        steps: reader of the steps; empty if the trace has no steps.
    """

    turns: TraceReader
    steps: Sequence[StepReader]


@contextmanager
def _reading(paths: Sequence[Path], *, quiet: bool = False) -> Iterator[list[_Trace]]:
    """Open traces. When the block ends, invalid lines are reported unless ``quiet``.

    Raises:
        typer.Exit: with 1 if there are invalid lines, with 2 if a trace cannot be read.
    """
    with one_sentence():
        traces = [
            _Trace(TraceReader(path), [StepReader(path)] if has_steps(path) else [])
            for path in paths
        ]
        yield traces
    readers = list[RecordReader[Any]]()
    for one in traces:
        readers += (one.turns, *one.steps)
    for reader in () if quiet else readers:
        for bad in reader.bad:
            typer.echo(f"not a record: {bad}", err=True)
        if reader.bad_lines > len(reader.bad):
            typer.echo(f"and {reader.bad_lines - len(reader.bad):,} more invalid lines", err=True)
    exit_unless(not any(reader.bad_lines for reader in readers))


def _analyze(traces: Sequence[_Trace], *, as_json: bool) -> None:
    tables = [TurnTable(one.turns) for one in traces]
    figures = [analyze(table) for table in tables]
    steps = [step_figures(one.steps[0]) if one.steps else None for one in traces]
    compared = compare(*tables) if len(tables) == 2 else None
    found = list(zip((one.turns for one in traces), figures, steps, strict=True))
    if as_json:
        told = [
            {
                "path": str(reader.path),
                **asdict(one),
                "steps": asdict(of_steps) if of_steps is not None else None,
                **_bad(reader),
            }
            for reader, one, of_steps in found
        ]
        print_json(told[0] if compared is None else {"traces": told, **asdict(compared)})
        return
    for reader, one, of_steps in found:
        print_figures(str(reader.path), one)
        if of_steps is not None:
            print_steps(of_steps)
    if compared is not None:
        print_comparison(compared)


def _bad(reader: TraceReader) -> dict[str, object]:
    return {"bad_lines": reader.bad_lines, "bad": [str(one) for one in reader.bad]}


def _tell(reader: TraceReader, job: str, *, as_json: bool) -> None:
    found = of_job(reader, job)
    if not found:
        refuse(f"{reader.path} has no finished turn of job {job!r}")
    told = [story(one) for one in found]
    if as_json:
        print_json({"path": str(reader.path), "job": job, "turns": told, **_bad(reader)})
        return
    for sentences in told:
        typer.echo(" ".join(sentences))


@app.command("report", cls=Command, short_help="Write an HTML report of a trace.")
def report_command(
    path: Where,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Output file.")] = Path(
        "report.html"
    ),
) -> None:
    """Write a trace as one HTML page that works offline: a lane for each job, tiers over time,
    distributions, the slowest turns, and the statistics of analyze.

    Exits with 1 if a line is not a record.
    """
    with _reading([path]) as (trace,):
        found = ReadTrace.of(trace.turns)
        tables = figure_tables(path.name, found.figures)
        _write(out, html_of(page_of(found, headline(found.figures), tables)))


def _write(out: Path | None, texts: Iterator[str]) -> None:
    """Write texts to standard output, or to a file. A new file, like the trace, can be read only by
    its owner. Nothing is written before the first text is available, so errors while reading the
    trace leave no file.
    """
    whole = chain([next(texts)], texts)
    if out is None:
        sys.stdout.writelines(whole)
        return
    out.touch(mode=0o600)
    with out.open("w", encoding="utf-8") as file:
        file.writelines(whole)


@app.command("export", cls=Command, short_help="Convert a trace for another program.")
def export_command(
    path: Where,
    perfetto: Annotated[
        bool,
        typer.Option("--perfetto", help="Write events for ui.perfetto.dev and chrome://tracing."),
    ] = False,
    continuum: Annotated[
        bool, typer.Option("--continuum", help="Write scheduler_timestamps, as Continuum does.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Output file. Defaults to stdout."),
    ] = None,
) -> None:
    """Convert a trace to JSON for another program.

    Exits with 1 if a line is not a record.
    """
    if perfetto == continuum:
        refuse("choose a format: --perfetto or --continuum")
    with _reading([path]) as (trace,):
        if perfetto:
            of_steps = map(step_events, trace.steps)
            _write(out, _chrome(chain(perfetto_events(trace.turns), *of_steps)))
        else:
            _write(out, _recorder(trace.turns))


def _recorder(reader: TraceReader) -> Iterator[str]:
    yield json.dumps(recorder_events(reader)) + "\n"


def _chrome(events: Iterable[Event]) -> Iterator[str]:
    """Yield the pieces of one JSON object, with one event per line."""
    before = '{"traceEvents":[\n'
    for event in events:
        yield before + json.dumps(event)
        before = ",\n"
    yield f"{before if before[0] == '{' else ''}\n]}}\n"
