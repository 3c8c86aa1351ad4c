"""The command line: ``tiered-kv``."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from . import bench_commands, memory_commands, store_commands, trace_commands
from .doctor_command import doctor_command
from .plan_command import plan_command
from .snapshots import snapshot_commands
from .terminal import Command
from .top_command import top_command

app = typer.Typer(
    help="Tools for the KV cache that tiered-kv keeps.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(store_commands.app, name="store")
app.add_typer(memory_commands.app, name="memory")
app.command(
    "plan", cls=Command, short_help="Tell what tiers hold of a model, and the flags to serve it."
)(plan_command)
app.command(
    "doctor", cls=Command, short_help="Check a machine, its settings and a running server."
)(doctor_command)
app.command("top", cls=Command, short_help="Show a running server, live in the terminal.")(
    top_command
)
app.add_typer(trace_commands.app, name="trace")
snapshot_commands.add_to(app)
bench_commands.add_to(app)


def say_version(asked: bool) -> None:
    """Print the version and exit, if asked to.

    Raises:
        typer.Exit: the version was printed.
    """
    if asked:
        typer.echo(f"tiered-kv {version('tiered-kv')}")
        raise typer.Exit


@app.callback()
def root(
    asked: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=say_version, help="Say the version."),
    ] = False,
) -> None:
    """Manage the KV cache that tiered-kv keeps on SSD; snapshot, restore and fork jobs; read
    traces, and measure what it gains."""


def main() -> None:
    """Run the command that the arguments name."""
    app()


if __name__ == "__main__":
    main()
