"""A store works with unusual disks and clocks."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.codecs.raw import RawCodec
from tiered_kv.storage.disk.files import FileLayer, RealFiles
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import PAGE_FORMAT, page_bytes, page_key
from tiered_kv.testing.files import FaultyFiles
from tiered_kv.testing.segment_store import store_options

KEYS = [page_key(name) for name in range(10)]
Opener = Callable[..., SegmentStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Opener]:
    opened: list[SegmentStore] = []

    def open_store(files: FileLayer | None = None, root: Path = tmp_path / "root") -> SegmentStore:
        codec = RawCodec(PAGE_FORMAT)
        opened.append(SegmentStore(store_options(root), codec, lambda i, t, f: RawCodec(f), files))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


def put(store: SegmentStore) -> None:
    assert store.put([(key, page_bytes(key)) for key in KEYS]) == frozenset()


def check(store: SegmentStore) -> None:
    """Assert that every page is found and has the correct bytes."""
    wanted = [(key, np.zeros(PAGE_FORMAT.page_bytes, np.uint8)) for key in KEYS]
    assert store.get(wanted) == frozenset()
    assert all(np.array_equal(out, page_bytes(key)) for key, out in wanted)


@pytest.mark.parametrize("operation", ["create", "pwrite"])
@pytest.mark.parametrize("direct", [True, False])
def test_a_full_disk_does_not_hide_direct_io_support(
    open_store: Opener, operation: str, direct: bool
) -> None:
    store = open_store()
    put(store)
    store.close()
    files = FaultyFiles()
    if not direct:
        files.refuse_direct()
    files.fail(operation, errno.ENOSPC)
    store = open_store(files)
    assert files.struck == (1 if direct or operation == "create" else 0)
    assert store.direct is direct
    check(store)


class WatchedFiles(RealFiles):
    """Records which folders were made durable."""

    def __init__(self) -> None:
        self.synced: list[Path] = []

    def sync_folder(self, folder: Path) -> None:
        self.synced.append(folder)
        super().sync_folder(folder)


def test_every_created_folder_is_durable(open_store: Opener, tmp_path: Path) -> None:
    files = WatchedFiles()
    folder = open_store(files, root=tmp_path / "deep" / "root").options.folder
    assert set(folder.parents) & set(files.synced) == {
        tmp_path,
        tmp_path / "deep",
        tmp_path / "deep" / "root",
        folder.parent,
    }
    files.synced.clear()
    RealFiles.make_folders(files, folder)
    assert files.synced == [], "they are there already"


@pytest.mark.parametrize("now", [-5.0, -1e9, 0.0, 2.0**63, 2.0**70])
def test_any_clock_value_is_harmless(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch, now: float
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now)
        store = open_store()
        put(store)
        store.close()
        store = open_store()
        check(store)
        store.close()
    check(open_store())
