"""Folders of the repository."""

from __future__ import annotations

from pathlib import Path

_ABOVE = Path(__file__).resolve().parents[2]

ROOT = _ABOVE if (_ABOVE / "pyproject.toml").is_file() else Path.cwd()
"""The checkout, or the folder where a command of the installed package runs. Results are kept in
folders of it, and the text of a checkout is what agents read."""

TRACES = ROOT.parent / "shared" / "traces"
"""Recorded sessions, unless a command is told of others."""
