"""Folders for memory files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def huge_pages() -> Path | None:
    """A mount of hugetlbfs that this process may write, if there is one."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    found = (Path(place) for _, place, kind, *_ in mounts if kind == "hugetlbfs")
    return next((path for path in found if os.access(path, os.W_OK)), None)


@pytest.fixture(params=["disk", "tmpfs", "hugetlbfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path / "memory"
        return
    place = Path("/dev/shm") if request.param == "tmpfs" else huge_pages()
    if place is None:
        pytest.skip("no hugetlbfs is mounted here")
    with tempfile.TemporaryDirectory(dir=place) as made:
        yield Path(made) / "memory"
