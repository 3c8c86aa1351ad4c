"""Commands for benchmarks. A benchmark is imported only when it runs, because it needs the extra
``bench``.

This module also runs ``tiered-kv trace analyze PATH --what-if POLICY``, and prints the answer as
JSON or as tables.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from tiered_kv.formatting import NONE, percent

from .terminal import exit_unless, one_sentence, print_json, print_table, refuse


@contextmanager
def needs_packages(command: str) -> Iterator[None]:
    """Exit with a message if the block needs a package that is not installed.

    Args:
        command: name of the command, for the message.

    Raises:
        typer.Exit: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        lacks = (error.name or "").partition(".")[0]
        if lacks == "tiered_kv":
            raise
        if lacks == "vllm":
            refuse(f"{command} needs vLLM: install tiered-kv into the environment that has it.")
        refuse(f"{command} needs {lacks}: install it with pip install 'tiered-kv[bench]'.")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark with its own command line.

    Attributes:
        name: name of the command.
        module: module of its typer app.
        summary: description in ``tiered-kv --help``.
    """

    name: str
    module: str
    summary: str

    def run(self, arguments: list[str]) -> None:
        """Run the benchmark with these arguments, as ``python -m`` would.

        Raises:
            typer.Exit: a package that the benchmark needs is not installed.
        """
        with needs_packages(self.name):  # the benchmark imports some packages late
            app = importlib.import_module(self.module).app
            app(arguments, prog_name=f"tiered-kv {self.name}")


BENCHMARKS = (
    Benchmark(
        "bench", "tiered_kv.bench.live.__main__", "Benchmark running servers with agent jobs."
    ),
    Benchmark(
        "replay",
        "tiered_kv.bench.replay.__main__",
        "Start servers and replay recorded agent jobs on them.",
    ),
    Benchmark(
        "sim", "tiered_kv.bench.sim.__main__", "Simulate agent jobs on GPU servers. Needs no GPU."
    ),
)


def add_to(app: typer.Typer) -> None:
    """Add the benchmarks to a command line. They receive all arguments, including ``--help``."""
    for benchmark in BENCHMARKS:
        settings: dict[str, Any] = {
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "help_option_names": [],
        }
        command = app.command(benchmark.name, help=benchmark.summary, context_settings=settings)
        command(_command(benchmark))


def _command(benchmark: Benchmark) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        benchmark.run(context.args)

    return command


MODULE = "tiered_kv.bench.sim.what_if.answer"
"""Module that answers ``--what-if``. It imports vLLM, so it is imported only on demand."""
BELIEVED = 0.15
"""Relative error of the simulation above which a warning is printed."""


def answer_what_if(
    path: Path, policy: str, *, recorded: str | None, job_order: bool | None, as_json: bool
) -> None:
    """Print the estimated result of serving the jobs of a trace with another policy.

    Args:
        policy: name of the other policy, ``module:Class``, or ``stock``.
        recorded: the trace's own policy, if it is a ``module:Class``.
        job_order: True to order requests by job under the other policy, False to order them by
            arrival; None keeps the recorded order.

    Raises:
        typer.Exit: with 1 if a line is not a record, with 2 if the jobs cannot be simulated or a
            package is missing.
    """
    with needs_packages("trace analyze --what-if"), one_sentence(), _errors_only():
        found = asdict(
            importlib.import_module(MODULE).what_if(
                path, policy, recorded=recorded, job_order=job_order
            )
        )
    if as_json:
        print_json(found)
    else:
        _print(found)
        for line in found["bad"]:
            typer.echo(f"not a record: {line}", err=True)
    exit_unless(not found["bad_lines"])


@contextmanager
def _errors_only() -> Iterator[None]:
    """Suppress log messages below level ERROR until the block ends, such as vLLM's warning about a
    missing GPU.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _print(found: Mapping[str, Any]) -> None:
    names = _names(found)
    runs = {
        f"{names[0]}, recorded": found["recorded"],
        f"{names[0]}, simulated": found["simulated"],
        f"{names[1]}, simulated": found["what_if"],
    }
    title = f"{found['path']}: {found['jobs']:,} jobs, {found['turns']:,} turns"
    rows = [[name, *_row(one)] for name, one in runs.items()]
    columns = ("mean", "P50", "P95", "VRAM", "CPU memory", "SSD", "computed", "again")
    print_table({title: False, **dict.fromkeys(columns, True)}, rows)
    ratios = {
        f"{names[0]}: simulated over recorded": found["simulated_over_recorded"],
        f"{names[1]} over {names[0]}, both simulated": found["what_if_over_simulated"],
    }
    rows = [
        [name, *(_ratio(one, of) for of in ("mean", "p50", "p95"))] for name, one in ratios.items()
    ]
    print_table({"ratios of job times": False, "mean": True, "P50": True, "P95": True}, rows)
    costs = found["costs"]
    typer.echo(
        f"A step takes {1e3 * costs['step_s']:.3g} ms, a computed token "
        f"{1e3 * costs['token_s']:.3g} ms; fitted to the trace, with a median error of "
        f"{100 * costs['error']:.0f}%."
    )
    off = found["simulated_over_recorded"].get("mean")
    if off is None or abs(off - 1) > BELIEVED:
        typer.echo(
            "The simulation of the recorded policy is off by more than 15%: do not rely on the "
            "simulation of the other policy."
        )
    typer.echo("Limits of this simulation:")
    for line in found["limits"]:
        typer.echo(f"- {line}")


def _names(found: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names of the two policies, with their request orders if these differ."""
    names, orders = (found["recorded_policy"], found["policy"]), found["job_order"]
    if orders[0] == orders[1] or found["policy"] == "stock":
        return names
    said = [
        f"{name} ({'job' if one else 'arrival'} order)"
        for name, one in zip(names, orders, strict=True)
    ]
    return said[0], said[1]


def _row(one: Mapping[str, Any]) -> list[str]:
    times = [f"{one[name]:,.3f} s" for name in ("mean_s", "p50_s", "p95_s")]
    shares = [percent(one[name]) for name in ("vram", "cpu", "ssd", "recomputed")]
    return [*times, *shares, f"{one['again']:,}"]


def _ratio(ratios: Mapping[str, float], name: str) -> str:
    return f"{ratios[name]:.3f}" if name in ratios else NONE
