"""Who may use how much of the disk: shares of the room under a root.

Stores of all processes under one root share one capacity, and nothing but the files
themselves says who has how much. Whoever needs another segment takes ``root/capacity.lock``,
adds up the segments there are, deletes those of stores that nobody has open (the longest
unused first), and is refused if that is not enough and its own share is used up. A live store
below its share that finds the disk full may go over by one segment: others are told to shrink
when they next look. So may each live store while it reclaims: what survives is written before
the segment it was in dies, also where a process was killed between the two and left both.

    root/capacity.lock
    root/<fingerprint>/<replica>-<rank>/lock, 00000001.seg, 00000002.seg ...
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.storage.files import FILE_MODE, FileLayer
from tiered_kv.storage.locks import (
    LOCK_NAME,
    RETRY_S,
    StoreBusyError,
    StoreError,
    StoreLock,
    is_locked,
    try_lock,
)

__all__ = [
    "CAPACITY_LOCK",
    "CAPACITY_WAIT_S",
    "LOCK_NAME",
    "SEGMENT_SUFFIX",
    "Capacity",
    "Outlook",
    "StoreBusyError",
    "StoreError",
    "StoreLock",
    "Usage",
    "store_folders",
]

SEGMENT_SUFFIX = ".seg"
CAPACITY_LOCK = "capacity.lock"
CAPACITY_WAIT_S = 5.0
"""How long to wait for another process that is making room."""

_FRESH_S = 1.0


def store_folders(root: Path) -> list[Path]:
    """Folders of stores under a root."""
    folders = []
    with contextlib.suppress(OSError):
        for fingerprint in root.iterdir():
            with contextlib.suppress(OSError):
                folders += [f for f in fingerprint.iterdir() if (f / LOCK_NAME).exists()]
    return sorted(folders)


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of segments under a root.

    Attributes:
        own: of the store that asks.
        dead: of stores that nobody has open.
        total: of all.
        live: number of stores that are open, the one that asks included.
    """

    own: int
    dead: int
    total: int
    live: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a store may still allocate, in bytes.

    Attributes:
        share: what is due to it.
        owed: its share less what it has; below zero if it has more.
        room: what it gets of that without others giving way.
        blocked: whether it gets not even one segment.
    """

    share: int
    owed: int
    room: int
    blocked: bool


class Capacity:
    """The share of one store in the room under its root.

    Args:
        folder: of the store, whose lock the caller holds.
        capacity_bytes: for all stores under the root.
        segment_bytes: what one segment of this store takes.
    """

    def __init__(
        self, files: FileLayer, root: Path, folder: Path, capacity_bytes: int, segment_bytes: int
    ) -> None:
        self._files = files
        self._root = root
        self._folder = folder
        self._capacity = capacity_bytes
        self._segment = segment_bytes
        self._usage = Usage(0, 0, 0, 1)
        self._usage_at = -math.inf

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else takes or makes room meanwhile.

        Raises:
            OSError: the lock cannot be had.
        """
        path = self._root / CAPACITY_LOCK
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            deadline = time.monotonic() + CAPACITY_WAIT_S
            while not try_lock(fd):
                if time.monotonic() > deadline:
                    raise OSError(errno.ETIMEDOUT, "another process holds it", str(path))
                time.sleep(RETRY_S)
            yield
        finally:
            os.close(fd)

    def make_room(self, *, while_reclaiming: bool) -> bool:
        """Whether one more segment may be allocated now. The caller is in ``locked``, and
        allocates before it leaves.

        Args:
            while_reclaiming: the segment takes what lives in another, which dies at once.
        """
        usage = self._measure()
        excess = usage.total + self._segment - self._capacity
        if excess > 0 and usage.dead:
            self._delete_dead(excess)
            usage = self._measure()
        if while_reclaiming:
            return usage.total <= self._capacity + usage.live * self._segment
        below_share = usage.own + self._segment <= self._share(usage)
        return below_share and usage.total <= self._capacity

    def changed(self) -> None:
        """A segment came or went: what was measured is no longer true."""
        self._usage_at = -math.inf

    def outlook(self) -> Outlook:
        """What this store may still allocate, as measured at most a second ago."""
        if time.monotonic() - self._usage_at > _FRESH_S:
            with contextlib.suppress(OSError):
                self._measure()
        usage = self._usage
        share = self._share(usage)
        free = max(0, self._capacity - usage.total + usage.dead)
        return Outlook(
            share=share,
            owed=share - usage.own,
            room=min(share - usage.own, free),
            blocked=usage.total - usage.dead > self._capacity,
        )

    def _share(self, usage: Usage) -> int:
        return self._capacity // max(1, usage.live)

    def _measure(self) -> Usage:
        own = dead = total = 0
        live = 1
        for folder in store_folders(self._root):
            nbytes = sum(size for _, size in _segments(folder))
            total += nbytes
            if folder == self._folder:
                own = nbytes
            elif _open_elsewhere(folder):
                live += 1
            else:
                dead += nbytes
        self._usage = Usage(own, dead, total, live)
        self._usage_at = time.monotonic()
        return self._usage

    def _delete_dead(self, excess: int) -> None:
        """Delete segments of stores that nobody has open until ``excess`` bytes are free."""
        dead = [f for f in store_folders(self._root) if f != self._folder]
        for folder in sorted(dead, key=_last_use):
            if excess <= 0:
                return
            try:
                fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                if try_lock(fd):
                    excess -= self._delete_segments(folder, excess)
            except OSError:
                continue
            finally:
                os.close(fd)

    def _delete_segments(self, folder: Path, excess: int) -> int:
        """The oldest first; returns how many bytes that freed."""
        freed = 0
        for path, size in sorted(_segments(folder)):
            if freed >= excess:
                break
            self._files.unlink(path)
            freed += size
        self._files.sync_folder(folder)
        return freed


def _segments(folder: Path) -> list[tuple[Path, int]]:
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(SEGMENT_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    found.append((folder / entry.name, entry.stat().st_size))
    return found


def _last_use(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return (folder / LOCK_NAME).stat().st_mtime
    return 0.0


def _open_elsewhere(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return is_locked(folder / LOCK_NAME)
    return False
