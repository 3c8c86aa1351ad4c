"""Locks of stores and roots.

A ``lock`` is held with flock for as long as its store is open, holds JSON naming the process,
and was modified when the store was last used. A root's ``capacity.lock`` is held for moments.

    root/capacity.lock
    root/<fingerprint>/<replica>-<rank>/lock, 00000001.seg, 00000002.seg ...
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tiered_kv.file_lock import (
    RETRY_S,
    TRIES,
    describe_owner,
    open_locked,
    owner_in_words,
    read_owner,
    try_lock,
)
from tiered_kv.plain_files import opened

LOCK_NAME = "lock"
CAPACITY_LOCK = "capacity.lock"
CAPACITY_WAIT_S = 5.0
"""Longest wait for another process that is making room, seconds."""


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
        self._touched_at = time.monotonic()
        self._fd = self._open()
        for _ in range(TRIES):
            if os.fstat(self._fd).st_nlink <= 1:
                break
            self.path.unlink()  # under another name it must stay as it is
            os.close(self._fd)
            self._fd = self._open()
        else:
            os.close(self._fd)
            raise StoreBusyError(
                f"{self.path} keeps a second name: remove it, or give this engine another "
                "TIERED_KV_SSD_PATH"
            )
        text = describe_owner()
        with contextlib.suppress(OSError):  # it locks without saying who, on a full disk
            os.pwrite(self._fd, text, 0)
            os.ftruncate(self._fd, len(text))

    def _open(self) -> int:
        fd = open_locked(self.path, os.O_RDWR | os.O_CREAT)
        if fd is None:
            raise StoreBusyError(
                f"{self.path.parent} is in use by {owner_in_words(read_owner(self.path))}: stop "
                "it, or give this engine another TIERED_KV_SSD_PATH"
            )
        return fd

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
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        deadline = time.monotonic() + CAPACITY_WAIT_S
        while not try_lock(fd):
            if time.monotonic() > deadline:
                raise OSError(errno.ETIMEDOUT, "another process holds it", str(path))
            time.sleep(RETRY_S)
        yield
