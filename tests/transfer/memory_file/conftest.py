"""Folders for memory files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hugetlbfs import huge_folder


@pytest.fixture(params=["disk", "tmpfs", "hugetlbfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    match request.param:
        case "disk":
            yield tmp_path / "memory"
        case "tmpfs":
            with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
                yield Path(made) / "memory"
        case _:
            with huge_folder() as huge:
                yield huge / "memory"
