"""After a cache reset, no earlier page is served, whatever went wrong when the page was put."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.remote.open_pages import open_at
from tiered_kv.keys import PageKey
from tiered_kv.plain_files import opened
from tiered_kv.remote import breaker
from tiered_kv.storage import remote_pages
from tiered_kv.storage.remote_pages import RemotePages
from tiered_kv.storage.shared_root import own_folder
from tiered_kv.testing.conformance.store import PAGE_FORMAT, page_bytes, page_key
from tiered_kv.testing.valkey import ValkeyServer


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_pages, "FIRST_PAUSE_S", 0.1)


def put(pages: RemotePages, *keys: PageKey) -> frozenset[int]:
    return pages.put([(key, page_bytes(key)) for key in keys])


def reset(pages: RemotePages) -> None:
    """Delete all pages as the I/O thread does, and wait until they are deleted."""
    pages.clear()
    pages.close()
    for thread in threading.enumerate():
        if thread.name == remote_pages.THREAD_NAME:
            thread.join()


def found(address: str, *keys: PageKey, run: PageKey | None = None) -> list[PageKey]:
    """Return the keys whose pages another engine can read."""
    theirs, out = open_at(address), np.zeros((len(keys), PAGE_FORMAT.page_bytes), np.uint8)
    if run is not None:
        theirs.place(keys, [run] * len(keys))
    bad = theirs.get([(key, out[at]) for at, key in enumerate(keys)])
    theirs.close()
    return [key for at, key in enumerate(keys) if at not in bad]


@contextmanager
def mount_failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the indexes of shared folders unwritable."""

    def failing(path: Path, flags: int = os.O_RDONLY) -> AbstractContextManager[int]:
        if path.name == "index":
            raise OSError(errno.EIO, "the mount")
        return opened(path, flags)

    with monkeypatch.context() as patch:
        patch.setattr(own_folder, "opened", failing)
        yield


def test_pages_are_deleted_from_the_folder_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, key = f"file://{tmp_path}?gib=0.1", page_key(1)
    neighbour, ours = open_at(address), open_at(address)
    assert not put(neighbour, page_key(2))
    assert not put(ours, key)
    neighbour.close()  # releases its folder, which sorts before this engine's
    with mount_failing(monkeypatch):
        assert put(ours, page_key(3)) == {0}
    reset(ours)  # while failed calls pause the use of the folder
    assert not found(address, key)


def test_pages_are_deleted_on_the_servers_of_their_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine puts 64 pages on two servers, but remembers the runs of only 16 looked-up pages. A
    reset deletes all 64, because the engine remembers the runs of its own pages longer."""
    monkeypatch.setattr(remote_pages, "CALL_S", 20.0)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with ValkeyServer(folders[0]) as one, ValkeyServer(folders[1]) as two:
        address, run = f"valkey://{one.server},{two.server}", page_key(0)
        ours, keys = open_at(address), [page_key(number) for number in range(64)]
        with monkeypatch.context() as patch:
            patch.setattr(remote_pages, "MOST_RUNS", 16)
            for at in range(0, 64, 8):
                some = keys[at : at + 8]
                ours.place(some, [run] * 8)
                assert not put(ours, *some)
        assert found(address, *keys, run=run) == keys
        reset(ours)
        assert not found(address, *keys, run=run)


def test_a_page_that_a_server_stored_too_late_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ValkeyServer(tmp_path) as server:
        ours, key, other = open_at(server.url), page_key(1), page_key(2)
        assert not put(ours, other)
        monkeypatch.setattr(remote_pages, "CALL_S", 0.3)
        server.pause()
        assert put(ours, key) == {0}
        server.go_on()
        monkeypatch.setattr(remote_pages, "CALL_S", 20.0)
        while found(server.url, key) != [key]:  # the call is repeated after a while
            time.sleep(0.05)
        reset(ours)
        assert not found(server.url, key, other)


def test_a_page_that_a_folder_stored_despite_an_error_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.0)
    address = f"file://{tmp_path}?gib=0.1"
    ours, key, other = open_at(address), page_key(1), page_key(2)
    assert not put(ours, page_key(3))
    with mount_failing(monkeypatch):
        assert put(ours, key) == {0}
    assert not put(ours, other)  # rewrites the index, with both pages
    reset(ours)
    assert not found(address, key, other)
