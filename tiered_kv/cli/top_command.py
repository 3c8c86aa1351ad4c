"""``tiered-kv top``: a running server, live in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from tiered_kv.top.fetch.route_client import RouteClient, RouteError
from tiered_kv.top.fetch.watch import Watch
from tiered_kv.top.live_loop import can_show_unicode, live
from tiered_kv.top.render.screen import printed
from tiered_kv.top.render.wording import Canvas
from tiered_kv.top.view import View

from .terminal import FILE_WIDTH, ServerUrl, Token, refuse, take_any_text


def top_command(
    url: ServerUrl,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Time between two looks.")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame and end; so without a terminal.")
    ] = False,
    token: Token = None,
) -> None:
    """Show a running server: its tiers, its jobs, where their KV waits and until when. The server
    needs VLLM_PLUGINS=tiered_kv. Keys are named in the last line; q quits.

    Exit code 2 if the server does not answer.
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
