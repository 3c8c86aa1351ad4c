"""Contents of a writer's folder, as its index tells them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tiered_kv.storage.disk.files import open_plain

from .index_entries import HEAD_BYTES, Entry, Kind, Place, number_in, parse_entries

INDEX_NAME = "index"
GONE = (errno.ENOENT, errno.ESTALE)
"""Errors that say that a file is not there any more: on a network file system also of one that is
open."""
READ_BYTES = 1 << 20


def pack_name(number: int) -> str:
    """Name of a pack's file."""
    return f"{number:08}.pack"


def is_writers(folder: Path) -> bool:
    """True if a writer made the folder, and not somebody else for something else.

    Raises:
        OSError: that cannot be told.
    """
    fd = open_plain(folder / INDEX_NAME, os.O_RDONLY)
    try:
        return number_in(os.pread(fd, HEAD_BYTES, 0)) is not None
    finally:
        os.close(fd)


class FolderContents:
    """Values of one folder, by name. Entries later in the index hold."""

    def __init__(self) -> None:
        self.places: dict[bytes, Place] = {}
        self._names: dict[int, list[bytes]] = {}

    def apply(self, entries: Iterable[Entry]) -> None:
        """Take in news, the oldest first."""
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
    """A folder that another process writes, read as far as its index goes.

    Opening a file anew is what makes a network file system look whether it has changed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents = FolderContents()
        self._number = b""
        self._read_to = 0

    def refresh(self) -> None:
        """Read what was added to the index.

        Raises:
            OSError: it cannot be read, though it is there.
        """
        with contextlib.ExitStack() as stack:
            try:
                fd = open_plain(self.folder / INDEX_NAME, os.O_RDONLY)
                stack.callback(os.close, fd)
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
