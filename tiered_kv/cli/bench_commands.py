"""Benchmarks as commands. They are imported when one is run: they need the extra ``bench``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import typer

from .terminal import refuse


@contextmanager
def needs_packages(command: str) -> Iterator[None]:
    """Say in a sentence which package a command needs that is not installed.

    Raises:
        typer.Exit: it is not.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        lacks = (error.name or "").partition(".")[0]
        if lacks == "tiered_kv":
            raise
        if lacks == "vllm":
            refuse(f"{command} needs vLLM: install tiered-kv where vLLM is installed.")
        refuse(f"{command} needs {lacks}: install it with pip install 'tiered-kv[bench]'.")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark with a command line of its own.

    Attributes:
        name: name of the command.
        module: module of its typer app.
        summary: line in ``tiered-kv --help``.
    """

    name: str
    module: str
    summary: str

    def run(self, arguments: list[str]) -> None:
        """Run it with these arguments, as ``python -m`` would.

        Raises:
            typer.Exit: packages that it needs are not installed.
        """
        with needs_packages(self.name):  # it imports some only once it knows what to do
            app = importlib.import_module(self.module).app
            app(arguments, prog_name=f"tiered-kv {self.name}")


BENCHMARKS = (
    Benchmark("bench", "tiered_kv.bench.live.__main__", "Play agent jobs on running servers."),
    Benchmark("replay", "tiered_kv.bench.replay.__main__", "Replay agent jobs on real servers."),
    Benchmark("sim", "tiered_kv.bench.sim.__main__", "Simulate agent jobs on GPUs."),
)


def add_to(app: typer.Typer) -> None:
    """Add the benchmarks to a command line. Every word, ``--help`` included, is theirs."""
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
