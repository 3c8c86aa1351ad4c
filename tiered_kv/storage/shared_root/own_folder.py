"""The folder that one process writes under a shared root; all other processes only read it.

    root/<host>.<n>/lock, index, 00000001.pack, 00000002.pack …

Values are appended to packs, and an index lists their locations. The folder's name includes the
host's name, because locks do not work across hosts on every mount. When
space is short, the folders of processes that are long gone are deleted, then this folder's oldest
packs.

A full disk accepts no writes, not even a record of a deletion. So packs are deleted before the
deletion is recorded. In between, a reader finds the pack missing, which is a miss. If the process
is killed at that point, the next process that takes over the folder also finds the pack missing.

The module also reads the contents of a writer's folder from its index.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from secrets import token_bytes

from tiered_kv.file_lock import is_locked, try_lock
from tiered_kv.plain_files import FOLDER_MODE, open_plain, opened, replace_file
from tiered_kv.remote.base import Outcome, Parts
from tiered_kv.storage.store.locks import LOCK_NAME

from .index_entries import (
    HEAD_BYTES,
    NUMBER_BYTES,
    Entry,
    Kind,
    Place,
    head_of,
    number_in,
    pack_entries,
    parse_entries,
)

INDEX_NAME = "index"
GONE = (errno.ENOENT, errno.ESTALE)
"""Errors that mean that a file no longer exists. On a network file system these errors also occur
for an open file."""
READ_BYTES = 1 << 20


def pack_name(number: int) -> str:
    """Return the name of a pack's file."""
    return f"{number:08}.pack"


def is_writers(folder: Path) -> bool:
    """True if a writer created the folder, False if it has another origin.

    Raises:
        OSError: this cannot be determined.
    """
    with opened(folder / INDEX_NAME) as fd:
        return number_in(os.pread(fd, HEAD_BYTES, 0)) is not None


class FolderContents:
    """Places of the values of one folder, by name. Later entries of the index override earlier
    ones."""

    def __init__(self) -> None:
        self.places: dict[bytes, Place] = {}
        self._names: dict[int, list[bytes]] = {}

    def apply(self, entries: Iterable[Entry]) -> None:
        """Apply index entries, oldest first."""
        for kind, name, place in entries:
            if kind is Kind.VALUE:
                self.places[name] = place
                self._names.setdefault(place.pack, []).append(name)
            elif kind is Kind.DELETED:
                self.places.pop(name, None)
            else:
                self.drop_pack(place.pack)

    def drop_pack(self, pack: int) -> None:
        """Forget the values of a pack."""
        for name in self._names.pop(pack, ()):
            if (place := self.places.get(name)) is not None and place.pack == pack:
                del self.places[name]

    def clear(self) -> None:
        """Forget all values."""
        self.places.clear()
        self._names.clear()


