"""Stores on disk for the tests of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.store_disk import Disk
from tiered_kv.storage.store.store import SegmentStore


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "root")


@pytest.fixture
def live(disk: Disk) -> Iterator[SegmentStore]:
    """An open store with twenty pages."""
    store = disk.open()
    disk.put(store, *range(20))
    yield store
    store.close()
