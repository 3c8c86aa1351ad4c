"""Remote store in a folder that many machines mount: each process writes one folder, and reads all
folders.

Nothing is ever changed in place, so a reader needs no lock. A value that its writer deletes during
a read is a miss. A file system that does not answer cannot be interrupted at a deadline: the thread
waits for it, and turns continue without it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiered_kv.remote.base import Got, Outcome, Parts, RemoteKey
from tiered_kv.remote.breaker import Complaint, LoggedBreaker

from .index_entries import Place
from .own_folder import FULL, GONE, FolderReader, OpenPacks, OwnFolder, folders_in

logger = logging.getLogger(__name__)

REFRESH_S = 0.5
"""Time for which the indexes count as current after they were read, seconds."""
NOT_WRITABLE = (*FULL, errno.EROFS, errno.EACCES)
"""Errors of a write after which reads continue."""
AHEAD = 8
"""Minimum number of values that the operating system is advised to read in advance."""


class SharedRoot:
    """A shared folder as a ``RemoteStore``.

    Args:
        root: the folder, which must exist. The folder is not created if it is missing, because a
            missing mount must not cause writes to the disk below the mount point.
        most_bytes: maximum size of this process's folder, bytes.
    """

    def __init__(self, root: Path, most_bytes: int) -> None:
        self._root = root
        self._most_bytes = most_bytes
        self._own: OwnFolder | None = None
        self._others: dict[Path, FolderReader] = {}
        self._unread: deque[Path] = deque()
        self._refreshed_at = -REFRESH_S
        self._breaker = LoggedBreaker(
            root,
            "the shared folder %s is unavailable (%s): KV is recomputed until the folder is "
            "available again",
            "the shared folder %s is available again",
        )
        self._writes = LoggedBreaker(
            root,
            "the shared folder %s refuses writes (%s), but is still read",
            "the shared folder %s accepts writes again",
        )
        self._unreadable = Complaint()
        self._closed = False

    def check(self, deadline: float) -> None:
        """Create this process's folder.

        Raises:
            OSError: the root is missing, or cannot be written.
        """
        self._written()

    def exists(self, keys: Sequence[RemoteKey], deadline: float) -> list[Outcome]:
        """See ``RemoteStore``."""
        if (outcome := self._not_now(deadline)) is not None:
            return [outcome] * len(keys)
        self._show_life()
        try:
            self._refresh(deadline)
            self._breaker.worked()
        except OSError as error:
            return [self._lost(error)] * len(keys)
        having = [places for _, places in self._folders()]
        return [
            Outcome.HIT if any(key.name in places for places in having) else Outcome.MISS
            for key in keys
        ]

    def get(self, keys: Sequence[RemoteKey], buffer: memoryview, deadline: float) -> Iterator[Got]:
        """See ``RemoteStore``."""
        if (outcome := self._not_now(deadline)) is not None:
            yield from (Got(at, outcome) for at in range(len(keys)))
            return
        self._show_life()
        at = 0
        with contextlib.closing(OpenPacks(os.O_RDONLY)) as files:
            try:
                if any(not self._where(key.name) for key in keys):
                    self._refresh(deadline)
                for at, key in enumerate(keys):
                    if at % AHEAD == 0:
                        self._read_ahead(files, keys[at : at + 2 * AHEAD])
                    if time.monotonic() >= deadline:
                        yield Got(at, Outcome.LATE)
                    else:
                        yield self._read(files, at, key.name, buffer)
                self._breaker.worked()
            except OSError as error:
                outcome = self._lost(error)
                yield from (Got(late, outcome) for late in range(at, len(keys)))

    def put(self, values: Sequence[tuple[RemoteKey, Parts]], deadline: float) -> list[Outcome]:
        """See ``RemoteStore``."""
        if (outcome := self._not_now(deadline)) is not None:
            return [outcome] * len(values)
        if not self._writes.lets_through(time.monotonic()):
            return [Outcome.REFUSED] * len(values)
        try:
            outcomes = self._written().put([(key.name, parts) for key, parts in values], deadline)
        except OSError as error:
            return [self._not_written(error)] * len(values)
        self._breaker.worked()
        if Outcome.STORED in outcomes:
            self._writes.worked()
        elif Outcome.REFUSED in outcomes:
            self._refused("its file system has no space, or this engine's share of it is used up")
        return outcomes

    def delete(self, keys: Sequence[RemoteKey], deadline: float) -> bool:
        """Delete values that this process has put, and forget values of other processes. Returns
        False if values of this process may still exist."""
        for reader in self._others.values():
            for key in keys:
                reader.contents.places.pop(key.name, None)
        if not keys or self._not_now(deadline) is not None:
            return not keys
        try:
            self._written().delete([key.name for key in keys])
        except OSError as error:
            self._not_written(error)
            return False
        return True

    def close(self) -> None:
        """See ``RemoteStore``."""
        self._closed = True
        own, self._own = self._own, None
        self._others.clear()
        if own is not None:
            own.close()

    # -- folders ----------------------------------------------------------------------

    def _not_now(self, deadline: float) -> Outcome | None:
        """Return the outcome of a call that is skipped now; None if the call should be made."""
        now = time.monotonic()
        if self._closed or not self._breaker.lets_through(now):
            return Outcome.DOWN
        return Outcome.LATE if now >= deadline else None

    def _written(self) -> OwnFolder:
        """Return this process's folder. Creates it first if it is missing or was deleted."""
        if self._own is not None and self._own.lost:
            self._own.close()
            self._own = None
        if self._own is None:
            self._own = OwnFolder(self._root, self._most_bytes)
            self._others.pop(self._own.folder, None)
        return self._own

    def _show_life(self) -> None:
        """Keep other processes from deleting this process's folder while this process only
        reads."""
        if self._own is not None:
            with contextlib.suppress(OSError):
                self._own.show_life()

    def _folders(self) -> list[tuple[Path, dict[bytes, Place]]]:
        """Return the folders and the places of their values, own folder first."""
        own = self._own
        mine = [] if own is None else [(own.folder, own.contents.places)]
        return mine + [(path, one.contents.places) for path, one in self._others.items()]

    def _refresh(self, deadline: float) -> None:
        """Read the new index entries of other folders. Folders that are not read by the deadline
        are read first next time.

        Raises:
            OSError: the root cannot be read.
        """
        now = time.monotonic()
        if not self._unread:
            if now - self._refreshed_at < REFRESH_S:
                return
            self._refreshed_at = now
            mine = self._own.folder if self._own is not None else None
            there = [folder for folder in folders_in(self._root) if folder != mine]
            self._others = {path: self._others.get(path) or FolderReader(path) for path in there}
            self._unread.extend(there)
        while self._unread and time.monotonic() < deadline:
            reader = self._others.get(self._unread.popleft())
            if reader is None:
                continue
            try:
                reader.refresh()
            except OSError as error:
                reader.contents.clear()
                if self._unreadable.begins(str(reader.folder), now):
                    logger.warning(
                        "the folder %s cannot be read (%s), so its KV is recomputed until it can "
                        "be read again",
                        reader.folder,
                        error.strerror,
                    )

    # -- values -----------------------------------------------------------------------

    def _where(self, name: bytes) -> list[tuple[Path, Place]]:
        return [(folder, places[name]) for folder, places in self._folders() if name in places]

    def _read(self, files: OpenPacks, at: int, name: bytes, buffer: memoryview) -> Got:
        for folder, places in self._folders():
            if (place := places.get(name)) is None:
                continue
            if place.nbytes > len(buffer):
                return Got(at, Outcome.BAD)
            try:
                if _read_value(files.fd(folder, place.pack), place, buffer):
                    return Got(at, Outcome.HIT, place.nbytes)
            except OSError as error:
                if error.errno not in GONE:
                    raise
            del places[name]
        return Got(at, Outcome.MISS)

    def _read_ahead(self, files: OpenPacks, keys: Sequence[RemoteKey]) -> None:
        for key in keys:
            for folder, place in self._where(key.name)[:1]:
                with contextlib.suppress(OSError):
                    fd = files.fd(folder, place.pack)
                    os.posix_fadvise(fd, place.offset, place.nbytes, os.POSIX_FADV_WILLNEED)

    # -- trouble ------------------------------------------------------------------------

    def _lost(self, error: OSError) -> Outcome:
        now = time.monotonic()
        self._breaker.failed(now)
        what = "no such folder: create it" if error.errno == errno.ENOENT else str(error)
        self._breaker.complain(what, now)
        return Outcome.DOWN

    def _not_written(self, error: OSError) -> Outcome:
        if error.errno not in NOT_WRITABLE:
            return self._lost(error)
        self._refused(error.strerror)
        return Outcome.REFUSED

    def _refused(self, why: str | None) -> None:
        """Record that writes are refused. Writes are tried again later, and reads continue."""
        now = time.monotonic()
        self._writes.failed(now)
        self._writes.complain(str(why), now, "")


def _read_value(fd: int, place: Place, buffer: memoryview) -> bool:
    """Read a value. Returns False if it is truncated."""
    left, offset = buffer[: place.nbytes], place.offset
    while left:
        count = os.preadv(fd, [left], offset)
        if count == 0:
            return False
        left, offset = left[count:], offset + count
    return True
