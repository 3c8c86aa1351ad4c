"""Every command in the documents is accepted by its parser."""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from tiered_kv.cli.app import app
from tiered_kv.cli.bench_commands import BENCHMARKS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
)
COMMAND = re.compile(r"(?:python -m (bench\.\w+)|(tiered-kv))((?: [^;#&]+)?)")
"""Matches a command of this project and its arguments."""
SPAN, BLOCK = (
    re.compile(r"`([^`\n]+)`"),
    re.compile(r"^```.*?\n(.*?)^```", re.DOTALL | re.MULTILINE),
)


def documented() -> list[str]:
    """Return the commands in all documents, one for each combination of words separated by
    ``|``."""
    found = dict[str, None]()
    for path in DOCUMENTS:
        text = path.read_text()
        lines = [line for block in BLOCK.findall(text) for line in typed(block)]
        spans = SPAN.findall(BLOCK.sub("", text))
        for line in (*lines, *spans):
            for part in line.replace(".venv/bin/", "").split(";"):
                command = part.partition("#")[0].strip()
                if COMMAND.fullmatch(command):
                    found.update(dict.fromkeys(alternatives(command)))
    return list(found)


def typed(block: str) -> list[str]:
    """Return the lines that a user types. If some lines have a prompt, the others are output."""
    lines = block.split("\n")
    prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return prompted or lines


def alternatives(command: str) -> Iterator[str]:
    """Yield every command that a command with ``|`` stands for."""
    for words in itertools.product(*(word.split("|") for word in command.split())):
        yield " ".join(words)


def parser_of(module: str | None) -> Any:
    """Return the click command of a benchmark, or of ``tiered-kv`` if ``module`` is None."""
    if module is None:
        return get_command(app)
    name = f"tiered_kv.{module}"
    found = importlib.import_module(name)
    if hasattr(found, "__path__"):
        found = importlib.import_module(f"{name}.__main__")
    if hasattr(found, "app"):
        return get_command(found.app)
    alone = typer.Typer(add_completion=False)
    alone.command()(found.main)
    return get_command(alone)


def parse(command: Any, words: list[str]) -> None:
    """Parse words with a click command. Raises the parser's exceptions."""
    while hasattr(command, "commands") and words:
        if words[0].startswith("--") and command.invoke_without_command:
            break  # the group's own options, as in ``tiered-kv bench --url``
        word, *words = words
        if word == "--version":
            return
        passed_on = {one.name: one.module.removeprefix("tiered_kv.") for one in BENCHMARKS}
        is_ours = command.commands.get("store") is not None
        if is_ours and word in passed_on:
            command = parser_of(passed_on[word].removesuffix(".__main__"))
            continue
        assert word in command.commands, f"there is no command {word}"
        command = command.commands[word]
    if words:  # a command without arguments is a mention of its name
        command.make_context("documented", words)


def test_there_are_commands_in_the_documents() -> None:
    found = documented()
    assert any(command.startswith("tiered-kv store") for command in found)
    assert any(command.startswith("python -m bench.") for command in found)


@pytest.mark.parametrize("command", documented())
def test_the_parser_accepts_the_command(command: str) -> None:
    matched = COMMAND.fullmatch(command)
    assert matched is not None
    try:
        parse(parser_of(matched[1]), shlex.split(matched[3]))
    except Exception as error:  # typer has no public name for its parser's errors
        # File names in the documents are placeholders. Files are checked after all words are
        # parsed.
        if "does not exist" not in str(error):
            raise


@pytest.mark.parametrize(
    "command",
    ["python -m bench.restore --jason", "tiered-kv stoer ls PATH", "tiered-kv store ls --no"],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    matched = COMMAND.fullmatch(command)
    assert matched is not None
    with pytest.raises(Exception, match=r"(?i)no such|no command"):
        parse(parser_of(matched[1]), shlex.split(matched[3]))
