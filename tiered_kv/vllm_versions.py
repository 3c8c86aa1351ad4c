"""Versions of vLLM that the connector works with."""

from __future__ import annotations

import re

OLDEST = (0, 30)
NEWEST_TESTED = (0, 33)


def parse_version(version: str) -> tuple[int, int] | None:
    """First two numbers of a version; None if it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match is not None else None
