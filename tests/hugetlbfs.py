"""Folders on hugetlbfs. Files there consist of huge pages, and can be written only through a memory
mapping."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def huge_folder() -> Iterator[Path]:
    """Create a temporary folder on hugetlbfs. Skips the test if no writable hugetlbfs is
    mounted."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    found = (Path(place) for _, place, kind, *_ in mounts if kind == "hugetlbfs")
    place = next((path for path in found if os.access(path, os.W_OK)), None)
    if place is None:
        pytest.skip("no hugetlbfs is mounted here")
    with tempfile.TemporaryDirectory(dir=place) as made:
        yield Path(made)