class FolderReader:
    """Reads a folder that another process writes. The folder's index lists the values.

    The index is opened again for each read, which makes a network file system check for changes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents = FolderContents()
        self._number = b""
        self._read_to = 0

    def refresh(self) -> None:
        """Read the entries that were added to the index since the last call. If the index was
        rewritten, reads it from the start. If the index no longer exists, forgets all values.

        Raises:
            OSError: the index exists but cannot be read.
        """
        try:
            with opened(self.folder / INDEX_NAME) as fd:
                number = number_in(os.pread(fd, HEAD_BYTES, 0))
                if number != self._number:
                    self._begin(number)
                if number is not None:
                    for entries in self._news(fd, number):
                        self.contents.apply(entries)
        except OSError as error:
            if error.errno not in GONE:
                raise
            self._begin(None)

    def _begin(self, number: bytes | None) -> None:
        self.contents.clear()
        self._number, self._read_to = number or b"", HEAD_BYTES

    def _news(self, fd: int, number: bytes) -> Iterator[list[Entry]]:
        while data := os.pread(fd, READ_BYTES, self._read_to):
            entries, nbytes = parse_entries(data, number)
            if not nbytes:
                return
            self._read_to += nbytes
            yield entries


class OpenPacks:
    """Packs, which are opened at their first use and stay open until ``close``.

    Args:
        flags: flags with which packs are opened, as for ``os.open``.
    """

    def __init__(self, flags: int) -> None:
        self.fds: dict[tuple[Path, int], int] = {}
        self._flags = flags

    def fd(self, folder: Path, pack: int) -> int:
        """Return the descriptor of a pack.

        Raises:
            OSError: the pack cannot be opened.
        """
        if (fd := self.fds.get((folder, pack))) is None:
            fd = self.fds[folder, pack] = open_plain(folder / pack_name(pack), self._flags)
        return fd

    def close(self) -> None:
        """Close all packs."""
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


PACK_BYTES = 64 << 20
LEAST_PACKS = 8
"""Approximate size of a pack, which is deleted as a unit, bytes; and the minimum number of packs
that fit into a folder."""
KEPT_FREE = 0.1
"""Fraction of the file system that is left free for other uses."""
SIGN_OF_LIFE_S = 60.0
GONE_S = 24 * 3600.0
"""Time without a sign of life after which a folder may be deleted, seconds. If the folder's process
resumes after that, the process creates another folder."""
LOOK_FOR_GONE_S = 60.0
MOST_STALE = 1024
"""Number of stale entries, beyond the number of live ones, that trigger a rewrite of the index."""
FULL = (errno.ENOSPC, errno.EDQUOT)
_NEW_INDEX = "index.new"
_PACK = re.compile(r"(\d{8,})\.pack")


class OwnFolder:
    """A folder that this process writes.

    Args:
        root: an existing folder.
        most_bytes: maximum size of all packs together, bytes.

    Raises:
        OSError: the folder cannot be created or opened.
    """

    def __init__(self, root: Path, most_bytes: int) -> None:
        self._root = root
        self._most_bytes = most_bytes
        self._pack_bytes = min(PACK_BYTES, most_bytes // LEAST_PACKS)
        self.folder, self._lock = _first_free(root)
        self._alive_at = self._looked_at = -GONE_S
        self._number = b""
        self._entries = self._index_bytes = 0  # in the index
        self._torn = True  # until the index is complete
        self._spare = 0
        try:
            reader = FolderReader(self.folder)
            reader.refresh()
            self.contents: FolderContents = reader.contents
            self._packs = _packs_in(self.folder)
            # A pack's number is not reused while an index may refer to its values.
            noted = {place.pack for place in self.contents.places.values()}
            self._next = max(noted.union(self._packs), default=0) + 1
            for place in [*self.contents.places.values()]:
                if place.offset + place.nbytes > self._packs.get(place.pack, 0):
                    self.contents.drop_pack(place.pack)  # lost in a power failure
            self._make_room_for(self._rewrite)
            self.show_life()
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def lost(self) -> bool:
        """True if another process deleted the folder."""
        try:
            return os.fstat(self._lock).st_nlink == 0
        except OSError:
            return True

    def put(self, values: Sequence[tuple[bytes, Parts]], deadline: float) -> list[Outcome]:
        """Add values. Returns STORED, REFUSED or LATE for each value.

        Raises:
            OSError: a write failed. Any of the values may have been added nonetheless.
        """
        self.show_life()
        self._spare = self._spare_bytes()
        outcomes: list[Outcome] = []
        added: list[Entry] = []
        full = False
        with contextlib.closing(OpenPacks(os.O_WRONLY | os.O_CREAT)) as files:
            for name, parts in values:
                nbytes = sum(len(part) for part in parts)
                busy = {entry.place.pack for entry in added}
                place = None
                if time.monotonic() >= deadline:
                    outcomes.append(Outcome.LATE)
                    continue
                try:
                    if not full and self._has_room(nbytes, busy):
                        place = self._placed(files, parts, nbytes, busy)
                except OSError as error:
                    if error.errno not in FULL:
                        raise
                    full = True  # even after packs were deleted: deleting more would not help
                if place is None:
                    outcomes.append(Outcome.REFUSED)
                else:
                    added.append(Entry(Kind.VALUE, name, place))
                    outcomes.append(Outcome.STORED)
            # A reader that sees the entries must find the bytes, so the bytes are synced first. The
            # page cache need not keep them, because this engine has the pages in memory.
            for fd in files.fds.values():
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._note(added)
        return outcomes

    def delete(self, names: Sequence[bytes]) -> None:
        """Delete the values with these names. On a full disk, which accepts no record of the
        deletion, deletes the packs that contain these values.

        Raises:
            OSError: a write or a deletion failed. Any of the values may still be readable.
        """
        nowhere = Place(0, 0, 0)
        places = {
            name: self.contents.places[name] for name in names if name in self.contents.places
        }
        try:
            self._save([Entry(Kind.DELETED, name, nowhere) for name in places])
        except OSError as error:
            if error.errno not in FULL:
                raise
            for pack in sorted({place.pack for place in places.values()}):
                self._delete_pack(pack)  # with all its values

    def close(self) -> None:
        """Release the folder, and delete it if it has no values."""
        if not self.contents.places and not self.lost:
            _delete_folder(self.folder)
        os.close(self._lock)

    # -- packs ----------------------------------------------------------------------

    def _placed(self, files: OpenPacks, parts: Parts, nbytes: int, busy: set[int]) -> Place:
        """Write a value, and return its location. If the file system has less space than it
        reports, for example because of a quota, delete the oldest pack and try once more.

        Args:
            busy: packs that must not be deleted.

        Raises:
            OSError: the write failed.
        """
        try:
            return self._add(files, parts, nbytes)
        except OSError as error:
            self._spare = 0
            if error.errno not in FULL or not self._has_room(1, {*busy, self._next - 1}):
                raise
        return self._add(files, parts, nbytes)

    def _add(self, files: OpenPacks, parts: Parts, nbytes: int) -> Place:
        pack = self._next - 1
        if self._packs.get(pack, self._pack_bytes) >= self._pack_bytes:
            pack, self._next = self._next, self._next + 1
            self._packs[pack] = 0
        fd = files.fd(self.folder, pack)
        place = Place(pack, self._packs[pack], nbytes)
        self._packs[pack] += nbytes
        self._spare -= nbytes
        try:
            _write(fd, parts, place.offset)
        except OSError:
            with contextlib.suppress(OSError):  # if this fails, the written bytes stay unused
                os.ftruncate(fd, place.offset)
                self._packs[pack] -= nbytes
                self._spare += nbytes
            raise
        return place

    def _spare_bytes(self) -> int:
        """Return the number of bytes of the file system that this folder may still use."""
        disk = os.statvfs(self._root)
        if not disk.f_blocks:  # a file system that does not report its size
            return sys.maxsize
        return (disk.f_bavail - int(KEPT_FREE * disk.f_blocks)) * disk.f_frsize

    def _has_room(self, nbytes: int, busy: set[int]) -> bool:
        """Free space for a value of ``nbytes`` bytes, if necessary. Returns False if that is
        impossible.

        Args:
            busy: packs that must not be deleted.
        """
        if nbytes > self._spare:
            self._spare += self._delete_gone()
        while True:
            mine = sum(self._packs.values())
            if nbytes <= min(self._spare, self._most_bytes - mine):
                return True
            oldest = min(self._packs, default=None)
            if oldest is None or oldest in busy:
                return False
            self._spare += self._packs[oldest]
            self._delete_pack(oldest)

    def _delete_pack(self, pack: int) -> None:
        self._unlink_pack(pack)
        try:
            self._save([Entry(Kind.PACK_GONE, b"", Place(pack, 0, 0))])
        except OSError as error:
            if error.errno not in FULL:  # otherwise the next index write leaves it out
                raise

    def _unlink_pack(self, pack: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.folder / pack_name(pack)).unlink()
        self._packs.pop(pack, None)

    def _make_room_for(self, write: Callable[[], None]) -> None:
        """Write to the index. If the disk is full, this process's oldest packs are deleted to free
        space.

        Raises:
            OSError: the write failed, or no space can be freed.
        """
        while True:
            try:
                return write()
            except OSError as error:
                oldest = min(self._packs, default=None)
                if error.errno not in FULL or oldest is None:
                    raise
                self._unlink_pack(oldest)
                self.contents.drop_pack(oldest)

    def _delete_gone(self) -> int:
        """Delete the folders of processes that are long gone. Returns the number of bytes that were
        freed."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_FOR_GONE_S:
            return 0
        self._looked_at = now
        freed = 0
        since = os.fstat(self._lock).st_mtime - GONE_S  # both times are set by the file server
        for folder in folders_in(self._root):
            with contextlib.suppress(OSError):
                old = folder != self.folder and (folder / LOCK_NAME).stat().st_mtime < since
                if old and is_writers(folder) and not is_locked(folder / LOCK_NAME):
                    freed += sum(_packs_in(folder).values())
                    _delete_folder(folder)
        return freed

    def show_life(self) -> None:
        """Show other hosts, at most every ``SIGN_OF_LIFE_S`` seconds, that this process still uses
        the folder.

        Raises:
            OSError: the lock file cannot be updated.
        """
        now = time.monotonic()
        if now - self._alive_at >= SIGN_OF_LIFE_S:
            os.utime(self._lock)
            self._alive_at = now

    # -- the index --------------------------------------------------------------------

    def _note(self, entries: Sequence[Entry]) -> None:
        """Save entries. If the disk is full, this process's oldest packs are deleted to free
        space."""
        self._apply(entries)
        self._make_room_for(lambda: self._write_entries(entries))

    def _save(self, entries: Sequence[Entry]) -> None:
        """Save entries.

        Raises:
            OSError: the write failed. The entries are applied here, and the next rewrite includes
                them.
        """
        self._apply(entries)
        self._write_entries(entries)

    def _apply(self, entries: Sequence[Entry]) -> None:
        self.contents.apply(entries)
        self._entries += len(entries)

    def _write_entries(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        if self._torn or self._entries > 2 * len(self.contents.places) + MOST_STALE:
            self._rewrite()
            return
        self._torn = True
        added = pack_entries(entries, self._number)
        with opened(self.folder / INDEX_NAME, os.O_WRONLY) as fd:
            _write(fd, [added], self._index_bytes)
        self._index_bytes += len(added)
        self._torn = False

    def _rewrite(self) -> None:
        """Rewrite the index without stale entries."""
        self._torn = True
        self._number = token_bytes(NUMBER_BYTES)
        places = self.contents.places
        entries = [Entry(Kind.VALUE, name, place) for name, place in places.items()]
        data = head_of(self._number) + pack_entries(entries, self._number)
        index, beside = self.folder / INDEX_NAME, self.folder / _NEW_INDEX
        os.close(replace_file(index, data, beside=beside, durable=True))
        self._entries, self._index_bytes = len(entries), len(data)
        self._torn = False


def folders_in(root: Path) -> list[Path]:
    """Return the folders under a root, except links. Some of them may not be writers' folders.

    Raises:
        OSError: the root cannot be read.
    """
    with os.scandir(root) as entries:
        return [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]


def _first_free(root: Path) -> tuple[Path, int]:
    """Lock the first of this host's folders that no process uses, and create it if necessary.
    Returns the folder, and the descriptor of its lock."""
    host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())[:64] or "host"
    for number in itertools.count():
        folder = root / f"{host}.{number}"
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        try:
            fd = open_plain(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT)
        except PermissionError:  # the folder belongs to another user
            continue
        try:
            if try_lock(fd) and os.fstat(fd).st_nlink:
                return folder, fd
        except BaseException:  # a mount without locks
            os.close(fd)
            raise
        os.close(fd)
    raise AssertionError


def _packs_in(folder: Path) -> dict[int, int]:
    """Return the size of each of a folder's packs, by number, oldest first, bytes."""
    with os.scandir(folder) as entries:
        found = [
            (int(match[1]), entry.stat(follow_symlinks=False).st_size)
            for entry in entries
            if (match := _PACK.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)
        ]
    return dict(sorted(found))


def _delete_folder(folder: Path) -> None:
    """Delete a writer's folder as far as possible. Only files that a writer creates are deleted."""
    with contextlib.suppress(OSError):
        for name in (INDEX_NAME, _NEW_INDEX, *map(pack_name, _packs_in(folder)), LOCK_NAME):
            with contextlib.suppress(FileNotFoundError):
                (folder / name).unlink()
        folder.rmdir()


def _write(fd: int, parts: Parts, offset: int) -> None:
    for part in parts:
        left = memoryview(part).cast("B")
        while left:
            written = os.pwrite(fd, left, offset)
            left, offset = left[written:], offset + written
