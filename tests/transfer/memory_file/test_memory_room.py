"""A memory file is allocated completely or not at all. The error states how much space is
missing."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.transfer.memory_file.made_memory import (
    GEOMETRY,
    key_of,
    keys_in,
    open_in,
    save,
)
from tiered_kv.errors import ConfigError
from tiered_kv.plain_files import opened
from tiered_kv.storage.disk.files import BLOCK, RealFiles
from tiered_kv.transfer.memory_file.opening import open_memory

NAME = "0-0.slots"


def test_a_lack_of_space_is_reported_with_the_amount(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has too little space, as in a container with a small /dev/shm. The error states
    the existing and the required space and names two remedies, and no file is created."""
    monkeypatch.setattr(RealFiles, "free", lambda self, folder: 64 << 20)
    with pytest.raises(ConfigError) as said:
        open_in(folder, slots=1 << 20, slot_bytes=1 << 20)
    sentence = str(said.value)
    assert f"{folder} has space for 0.06 GiB" in sentence
    assert "rank 0 needs 1024.13 GiB" in sentence
    assert "--shm-size" in sentence
    assert "TIERED_KV_CPU_GIB" in sentence
    assert list(folder.iterdir()) == []
    assert issubclass(ConfigError, ValueError)


def test_a_failed_allocation_leaves_no_file_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    real = os.posix_fallocate
    monkeypatch.setattr(
        os, "posix_fallocate", lambda fd, at, n: (full if n > BLOCK else real)(fd, at, n)
    )
    with pytest.raises(ConfigError, match="provides no more memory, but the CPU memory of rank 0"):
        open_in(folder)
    assert list(folder.iterdir()) == []


def test_a_limit_on_the_file_size_does_not_crash_the_process(folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(ConfigError, match="provides no more memory"):
            open_in(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(folder.iterdir()) == []
    open_in(folder).close()


def test_a_file_with_holes_on_a_full_tmpfs_is_refused_and_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = open_in(folder)
    save(memory, 0, 0)
    memory.close()

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(ConfigError):
            open_in(folder)
    assert keys_in(open_in(folder)) == {0: key_of(0)}


def test_a_folder_that_cannot_be_created_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"used \(.*\): make the server's user its owner"):
        open_in(tmp_path / "file" / "memory")


def test_a_file_that_is_replaced_while_it_is_opened_is_not_mapped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_in(folder).close()

    def replacing(path: Path, flags: int) -> AbstractContextManager[int]:
        path.rename(path.with_name("old"))
        path.write_bytes(b"")
        return opened(path, flags)

    monkeypatch.setattr("tiered_kv.transfer.memory_file.opening.opened", replacing)
    with pytest.raises(ConfigError, match="replaced"):
        open_in(folder)


def test_large_slots_are_page_aligned(tmp_path: Path) -> None:
    geometry = replace(GEOMETRY, slots=33, slot_bytes=4 * BLOCK)
    memory = open_memory(tmp_path, geometry)
    assert memory.view.ctypes.data % BLOCK == 0
    assert memory.view.nbytes == 33 * 4 * BLOCK
    memory.close()
