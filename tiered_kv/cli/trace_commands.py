"""``tiered-kv trace``: analyze traces, tell a job's story, and export for other programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_kv.trace.analysis import Figures, analyze
from tiered_kv.trace.comparison import Comparison, compare
from tiered_kv.trace.job_story import of_job, story
from tiered_kv.trace.page.html_page import html_of
from tiered_kv.trace.page.trace_page import ReadTrace, page_of
from tiered_kv.trace.perfetto import Event, perfetto_events
from tiered_kv.trace.steps.step_figures import StepFigures, step_figures
from tiered_kv.trace.steps.step_tracks import StepReader, has_steps, step_events
from tiered_kv.trace.trace_header import recorder_events
from tiered_kv.trace.trace_reader import RecordReader, TraceReader
from tiered_kv.trace.turn_table import TurnTable

from .bench_commands import answer_what_if
from .terminal import AsJson, Command, one_sentence, print_json, refuse
from .trace_report import (
    figure_tables,
    headline,
    print_comparison,
    print_figures,
    print_steps,
)

app = typer.Typer(
    help="Read what a server wrote to TIERED_KV_TRACE.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Where = Annotated[Path, typer.Argument(metavar="PATH", help="What TIERED_KV_TRACE names.")]


@app.callback()
def trace() -> None:
    """Read what a server wrote to TIERED_KV_TRACE."""


@app.command("analyze", cls=Command, short_help="Say what the turns of a trace come to.")
def analyze_command(
    path: Where,
    other: Annotated[
        Path | None, typer.Argument(metavar="[PATH]", help="A trace of the same jobs.")
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="ID", help="Tell the story of this job instead.")
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="Simulate the jobs under another policy instead: a name, module:Class, or stock.",
        ),
    ] = None,
    recorded: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="The policy of the trace, for --what-if, if it is a module:Class.",
        ),
    ] = None,
    job_order: Annotated[
        bool | None,
        typer.Option(
            "--job-order/--arrival-order",
            help="Order of requests under that policy; as recorded if none is given.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Analyze a trace: jobs, waits, sources of prompts, pins, forecasts and decisions, and steps if
    it has them. With two traces, compare their jobs. With --what-if, simulate its jobs under
    another policy. docs/trace.md has the definitions.

    Exit code 1 if a line is no record.
    """
    paths = [path] if other is None else [path, other]
    if job is not None and other is not None:
        refuse("a job's story is told from one trace: leave the other out")
    if what_if is not None:
        if job is not None or other is not None:
            refuse("--what-if takes one trace, and neither another one nor a job")
        answer_what_if(path, what_if, recorded=recorded, job_order=job_order, as_json=as_json)
        return
    if job_order is not None or recorded is not None:
        refuse("--recorded, --job-order and --arrival-order are for --what-if")
    with one_sentence():
        readers = [TraceReader(one) for one in paths]
        of_steps = [StepReader(one) if has_steps(one) else None for one in paths]
        if job is not None:
            _tell(readers[0], job, as_json=as_json)
        else:
            tables = [TurnTable(reader) for reader in readers]
            _say(paths, readers, tables, of_steps, as_json=as_json)
    if any(reader.bad_lines for reader in _all(readers, of_steps)):
        raise typer.Exit(1)


def _all(readers: list[TraceReader], of_steps: list[StepReader | None]) -> list[RecordReader[Any]]:
    return [*readers, *(reader for reader in of_steps if reader is not None)]


def _say(
    paths: list[Path],
    readers: list[TraceReader],
    tables: list[TurnTable],
    of_steps: list[StepReader | None],
    *,
    as_json: bool,
) -> None:
    figures = [analyze(table) for table in tables]
    steps = [step_figures(reader) if reader is not None else None for reader in of_steps]
    compared = compare(*tables) if len(tables) == 2 else None
    if as_json:
        traces = [
            {"path": str(path), **asdict(one), "steps": _steps(said), **_bad(reader)}
            for path, one, said, reader in zip(paths, figures, steps, readers, strict=True)
        ]
        print_json(traces[0] if compared is None else {"traces": traces, **asdict(compared)})
        return
    _say_text(paths, figures, steps, compared)
    _warn(_all(readers, of_steps))


