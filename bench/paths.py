"""Paths of the repository and of recorded sessions, and a check that the tests are available."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ABOVE = Path(__file__).resolve().parents[1]
ROOT = _ABOVE if (_ABOVE / "pyproject.toml").is_file() else Path.cwd()
"""The checkout, or the current folder if the package is installed. Results are written to its
subfolders, and the demo's agents read its source files."""

TRACES = ROOT.parent / "shared" / "traces"
"""Default folder of recorded sessions."""


@contextmanager
def needs_checkout() -> Iterator[None]:
    """Exit with a message if the block cannot import the tests, which are not part of the installed
    package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "tests":
            raise
        sys.exit("This benchmark runs end-to-end tests of tiered-kv: start it in a checkout.")
