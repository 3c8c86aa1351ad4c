"""Output of every benchmark: a readable table, or one JSON object with ``--json``."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
ModelFolder = Annotated[
    Path | None, typer.Option("--model", help="A model's folder; the small model if none is given.")
]


def one_of(names: Iterable[str]) -> Callable[[str | None], str | None]:
    """Make a check of an option, which refuses any word but ``names``."""
    known = tuple(names)

    def check(said: str | None) -> str | None:
        if said is not None and said not in known:
            raise typer.BadParameter(f"{said} is none of {', '.join(known)}")
        return said

    return check


def command_line(text: str) -> typer.Typer:
    """Make a command line, to which commands are added."""
    return typer.Typer(
        help=text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def run_benchmark(
    command: Callable[..., None], text: str | None, arguments: Sequence[str] | None = None
) -> None:
    """Run a benchmark as its command line says. Exits on errors and ``--help``. SIGTERM interrupts
    it as SIGINT does, so that its servers end with it. Main thread only.

    Args:
        text: the module's docstring, whose first line is the help.
        arguments: words of the command line; the process's own if None.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(help=(text or "").partition("\n")[0])(command)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        app(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


def progress() -> Progress:
    """A progress bar on standard error, so that standard output stays the result's."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


@contextmanager
def only_result_on_stdout() -> Iterator[None]:
    """Send what others print (vLLM logs to standard output) to standard error instead."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def run_command(
    run: Callable[[], int],
    failures: tuple[type[Exception], ...],
    stopped: str | Callable[[], str],
    *,
    signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
) -> int:
    """Run a command; what it returns, 1 on one of ``failures``, 130 when it is interrupted.

    A failure's message, and ``stopped`` after an interrupt, go to standard error. Main thread only.

    Args:
        stopped: a sentence, or what makes one when it is needed.
        signals: interrupt it, also where a shell has set them to be ignored.
    """
    for number in signals:
        signal.signal(number, _interrupt)
    console = Console(stderr=True, highlight=False, emoji=False, markup=False, soft_wrap=True)
    try:
        return run()
    except failures as error:
        console.print(f"error: {error}", style="red")
        return 1
    except KeyboardInterrupt:
        console.print(stopped if isinstance(stopped, str) else stopped())
        return 130


def show(title: str, result: Mapping[str, Any], as_json: bool) -> None:
    """Print a benchmark's result on standard output."""
    if as_json:
        print(json.dumps(result))
        return
    table = Table(title=title, title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in result.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def without_nan(value: Any) -> Any:
    """The value with None for NaN, which JSON does not have: a mean over nothing."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value
