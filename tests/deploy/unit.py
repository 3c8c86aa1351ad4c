"""The systemd unit and its environment file, parsed like systemd does."""

from __future__ import annotations

import shlex
from configparser import ConfigParser
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "deploy"
UNIT, ENVIRONMENT = FOLDER / "tiered-kv.service", FOLDER / "tiered-kv.env"
STATE = "/var/lib/tiered-kv"
"""Folder in which the service may write."""


def service() -> dict[str, str]:
    """Directives of the section ``[Service]``, by name."""
    parser = ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return dict(parser["Service"])


def environment(*, suggested: bool = False) -> dict[str, str]:
    """Variables of the environment file, by name.

    Args:
        suggested: with those that are commented out.
    """
    lines = ENVIRONMENT.read_text().splitlines()
    if suggested:
        lines = [line.removeprefix("#") for line in lines]
    pairs = (line.partition("=") for line in lines)
    return {name: value for name, equals, value in pairs if equals and name.isidentifier()}


def command() -> list[str]:
    """Words of the command, its variables replaced: ``${NAME}`` is one word, ``$NAME`` several."""
    variables, words = environment(), list[str]()
    for word in shlex.split(service()["ExecStart"]):
        if word.startswith("${"):
            words.append(variables[word.removeprefix("${").removesuffix("}")])
        elif word.startswith("$"):
            words += variables[word.removeprefix("$")].split()
        else:
            words.append(word)
    return words
