"""The systemd unit and its environment file, parsed as systemd does."""

from __future__ import annotations

import shlex
from configparser import ConfigParser
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "deploy"
UNIT, ENVIRONMENT = FOLDER / "tiered-kv.service", FOLDER / "tiered-kv.env"
STATE = "/var/lib/tiered-kv"
"""Folder that the service may write to."""


def service() -> dict[str, str]:
    """Return the directives of the ``[Service]`` section, by name."""
    parser = ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return dict(parser["Service"])


def environment(*, suggested: bool = False) -> dict[str, str]:
    """Return the variables of the environment file, by name.

    Args:
        suggested: include variables that are commented out.
    """
    lines = ENVIRONMENT.read_text().splitlines()
    if suggested:
        lines = [line.removeprefix("#") for line in lines]
    pairs = (line.partition("=") for line in lines)
    return {name: value for name, equals, value in pairs if equals and name.isidentifier()}


def command() -> list[str]:
    """Return the words of the unit's command, with its variables expanded: ``${NAME}`` to one word,
    ``$NAME`` to several."""
    variables, words = environment(), list[str]()
    for word in shlex.split(service()["ExecStart"]):
        if word.startswith("${"):
            words.append(variables[word.removeprefix("${").removesuffix("}")])
        elif word.startswith("$"):
            words += variables[word.removeprefix("$")].split()
        else:
            words.append(word)
    return words
