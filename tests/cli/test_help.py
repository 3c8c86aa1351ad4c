"""Help texts as a new user sees them."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tiered_kv.cli.app import app

COMMANDS = {
    "ls": "PATH",
    "stat": "PATH",
    "verify": "PATH",
    "gc": "PATH",
    "export": "PATH [KEY] OUT",
}


def said(*arguments: object, code: int = 0) -> str:
    """Run a command, and return all of its output."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_the_version_is_printed() -> None:
    assert said("--version") == f"tiered-kv {version('tiered-kv')}\n"


@pytest.mark.parametrize(
    "command",
    [
        *([], ["plan"], ["doctor"], ["top"], ["store"], *(["store", name] for name in COMMANDS)),
        *(["snapshot"], ["restore"], ["fork"], ["inspect"], ["diff"]),
    ],
)
def test_help_texts_contain_no_python_types(command: list[str]) -> None:
    text = said(*command, "--help").replace("[ARGS]...", "[ARGS]")
    for of_python in ("{", "}", "list[", "str]", "..."):
        assert of_python not in text
    if len(command) == 2:
        assert f"Usage: root store {command[1]} [OPTIONS] {COMMANDS[command[1]]}\n" in text


def test_a_missing_argument_has_its_name_from_the_help() -> None:
    assert "Missing argument 'PATH'" in said("store", "gc", code=2)


def test_gc_checks_its_path_before_its_options(tmp_path: Path) -> None:
    """A missing folder, or a folder without stores, is reported before invalid options."""
    for options in ([], ["--all", "--older-than", 3], ["--fingerprint", "xyz"]):
        assert "does not exist" in said("store", "gc", tmp_path / "nowhere", *options, code=2)
        assert "contains no store" in said("store", "gc", tmp_path, *options, code=2)
