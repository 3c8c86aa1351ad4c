"""Locks of stores and roots.

A ``lock`` is held with flock for as long as its store is open. It contains JSON naming the process,
and its modification time is the time of the store's last use. A root's ``capacity.lock`` is held
only briefly.

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
"""Maximum wait for another process that is freeing space, seconds."""


class StoreError(Exception):
    """A store that cannot be opened or used. The message says what to do."""


class StoreBusyError(StoreError):
    """Another process has the store open."""


class StoreLock:
    """The exclusive right of a process to write a store.

    Raises:
        StoreBusyError: another process has the lock, and the message names it; or the lock file has
            other hard links.
        OSError: the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        self._touched_at = time.monotonic()
        self._fd = self._open()
        for _ in range(TRIES):
            if os.fstat(self._fd).st_nlink <= 1:
                break
            self.path.unlink()  # a file with a second name must not be changed
            os.close(self._fd)
            self._fd = self._open()
        else:
            os.close(self._fd)
            raise StoreBusyError(
                f"{self.path} has other hard links: remove them, or set another "
                "TIERED_KV_SSD_PATH for this engine"
            )
        text = describe_owner()
        with contextlib.suppress(OSError):  # on a full disk the lock works without naming its owner
            os.pwrite(self._fd, text, 0)
            os.ftruncate(self._fd, len(text))

    def _open(self) -> int:
        fd = open_locked(self.path, os.O_RDWR | os.O_CREAT)
        if fd is None:
            raise StoreBusyError(
                f"{self.path.parent} is in use by {owner_in_words(read_owner(self.path))}: "
                "stop that process, or set another TIERED_KV_SSD_PATH for this engine"
            )
        return fd

    @property
    def held(self) -> bool:
        """True until the lock is released, or until a person removes its file."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink > 0

    def touch(self, after_s: float = 0.0) -> None:
        """Record that the store is in use, at most once every ``after_s`` seconds. Never fails."""
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
    """Lock a root for the duration of a ``with`` block, so that no other process frees space under
    it or opens a store there meanwhile.

    Raises:
        OSError: the lock could not be acquired.
    """
    path = root / CAPACITY_LOCK
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        deadline = time.monotonic() + CAPACITY_WAIT_S
        while not try_lock(fd):
            if time.monotonic() > deadline:
                raise OSError(errno.ETIMEDOUT, "another process holds the lock", str(path))
            time.sleep(RETRY_S)
        yield
