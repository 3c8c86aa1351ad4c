"""Folders for memory files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path / "memory"
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made) / "memory"
