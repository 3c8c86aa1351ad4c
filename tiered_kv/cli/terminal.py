"""Output of the ``tiered-kv`` commands: results on standard output, messages on standard error.

A command prints one JSON object with ``--json``, and readable text otherwise. Invalid input yields
one sentence on standard error and exit code 2.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperCommand

from tiered_kv.config import ADMIN_TOKEN
from tiered_kv.errors import TieredKVError
from tiered_kv.storage.store.locks import StoreError

BAD_INPUT = 2

FILE_WIDTH = 160
"""Width of tables written to a file or a pipe, in columns."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
ServerUrl = Annotated[str, typer.Argument(metavar="URL", help="Server address: http://HOST:8000.")]
Token = Annotated[
    str | None,
    typer.Option(
        envvar=ADMIN_TOKEN,
        show_envvar=False,
        help=f"Admin token of the server. Defaults to {ADMIN_TOKEN} in the environment.",
    ),
]


class Command(TyperCommand):
    """Command whose usage line shows arguments by their metavars, without the braces that Typer
    adds.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param for param in self.params if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(str(param.metavar) for param in arguments)]


@contextmanager
def one_sentence() -> Iterator[None]:
    """Convert errors that the user can fix to one sentence and exit code 2."""
    try:
        yield
    except (StoreError, TieredKVError, OSError) as error:
        refuse(sentence_of(error))


def sentence_of(error: Exception) -> str:
    """Return a description of an error. The description of an operating system error includes the
    file, if known.
    """
    if not isinstance(error, OSError):
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def take_any_text() -> None:
    """Make standard output and standard error replace characters that the terminal's encoding
    lacks, instead of raising UnicodeEncodeError.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def refuse(sentence: str) -> NoReturn:
    """Print the reason for refusing the command, and exit with 2.

    Raises:
        typer.Exit: always.
    """
    typer.echo(f"tiered-kv: {sentence}", err=True)
    raise typer.Exit(BAD_INPUT)


def skipped(odd: Mapping[Path, str]) -> dict[str, str]:
    """Print skipped paths and reasons on standard error. Returns them for ``--json``."""
    for path, reason in odd.items():
        typer.echo(f"skipped: {path}: {reason}", err=True)
    return {str(path): reason for path, reason in odd.items()}


def print_json(result: Mapping[str, object]) -> None:
    """Print one JSON object on one line."""
    typer.echo(json.dumps(result))


def report(
    as_json: bool,
    result: Mapping[str, object],
    columns: Mapping[str, bool],
    rows: Iterable[Sequence[str]],
    *,
    good: bool = True,
) -> None:
    """Print the result of a command as JSON or as a table.

    Args:
        result: the JSON object.
        columns, rows: the table; see ``print_table``.

    Raises:
        typer.Exit: with 1, after printing, unless the result is good.
    """
    if as_json:
        print_json(result)
    else:
        print_table(columns, rows)
    exit_unless(good)


def exit_unless(good: bool) -> None:
    """Exit with 1 unless the result of a command is good.

    Raises:
        typer.Exit: the result is not good.
    """
    if not good:
        raise typer.Exit(1)


def print_table(columns: Mapping[str, bool], rows: Iterable[Sequence[str]]) -> None:
    """Print a table.

    Args:
        columns: by column name, True if the column contains numbers, which are right-aligned.
        rows: the cells of each row, in the order of the columns.
    """
    table = Table(box=None, pad_edge=False)
    for name, is_number in columns.items():
        table.add_column(name, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)


@contextmanager
def bar(what: str, total: float) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on standard error, if standard error is a terminal. Yields a function
    that advances the bar by an amount. The bar is complete when the amounts add up to ``total``.
    """
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with progress:
        task = progress.add_task(what, total=total)
        yield lambda amount: progress.advance(task, amount)
