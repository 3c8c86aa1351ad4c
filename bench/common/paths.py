"""Folders of the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout: its text is what agents read, and results are kept in folders of it."""

TRACES = ROOT.parent / "shared" / "traces"
"""Recorded sessions, unless a command is told of others."""
