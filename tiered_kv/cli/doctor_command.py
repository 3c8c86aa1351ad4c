"""``tiered-kv doctor``: what is wrong with a machine, its settings or a running server."""

from __future__ import annotations

from typing import Annotated

import typer

from tiered_kv.doctor.examination import examine
from tiered_kv.doctor.finding import Verdict
from tiered_kv.doctor.running_server import check_server

from .terminal import AsJson, print_json, print_table

COLUMNS = {"check": False, "": False, "seen": False, "what to change": False}


def doctor_command(
    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="Address of a running server, as http://HOST:8000."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check what is installed, settings in the environment, memory, cores and the disk of
    TIERED_KV_SSD_PATH, and a running server. Run it with the server's environment, as its user.

    Exit code 1 if a check fails.
    """
    findings = list(examine(beside=url is not None))
    if url is not None:
        findings += check_server(url)
    good = all(one.verdict is not Verdict.FAIL for one in findings)
    if as_json:
        print_json({"good": good, "checks": [one.as_json() for one in findings]})
    else:
        print_table(
            COLUMNS, [[one.check, one.verdict.value, one.seen, one.advice] for one in findings]
        )
    if not good:
        raise typer.Exit(1)
