"""The lock of a store: who may write it, and what others are told.

A ``lock`` is held with flock for as long as its store is open, holds JSON naming the process,
and was modified when the store was last used.
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
from pathlib import Path

from tiered_kv.storage.files import FILE_MODE

LOCK_NAME = "lock"
RETRY_S = 0.01
"""Between two attempts at a lock."""

_TRIES = 5


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
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            if try_lock(fd) and self._is_current(fd):
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
        os.pwrite(self._fd, text, 0)
        os.ftruncate(self._fd, len(text))

    def _is_current(self, fd: int) -> bool:
        """Whether the file that was locked is still the one of that name."""
        with contextlib.suppress(FileNotFoundError):
            return os.fstat(fd).st_ino == self.path.stat().st_ino
        return False

    @property
    def held(self) -> bool:
        """False once released, or when the file was removed by hand."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink > 0

    def touch(self, after_s: float = 0.0) -> None:
        """The store is in use; noted again once that is ``after_s`` seconds old. Never fails."""
        now = time.monotonic()
        if now - self._touched_at >= after_s:
            self._touched_at = now
            with contextlib.suppress(OSError):
                os.utime(self._fd)

    def release(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            self.touch()
            os.close(self._fd)
            self._fd = -1


def try_lock(fd: int) -> bool:
    """Whether the open file is locked now, for as long as it stays open."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _busy(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        who = (
            f"process {holder['pid']} on {holder['host']} ({holder['command']}) "
            f"since {holder['since']}"
        )
    except (OSError, ValueError, TypeError, KeyError):
        who = "another process"
    return (
        f"{path.parent} is in use by {who}: stop it, or give this engine another TIERED_KV_SSD_PATH"
    )


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock file.

    Raises:
        OSError: there is none, or it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            return True
        raise
    finally:
        os.close(fd)
    return False
