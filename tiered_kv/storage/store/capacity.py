"""Disk space under a root: how much each store may use.

The stores of all processes under one root share one capacity, and only the files themselves show
how much each store uses. The free space of the disk counts as well: if it is less than the
configured capacity, less space is shared. A process that needs another segment locks
``root/capacity.lock``, adds up the existing segments, and deletes segments of stores that no
process has open (least recently used first). The process gets no segment if that does not free
enough space, or if its own share is used up.

Two segments are reserved outside the shares. Survivors are written before their old segment is
deleted, and a process killed in between leaves both. A store that finds the disk full starts with
one segment, while the other stores shrink at their next measurement.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.file_lock import is_locked, open_locked
from tiered_kv.storage.disk.files import FileLayer

from .folders import begins_like_segment, segment_files, store_folders
from .locks import LOCK_NAME
from .options import StoreOptions, is_full

FRESH_S = 1.0
"""Age at which the disk usage is measured again, seconds."""
_KEPT_FREE = 2
"""Number of segments that are part of no share."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of segments under a root.

    Attributes:
        own: bytes of the requesting store.
        dead: bytes of stores that no process has open.
        total: bytes of all stores.
        live: number of open stores, the requesting store included.
        free: free bytes of the disk.
    """

    own: int
    dead: int
    total: int
    live: int
    free: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """A store's share of the disk space, and how much of it the store may still allocate, bytes.

    Attributes:
        segment: size of the next segment, which is smaller than usual if the disk has little space.
        share: space that the store may use.
        owed: ``share`` minus the store's current size; negative if the store exceeds its share.
        room: part of ``owed`` that is available before other stores shrink.
        blocked: True if not even one segment can be allocated.
    """

    segment: int
    share: int
    owed: int
    room: int
    blocked: bool


class Capacity:
    """Computes one store's share of the disk space under its root, and frees space for the store's
    segments. The caller must hold the store's lock."""

    def __init__(self, files: FileLayer, options: StoreOptions) -> None:
        self._files = files
        self._options = options
        self._usage = Usage(0, 0, 0, 1, options.capacity_bytes)
        self._usage_at = -math.inf
        self._refused = False
        self._stuck = 0  # bytes of unused stores that cannot be deleted

    def make_room(self, *, while_reclaiming: bool) -> int | None:
        """Free space for one more segment, which is to be allocated immediately.

        The caller has the root locked, and allocates before it unlocks the root.

        Args:
            while_reclaiming: True if the segment receives the survivors of another segment, which
                is then deleted.

        Returns:
            Bytes that may be allocated; None if there is no space.

        Raises:
            OSError: the disk failed.
        """
        usage = self._measure()
        size = self._options.segment_bytes_of(self._limit(usage))
        wanted = size if while_reclaiming else _wanted(usage, size)
        excess = usage.total + wanted - self._limit(usage)
        if excess > 0 and usage.dead:
            self.delete_dead(excess)
            usage = self._measure()
        if usage.total + wanted > self._limit(usage):
            self._stuck = usage.dead
            return None
        below_share = usage.own + size <= self._share(usage.live, self._limit(usage), size)
        return size if while_reclaiming or below_share else None

    def delete_dead(self, nbytes: int) -> bool:
        """Delete segments of stores that no process has open until ``nbytes`` bytes are freed.

        The caller has the root locked.

        Returns:
            True if any space was freed.
        """
        freed = 0
        dead = [f for f in store_folders(self._options.root).paths if f != self._options.folder]
        for folder in sorted(dead, key=_last_use):
            if freed >= nbytes:
                break
            with contextlib.suppress(OSError):
                fd = open_locked(folder / LOCK_NAME, os.O_RDWR, tries=1)
                if fd is not None:
                    try:
                        freed += self._delete_segments(folder, nbytes - freed)
                    finally:
                        os.close(fd)
        return freed > 0

    def _delete_segments(self, folder: Path, nbytes: int) -> int:
        """Delete segments, oldest first. Returns the number of bytes freed."""
        freed = 0
        for path, size in segment_files(folder).sizes.items():
            if freed >= nbytes:
                break
            if begins_like_segment(path):
                self._files.unlink(path)
                freed += size
        self._files.sync_folder(folder)
        return freed

    def changed(self) -> None:
        """Record that a segment was created or deleted, so that measurements are outdated."""
        self._usage_at = -math.inf

    def failed(self, error: OSError) -> None:
        """Record a failed write. If the disk or its quota is full, the capacity is limited to the
        space in use."""
        self._refused |= is_full(error)
        self.changed()

    def granted(self) -> None:
        """Record that the disk provided space, or that space was freed."""
        self._refused = False
        self.changed()

    @property
    def limit(self) -> int:
        """Return the space for segments under the root, measured at most a second ago, bytes."""
        return self._limit(self._fresh())

    def outlook(self) -> Outlook:
        """Return the space that this store may still allocate, measured at most a second ago."""
        usage = self._fresh()
        limit = usage.total if self._refused else self._limit(usage)
        segment = self._options.segment_bytes_of(self._limit(usage))
        share = self._share(usage.live, limit, segment)
        dead = 0 if self._refused else max(0, usage.dead - self._stuck)
        free = limit - usage.total + dead - _wanted(usage, segment)  # after the next segment
        return Outlook(
            segment=segment,
            share=share,
            owed=share - usage.own,
            room=min(share - usage.own, max(0, free + segment)),
            blocked=free < 0,
        )

    def _fresh(self) -> Usage:
        if time.monotonic() - self._usage_at > FRESH_S:
            with contextlib.suppress(OSError):
                self._measure()
        return self._usage

    def _limit(self, usage: Usage) -> int:
        return min(self._options.capacity_bytes, usage.total + usage.free)

    def _share(self, live: int, limit: int, segment: int) -> int:
        return max(segment, (limit - _KEPT_FREE * segment) // max(1, live))

    def _measure(self) -> Usage:
        own = segment_files(self._options.folder).nbytes
        dead, total, live = 0, own, 1
        for folder in store_folders(self._options.root).paths:
            if folder == self._options.folder:
                continue
            nbytes = segment_files(folder).nbytes
            total += nbytes
            if _open_elsewhere(folder):
                live += 1
            else:
                dead += nbytes
        free = self._files.free(self._options.root)
        self._usage = Usage(own, dead, total, live, free)
        self._stuck = min(self._stuck, dead)
        self._usage_at = time.monotonic()
        return self._usage


def _wanted(usage: Usage, segment: int) -> int:
    """Return the space that must be free before another segment is created, bytes. A store that
    already has segments also needs space for survivors."""
    return 2 * segment if usage.own else segment


def _last_use(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return (folder / LOCK_NAME).lstat().st_mtime
    return 0.0


def _open_elsewhere(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return is_locked(folder / LOCK_NAME)
    return False
