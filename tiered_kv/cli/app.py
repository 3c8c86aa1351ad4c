"""The command line: ``tiered-kv``.

This module has the commands ``doctor`` and ``top``, and adds the commands of the other modules.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console

from tiered_kv.cli import bench_commands, memory_commands, store_commands, trace_commands
from tiered_kv.doctor.finding import Verdict, examine
from tiered_kv.doctor.running_server import check_server
from tiered_kv.top.live_loop import can_show_unicode, live
from tiered_kv.top.route_client import RouteClient, RouteError
from tiered_kv.top.screen import printed
from tiered_kv.top.view import View
from tiered_kv.top.watch import Watch
from tiered_kv.top.wording import Canvas

from .plan_command import plan_command
from .snapshots import snapshot_commands
from .terminal import (
    FILE_WIDTH,
    AsJson,
    Command,
    ServerUrl,
    Token,
    refuse,
    report,
    take_any_text,
)


def top_command(
    url: ServerUrl,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Refresh interval.")
    ] = 1.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Print one frame and exit. Implied when stdout is not a terminal."
        ),
    ] = False,
    token: Token = None,
) -> None:
    """Live view of a running server: tiers, jobs, and where each job's KV is kept. The server needs
    VLLM_PLUGINS=tiered_kv. The last line of the screen lists the keys; q quits.

    Exits with 2 if the server does not answer.
    """
    take_any_text()
    try:
        watch = Watch(RouteClient(url, token))
        first = watch.look()
    except RouteError as error:
        refuse(str(error))
    if once or not sys.stdout.isatty():
        console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
        canvas = Canvas(console.width, unicode=can_show_unicode(console))
        console.print(printed(first, View(), canvas))
        return
    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    if code := live(first, watch.look_again, View(), every, keys):
        raise typer.Exit(code)


COLUMNS = {"check": False, "": False, "seen": False, "what to change": False}


def doctor_command(
    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="Address of a running server: http://HOST:8000."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check installed versions, TIERED_KV_* variables, memory, cores, the disk of
    TIERED_KV_SSD_PATH, the remote store, and the running server at URL, if given. Run it in the
    server's environment, as the server's user.

    Exits with 1 if a check fails.
    """
    findings = list(examine(beside=url is not None))
    if url is not None:
        findings += check_server(url)
    good = all(one.verdict is not Verdict.FAIL for one in findings)
    result = {"good": good, "checks": [one.to_json() for one in findings]}
    rows = [[one.check, one.verdict.value, one.seen, one.advice] for one in findings]
    report(as_json, result, COLUMNS, rows, good=good)


app = typer.Typer(
    help="Inspect, size, benchmark and manage a tiered-kv server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(store_commands.app, name="store")
app.add_typer(memory_commands.app, name="memory")
app.command(
    "plan",
    cls=Command,
    short_help="Estimate what each tier can hold for a model, and print the flags to serve it.",
)(plan_command)
app.command(
    "doctor", cls=Command, short_help="Check a machine, its settings and a running server."
)(doctor_command)
app.command("top", cls=Command, short_help="Live view of a running server.")(top_command)
app.add_typer(trace_commands.app, name="trace")
snapshot_commands.add_to(app)
bench_commands.add_to(app)


def print_version(asked: bool) -> None:
    """Print the version and exit, if requested.

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
        typer.Option("--version", is_eager=True, callback=print_version, help="Print the version."),
    ] = False,
) -> None:
    """Inspect, size, benchmark and manage a tiered-kv server."""


def main() -> None:
    """Run the command that the process's arguments name."""
    app()


if __name__ == "__main__":
    main()
