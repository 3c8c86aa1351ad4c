"""Reads snapshots. A snapshot is a folder, or a zip file with the same contents.

Opening checks everything except the bytes of the pages. Each page is checked against its digest
whenever it is read. Nothing is trusted, so that a snapshot can have any origin: links are not
followed, only the names of a snapshot's files are accepted, and memory use is limited to what its
files and one page need.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np

from tiered_kv.codecs.base import Bytes, PageFormat
from tiered_kv.codecs.scratch import Scratch
from tiered_kv.json_fields import MOST_BYTES
from tiered_kv.plain_files import opened

from .manifest import Manifest, SnapshotError, SnapshotPage, load
from .page_file import decode_page, least_file_bytes, most_file_bytes
from .snapshot_files import MANIFEST, PAGES, ZIP, check_name, disk_errors, fill, read_whole
from .stored_zip import members

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class _Source:
    """Files of a snapshot.

    Attributes:
        manifest: bytes of the manifest.
        sizes: returns the size of a page's file by the page's digest, bytes; None if the file is
            missing.
        read: reads a page's file.
        names: digests of all page files, if a file that the manifest does not list must be refused,
            as in a zip file; otherwise empty.
    """

    manifest: bytes
    sizes: Callable[[str], int | None]
    read: Callable[[str, Bytes], None]
    names: Collection[str] = ()


class Snapshot:
    """An open snapshot. Its methods may be called on several threads, except ``close``.

    Attributes:
        manifest: the manifest.
        nbytes: total size of the snapshot's files, bytes.
    """

    def __init__(self, source: _Source, files: ExitStack) -> None:
        self._source = source
        self.manifest: Manifest = load(source.manifest)
        self._sizes = _checked_sizes(self.manifest, source.sizes)
        for digest in source.names:
            if digest not in self._sizes:
                raise SnapshotError(
                    f"the snapshot contains page {digest}, which is not in the manifest"
                )
        self.nbytes = len(source.manifest) + sum(self._sizes.values())
        self._files = files.pop_all()

    @property
    def files(self) -> Mapping[str, int]:
        """Size of each page's file, bytes, by the page's digest."""
        return self._sizes

    def read_page(self, page: SnapshotPage, out: Bytes) -> None:
        """Read a page of the manifest into ``out``.

        Args:
            out: memory of exactly the size of a page of the page's group.

        Raises:
            SnapshotError: the page is damaged, or cannot be read; ``out`` has undefined contents.
        """
        if not 0 <= page.group < len(self.manifest.groups):
            raise SnapshotError(f"the snapshot has no group {page.group}")
        page_format = self.manifest.groups[page.group].page_format
        stored = _stored.bytes(self._sizes.get(page.sha256, 0))
        self.read_file(page.sha256, stored)
        where = f"block {page.block} of group {page.group}, rank {page.rank}"
        try:
            decode_page(stored, page_format, out)
        except SnapshotError as error:
            raise SnapshotError(f"{where}: {error}") from error
        if sha256(out.data).hexdigest() != page.sha256:
            raise SnapshotError(f"{where}: the page is damaged, so copy the snapshot again")

    def read_file(self, digest: str, out: Bytes) -> None:
        """Read the file of a page into ``out``, without decoding it.

        Raises:
            SnapshotError: the file is missing, or cannot be read.
        """
        if self._sizes.get(digest) != out.nbytes:
            raise SnapshotError(f"the snapshot has no page {digest!r:.80} of {out.nbytes} bytes")
        with disk_errors("a page of the snapshot cannot be read"):
            self._source.read(digest, out)

    def verify(self) -> None:
        """Read and check every page.

        Raises:
            SnapshotError: a page is damaged, or cannot be read.
        """
        sizes = [group.page_format.page_bytes for group in self.manifest.groups]
        memory, seen = np.empty(max(sizes), np.uint8), set[str]()
        for page in self.manifest.pages:
            if page.sha256 not in seen:
                seen.add(page.sha256)
                self.read_page(page, memory[: sizes[page.group]])

    def close(self) -> None:
        """Close the snapshot's files. Idempotent."""
        self._files.close()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_snapshot(path: Path) -> Snapshot:
    """Open a snapshot.

    Args:
        path: the snapshot's folder or zip file.

    Raises:
        SnapshotError: the path is not a snapshot, or the snapshot is damaged.
    """
    with disk_errors(f"{path} cannot be read"), ExitStack() as files:
        fd = _opened(path, None, files)
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            return Snapshot(_folder_source(fd, files), files)
        if stat.S_ISREG(mode):
            return Snapshot(_zip_source(fd), files)
    raise SnapshotError(f"{path} is neither a folder nor a file")


