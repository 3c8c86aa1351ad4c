"""``tiered-kv top``: a running server, live in the terminal."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer
from rich.console import Console

from tiered_kv.config import ADMIN_TOKEN
from tiered_kv.top.fetch.route_client import RouteClient, RouteError
from tiered_kv.top.fetch.watch import Watch
from tiered_kv.top.live_loop import can_show_unicode, live
from tiered_kv.top.render.screen import printed
from tiered_kv.top.render.wording import Canvas
from tiered_kv.top.view import View

from .terminal import FILE_WIDTH, refuse


def top_command(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="Address of the server, as http://HOST:8000."),
    ],
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Time between two looks.")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame and end; so without a terminal.")
    ] = False,
    token: Annotated[
        str | None,
        typer.Option(
            envvar=ADMIN_TOKEN,
            show_envvar=False,
            help=f"The server's {ADMIN_TOKEN}; by default that of the environment.",
        ),
    ] = None,
) -> None:
    """Show a running server: its tiers, its jobs, where their KV waits and until when. The server
    needs VLLM_PLUGINS=tiered_kv. Keys are named in the last line; q quits.

    Exit code 2 if the server does not answer.
    """
    for stream in (sys.stdout, sys.stderr):  # names of jobs may have any characters
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
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