def _steps(figures: StepFigures | None) -> dict[str, Any] | None:
    return asdict(figures) if figures is not None else None


def _say_text(
    paths: list[Path],
    figures: list[Figures],
    steps: list[StepFigures | None],
    compared: Comparison | None,
) -> None:
    for path, one, of_steps in zip(paths, figures, steps, strict=True):
        print_figures(str(path), one)
        if of_steps is not None:
            print_steps(of_steps)
    if compared is not None:
        print_comparison(compared)


def _bad(reader: RecordReader[Any]) -> dict[str, object]:
    return {"bad_lines": reader.bad_lines, "bad": [str(one) for one in reader.bad]}


def _warn(readers: Sequence[RecordReader[Any]]) -> None:
    for reader in readers:
        for one in reader.bad:
            typer.echo(f"no record: {one}", err=True)
        if reader.bad_lines > len(reader.bad):
            typer.echo(f"and {reader.bad_lines - len(reader.bad):,} more lines", err=True)


def _tell(reader: TraceReader, job: str, *, as_json: bool) -> None:
    found = of_job(reader, job)
    if not found:
        refuse(f"{reader.path} holds no turn of {job!r} whose story is over")
    told = [story(one) for one in found]
    if as_json:
        print_json({"path": str(reader.path), "job": job, "turns": told, **_bad(reader)})
        return
    for sentences in told:
        typer.echo(" ".join(sentences))
    _warn([reader])


@app.command("report", cls=Command, short_help="Draw a trace on one page.")
def report_command(
    path: Where,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page.")] = Path(
        "report.html"
    ),
) -> None:
    """Draw a trace on one HTML page that needs nothing else, no network either: a lane a job, tiers
    over time, distributions, the worst turns and the figures of analyze.

    Exit code 1 if a line is no record.
    """
    reader = TraceReader(path)
    with one_sentence():
        found = ReadTrace.of(reader)
        tables = figure_tables(path.name, found.figures)
        parts = html_of(page_of(found, headline(found.figures), tables))
        first = next(parts)  # nothing is written if plotly is missing
        _write(out, chain([first], parts))
    _warn([reader])
    if reader.bad_lines:
        raise typer.Exit(1)


def _write(out: Path, texts: Iterable[str]) -> None:
    """Write a file that is as private as the trace."""
    out.touch(mode=0o600)
    with out.open("w", encoding="utf-8") as file:
        file.writelines(texts)


@app.command("export", cls=Command, short_help="Write a trace for another program.")
def export_command(
    path: Where,
    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="For ui.perfetto.dev and chrome://tracing.")
    ] = False,
    continuum: Annotated[
        bool, typer.Option("--continuum", help="As Continuum's scheduler_timestamps.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="A file; else stdout.")
    ] = None,
) -> None:
    """Write a trace as JSON for another program.

    Exit code 1 if a line is no record.
    """
    if perfetto == continuum:
        refuse("say for which program: --perfetto or --continuum")
    reader = TraceReader(path)
    of_steps = [StepReader(path)] if perfetto and has_steps(path) else []
    with one_sentence():
        if perfetto:
            _export(out, _chrome(chain(perfetto_events(reader), *map(step_events, of_steps))))
        else:
            _export(out, _recorder(reader))
    readers: list[RecordReader[Any]] = [reader, *of_steps]
    _warn(readers)
    if any(one.bad_lines for one in readers):
        raise typer.Exit(1)


def _export(out: Path | None, texts: Iterator[str]) -> None:
    first = next(texts)  # the trace is read before anything is written
    if out is None:
        sys.stdout.writelines(chain([first], texts))
    else:
        _write(out, chain([first], texts))


def _recorder(reader: TraceReader) -> Iterator[str]:
    yield json.dumps(recorder_events(reader)) + "\n"


def _chrome(events: Iterable[Event]) -> Iterator[str]:
    """One JSON object, an event a line."""
    before = '{"traceEvents":[\n'
    for event in events:
        yield before + json.dumps(event)
        before = ",\n"
    yield f"{before if before[0] == '{' else ''}\n]}}\n"
