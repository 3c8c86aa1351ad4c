"""A memory file has one owner, and becomes free when the owner dies."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.transfer.memory_file.made_memory import (
    GEOMETRY,
    key_of,
    keys_in,
    open_in,
    save,
    write_file,
)
from tiered_kv.file_lock import try_lock
from tiered_kv.transfer.memory_file.opening import MemoryBusyError, lock_file

NAME = "0-0.slots"


def test_a_second_owner_is_refused_with_the_name_of_the_first(folder: Path) -> None:
    memory = open_in(folder)
    with pytest.raises(MemoryBusyError, match=f"in use by process {os.getpid()} on") as said:
        open_in(folder)
    assert "TIERED_KV_CPU_PATH" in str(said.value)
    memory.close()
    open_in(folder).close()


def test_memory_files_of_ranks_that_no_longer_exist_are_deleted(folder: Path) -> None:
    kept = open_in(folder, rank=3, ranks=4)
    for rank in (1, 2):
        open_in(folder, rank=rank, ranks=4).close()
    open_in(folder, replica=1, rank=2, ranks=4).close()
    write_file(folder / "0-9.slots", b"a diary")
    open_in(folder, ranks=2).close()
    found = {path.name for path in folder.iterdir()}
    assert found == {NAME, "0-1.slots", "0-3.slots", "1-2.slots", "0-9.slots"}
    kept.close()


def test_another_replica_and_another_rank_have_files_of_their_own(folder: Path) -> None:
    three = [open_in(folder), open_in(folder, replica=1), open_in(folder, rank=1, ranks=2)]
    assert {path.name for path in folder.iterdir()} == {NAME, "1-0.slots", "0-1.slots"}
    for memory in three:
        memory.close()


def test_a_fork_neither_has_the_file_nor_keeps_it_from_the_next_owner(folder: Path) -> None:
    memory = open_in(folder, keep=False)
    save(memory, 3, 3)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        memory.invalidate([3])
        memory.clear()
        memory.close()
        os.read(told, 1)
        os._exit(0 if memory.view.size == 0 else 1)
    try:
        with pytest.raises(MemoryBusyError):
            open_in(folder)
        memory.keep = True
        memory.close()
        again = open_in(folder)
        assert keys_in(again) == {3: key_of(3)}
        again.close()
    finally:
        os.write(tell, b"x")
        status = os.waitpid(child, 0)[1]
        os.close(told)
        os.close(tell)
    assert status == 0


def test_a_fork_closes_only_files_that_are_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process forks after it has closed one of two memory files. In the child, the code that
    Python runs after a fork raises no error, and neither file is mapped."""
    closed, memory = open_in(folder, replica=1), open_in(folder)
    closed.close()
    monkeypatch.setattr(sys, "unraisablehook", lambda said: os._exit(3))
    child = os.fork()
    if child == 0:
        os._exit(0 if memory.view.size == closed.view.size == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    memory.close()


def test_a_closed_file_is_free_although_a_new_child_has_not_run_yet(folder: Path) -> None:
    memory = open_in(folder)
    save(memory, 3, 3)
    # A child holds these file descriptors until it runs the code that Python runs after a fork.
    of_child = [
        os.dup(int(fd.name))
        for fd in list(Path("/proc/self/fd").iterdir())
        if fd.is_symlink() and fd.readlink() == folder / NAME
    ]
    assert of_child
    try:
        memory.close()
        again = open_in(folder)
        assert keys_in(again) == {3: key_of(3)}
        again.close()
    finally:
        for fd in of_child:
            os.close(fd)


def test_the_lock_of_a_killed_owner_is_free_although_its_fork_lives(folder: Path) -> None:
    script = f"""
import os, signal, sys
from tests.transfer.memory_file.made_memory import open_in, save
from pathlib import Path
memory = open_in(Path({str(folder)!r}))
save(memory, 7, 7)
child = os.fork()
if child == 0:
    os.close(1)
    sys.stdin.read()
    os._exit(0)
os.write(1, b"%d" % child)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    child = int(process.stdout.read())
    process.wait()
    try:
        os.kill(child, 0)
        memory = open_in(folder)
        assert keys_in(memory) == {7: key_of(7)}
        memory.close()
    finally:
        process.stdin.close()
        process.stdout.close()


def test_the_owner_is_named_while_the_file_is_being_created(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that locks the file while it is being allocated gets an error that names the owner.
    Allocating 100 GiB takes a minute, so the owner must be named before that."""
    said, real = list[str](), os.posix_fallocate
    slots = 300  # larger than a huge page
    most = replace(GEOMETRY, slots=slots).nbytes

    def slow(fd: int, offset: int, nbytes: int) -> None:
        if nbytes >= most:
            with pytest.raises(MemoryBusyError) as busy:
                lock_file(folder / NAME, make=True)
            said.append(str(busy.value))
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    open_in(folder, slots=slots).close()
    open_in(folder, slots=slots).close()
    assert len(said) == 2
    assert all(f"process {os.getpid()} on" in one for one in said)


def test_an_empty_file_that_others_could_read_becomes_private(folder: Path) -> None:
    folder.mkdir()
    (folder / NAME).write_bytes(b"")
    (folder / NAME).chmod(0o666)
    open_in(folder).close()
    assert (folder / NAME).stat().st_mode & 0o777 == 0o600


def test_a_reader_blocks_no_other_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_in(folder).close()
    looker = os.open(folder / NAME, os.O_RDONLY)
    fcntl.flock(looker, fcntl.LOCK_SH)
    monkeypatch.setattr("time.sleep", lambda seconds: fcntl.flock(looker, fcntl.LOCK_UN))
    open_in(folder).close()
    os.close(looker)


def test_a_file_deleted_between_opening_and_locking_is_recreated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = open_in(folder)
    save(memory, 0, 0)
    memory.close()
    deleted = list[bool]()

    def late(fd: int) -> bool:
        if not deleted:
            deleted.append(True)
            (folder / NAME).unlink()
        return try_lock(fd)

    monkeypatch.setattr("tiered_kv.file_lock.try_lock", late)
    memory = open_in(folder)
    assert not memory.adopted
    with pytest.raises(MemoryBusyError):
        open_in(folder)
    memory.close()
