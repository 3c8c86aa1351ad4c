"""Helpers that call the snapshot commands, and parse their output."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from tiered_kv.cli.app import app

HOSTILE = "\x1b[2J[bold]j[/]\n\u202e"
"""Name with control characters that would change what a terminal shows."""


def invoke(*arguments: object, code: int = 0) -> Result:
    """Call ``tiered-kv``, and assert its exit code."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def rows(result: Result) -> dict[str, str]:
    """Return the last cell of each row of a printed table, by the first cell."""
    cells = [line.split("  ", 1) for line in result.stdout.splitlines()]
    return {row[0].strip(): row[-1].strip() for row in cells}


def sentence(*arguments: object) -> str:
    """Call a command that must be refused with one printable line, and return the message."""
    result = invoke(*arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("tiered-kv: ")
    assert result.stderr.count("\n") == 1
    assert result.stderr.rstrip("\n").isprintable()
    return result.stderr.removeprefix("tiered-kv: ").rstrip("\n")
