"""Locks of stores and roots, and what their holders say of themselves.

A ``lock`` is held with flock for as long as its store is open, holds JSON naming the process,
and was modified when the store was last used. A root's ``capacity.lock`` is held for moments.

    root/capacity.lock
    root/<fingerprint>/<replica>-<rank>/lock, 00000001.seg, 00000002.seg ...
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tiered_kv.json_fields import mapping, read_json
from tiered_kv.storage.disk.files import open_plain

LOCK_NAME = "lock"
CAPACITY_LOCK = "capacity.lock"
CAPACITY_WAIT_S = 5.0
"""Longest wait for another process that is making room, seconds."""
RETRY_S = 0.01
"""Time between two attempts at a lock, seconds."""

_TRIES = 5
_MOST_SAID = 64 << 10


class StoreError(Exception):
    """A store that cannot be opened or used; one sentence says what to do."""


class StoreBusyError(StoreError):
    """Another process has the store open."""


class StoreLock:
    """The right to write a store; one process has it.

    Raises:
        StoreBusyError: somebody else has it; the message says who.
        OSError: the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        self._fd = -1
        self._touched_at = time.monotonic()
        for _ in range(_TRIES):
            fd = open_plain(self.path, os.O_RDWR | os.O_CREAT)
            if try_lock(fd) and self._is_current(fd) and not self._is_shared(fd):
                self._fd = fd
                break
            os.close(fd)
            time.sleep(RETRY_S)  # somebody may only be looking whether it is held
        else:
            raise StoreBusyError(_busy(self.path))
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "command": " ".join(sys.argv)[:500],
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }
        text = json.dumps(holder).encode()
        with contextlib.suppress(OSError):  # it locks without saying who, on a full disk
            os.pwrite(self._fd, text, 0)
            os.ftruncate(self._fd, len(text))

    def _is_current(self, fd: int) -> bool:
        """True if the file that was locked is still the one of that name."""
        with contextlib.suppress(FileNotFoundError):
            return os.fstat(fd).st_ino == self.path.stat().st_ino
        return False

    def _is_shared(self, fd: int) -> bool:
        """True if the file that was locked has another name as well, under which it must stay.

        It then gives up this name.
        """
        if os.fstat(fd).st_nlink <= 1:
            return False
        self.path.unlink()
        return True

    @property
    def held(self) -> bool:
        """True until the lock is released, or its file removed by hand."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink > 0

    def touch(self, after_s: float = 0.0) -> None:
        """Note that the store is in use, if that was noted ``after_s`` seconds ago. Never fails."""
        now = time.monotonic()
        if now - self._touched_at >= after_s:
            self._touched_at = now
            with contextlib.suppress(OSError):
                os.utime(self._fd)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._fd >= 0:
            self.touch()
            os.close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def root_locked(root: Path) -> Iterator[None]:
    """Lock a root: nobody else makes room under it or opens a store there meanwhile.

    Raises:
        OSError: the lock cannot be had.
    """
    path = root / CAPACITY_LOCK
    fd = open_plain(path, os.O_RDWR | os.O_CREAT)
    try:
        deadline = time.monotonic() + CAPACITY_WAIT_S
        while not try_lock(fd):
            if time.monotonic() > deadline:
                raise OSError(errno.ETIMEDOUT, "another process holds it", str(path))
            time.sleep(RETRY_S)
        yield
    finally:
        os.close(fd)


def try_lock(fd: int) -> bool:
    """Lock an open file for as long as it stays open; False if somebody else has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int) -> None:
    """Unlock an open file for whoever has a copy of its descriptor as well.

    A child that was forked a moment ago has one until it runs.
    """
    fcntl.flock(fd, fcntl.LOCK_UN)


def read_holder(path: Path) -> dict[str, object]:
    """Read the words of the process that has or had the lock; empty if unknown."""
    try:
        fd = open_plain(path, os.O_RDONLY)
        try:
            return dict(mapping(read_json(os.pread(fd, _MOST_SAID, 0))))
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return {}


def _busy(path: Path) -> str:
    holder = read_holder(path)
    try:
        who = (
            f"process {holder['pid']} on {holder['host']} ({holder['command']}) "
            f"since {holder['since']}"
        )
    except KeyError:
        who = "another process"
    return (
        f"{path.parent} is in use by {who}: stop it, or give this engine another TIERED_KV_SSD_PATH"
    )


def is_locked(path: Path) -> bool:
    """Test a lock file: True if somebody holds it.

    Raises:
        OSError: there is none, or it cannot be read.
    """
    fd = open_plain(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            return True
        raise
    finally:
        os.close(fd)
    return False