def find_snapshot(root: Path, name: str) -> Path:
    """Return the path of the snapshot with this name.

    Raises:
        SnapshotError: there is no snapshot with this name, the name is invalid, or the root cannot
            be read.
    """
    check_name(name)
    folder, file = root / name, root / (name + ZIP)
    with disk_errors(f"{root} cannot be read"):
        if folder.is_dir() and not folder.is_symlink():
            return folder
        if file.is_file() and not file.is_symlink():
            return file
    raise SnapshotError(f"there is no snapshot {name} in {root}: check the name")


def _checked_sizes(manifest: Manifest, size_of: Callable[[str], int | None]) -> dict[str, int]:
    """Return the size of each page's file, bytes, by the page's digest.

    Raises:
        SnapshotError: a file is missing or has an impossible size, the sum of sizes is wrong, or
            pages of different sizes have the same digest.
    """
    formats: dict[str, PageFormat] = {}
    for page in manifest.pages:
        page_format = manifest.groups[page.group].page_format
        if formats.setdefault(page.sha256, page_format).page_bytes != page_format.page_bytes:
            raise SnapshotError("pages of different sizes have the same digest")
    sizes = {}
    for digest, page_format in formats.items():
        size = size_of(digest)
        if size is None:
            raise SnapshotError(f"the file of page {digest} is missing: copy the snapshot again")
        if not least_file_bytes() <= size <= most_file_bytes(page_format):
            raise SnapshotError(
                f"the file of page {digest} has {size} bytes, which is impossible in its group: "
                "copy the snapshot again"
            )
        sizes[digest] = size
    if sum(sizes.values()) != manifest.stored_bytes:
        raise SnapshotError(
            f"the page files have {sum(sizes.values())} bytes, but {manifest.stored_bytes} "
            "according to the manifest: copy the snapshot again"
        )
    return sizes


def _opened(path: Path | str, folder: int | None, files: ExitStack) -> int:
    """Open a file or folder until ``files`` are closed, and return its descriptor. Does not follow
    a link at the path's end."""
    try:
        fd = os.open(path, _OPEN, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise SnapshotError(f"{path} is a symbolic link: use the path of its target") from error
        raise
    files.callback(os.close, fd)
    return fd


# -- folders ------------------------------------------------------------------------------


def _folder_source(folder: int, files: ExitStack) -> _Source:
    with opened(Path(MANIFEST), dir_fd=folder) as fd:
        manifest = read_whole(fd, MOST_BYTES, "the manifest of the snapshot")
    pages = _opened(PAGES, folder, files)
    if not stat.S_ISDIR(os.fstat(pages).st_mode):
        raise SnapshotError(f"{PAGES} in the snapshot is not a folder: copy the snapshot again")
    return _Source(manifest, partial(_size_in, pages), partial(_read_in, pages))


def _size_in(pages: int, digest: str) -> int | None:
    try:
        found = os.stat(digest, dir_fd=pages, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise SnapshotError(f"the file of page {digest} is not a regular file")
    return found.st_size


def _read_in(pages: int, digest: str, out: Bytes) -> None:
    with opened(Path(digest), dir_fd=pages) as fd:
        fill(fd, 0, out)


# -- zip files ----------------------------------------------------------------------------


def _zip_source(fd: int) -> _Source:
    found = members(fd)
    place = found.pop(MANIFEST, None)
    if place is None:
        raise SnapshotError("the zip file is not a snapshot: it has no manifest")
    if place.nbytes > MOST_BYTES:
        raise SnapshotError(f"the manifest is too large: {place.nbytes} bytes")
    manifest = np.empty(place.nbytes, np.uint8)
    fill(fd, place.offset, manifest)
    places = {name.removeprefix(f"{PAGES}/"): place for name, place in found.items()}
    sizes = {digest: place.nbytes for digest, place in places.items()}

    def read(digest: str, out: Bytes) -> None:
        fill(fd, places[digest].offset, out)

    return _Source(manifest.tobytes(), sizes.get, read, sizes)


_stored = Scratch()
