"""File locks are released when their descriptor is closed, and report their owner."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tiered_kv.file_lock import (
    describe_owner,
    is_locked,
    open_locked,
    owner_in_words,
    read_owner,
    short_owner,
)
from tiered_kv.storage.store.locks import StoreBusyError, StoreLock
from tiered_kv.transfer.memory_file.opening import lock_file

CREATE = os.O_RDWR | os.O_CREAT
OPEN = Path("/proc/self/fd")
"""Folder that lists this process's descriptors."""


def test_a_file_is_locked_until_its_descriptor_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fd = open_locked(path, CREATE)
    assert fd is not None
    assert is_locked(path)
    assert open_locked(path, CREATE, tries=1) is None
    os.close(fd)
    assert not is_locked(path)


def test_a_file_that_was_replaced_before_it_was_locked_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock, moved = tmp_path / "file", fcntl.flock, tmp_path / "moved"
    path.write_text("old")

    def late(fd: int, kind: int) -> None:
        if not moved.exists():
            path.rename(moved)  # renamed, not deleted, so that its file still has a name
            path.write_text("new")
        flock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    fd = open_locked(path, os.O_RDWR)
    assert fd is not None
    assert os.pread(fd, 3, 0) == b"new"
    os.close(fd)


@pytest.mark.parametrize("lock", [StoreLock, lambda folder: lock_file(folder / "0-0", make=True)])
def test_a_file_system_without_locks_leaves_no_descriptor_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: Callable[[Path], object]
) -> None:
    def refuse(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = len(list(OPEN.iterdir()))
    with pytest.raises(OSError, match="No locks available"):
        lock(tmp_path)
    assert len(list(OPEN.iterdir())) == before


def test_an_owner_fits_into_the_lock_file_and_is_read_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve", "ä" * 400])
    path, most = tmp_path / "file", 2048
    assert json.loads(describe_owner())["command"].startswith("serve ä")
    text = describe_owner(most)
    assert len(text) <= most
    path.write_bytes(b"data" + text.ljust(most, b"\0") + b"more")
    owner = read_owner(path, 4, most)
    assert owner["pid"] == os.getpid()
    assert owner_in_words(owner).startswith(f"{short_owner(owner)} () since ")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"[" * 50_000, b"\0" * 9])
def test_an_owner_that_is_torn_is_another_process(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    owner = read_owner(tmp_path / "file")
    assert owner == {}
    assert owner_in_words(owner) == short_owner(owner) == "another process"


def test_a_store_whose_lock_keeps_a_second_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock file keeps a second hard link, such as a backup tool's. The store is refused, and no
    descriptor stays open."""
    fstat = os.fstat

    def linked(fd: int) -> os.stat_result:
        found = fstat(fd)
        return os.stat_result((*found[:3], 2, *found[4:10]))

    before = {*OPEN.iterdir()}
    monkeypatch.setattr(os, "fstat", linked)
    monkeypatch.setattr(os.path, "samestat", lambda *_: True)
    with pytest.raises(StoreBusyError, match="other hard links"):
        StoreLock(tmp_path)
    assert {*OPEN.iterdir()} == before
