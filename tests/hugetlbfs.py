"""Folders on hugetlbfs, if it is mounted. Files there consist of huge pages, and are written by
mapping only."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def huge_folder() -> Iterator[Path]:
    """A folder on hugetlbfs; skips the test where none is mounted that this process may write."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    found = (Path(place) for _, place, kind, *_ in mounts if kind == "hugetlbfs")
    place = next((path for path in found if os.access(path, os.W_OK)), None)
    if place is None:
        pytest.skip("no hugetlbfs is mounted here")
    with tempfile.TemporaryDirectory(dir=place) as made:
        yield Path(made)
