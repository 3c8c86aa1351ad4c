"""Writes one rank's pages into the draft of a snapshot."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import numpy as np

from tiered_kv.codecs.base import Bytes, PageFormat
from tiered_kv.codecs.scratch import Scratch
from tiered_kv.plain_files import opened
from tiered_kv.storage.disk.files import RealFiles

from .manifest import SnapshotError, SnapshotPage
from .page_file import PagePool, decode_page, encode_page, least_file_bytes, most_file_bytes
from .part_file import Origin, Part, StoredPage, part_path
from .snapshot_files import PAGES, disk_errors, fill, sync_file, write_new

SYNC_THREADS = 8
"""Number of files that are synced concurrently. A disk syncs many files in about the time of one
file."""


class PageWriter:
    """Writes one rank's pages, in the rank's own process.

    Args:
        folder: ``SnapshotDraft.folder``.
        rank: number of the rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._pages = folder / PAGES
        self._pool = PagePool(folder.parent)
        self._lock = threading.Lock()
        self._added: dict[tuple[int, int], SnapshotPage] = {}
        self._begun: set[str] = set()
        self._files: dict[str, StoredPage] = {}
        self._numbers = itertools.count()
        self._finished = False

    def add(self, group: int, block: int, key: bytes, page_format: PageFormat, page: Bytes) -> None:
        """Write a page. May be called on several threads.

        Args:
            group: position of the page's group in ``Manifest.groups``.
            block: index in the job's block table.
            key: the page's key.
            page: the page, contiguous; it may change after the call.

        Raises:
            SnapshotError: the page does not match its format, was already added, or cannot be
                written, or ``finish`` was already called. After a failed write, ``finish`` raises
                an error too.
        """
        if page.nbytes != page_format.page_bytes:
            raise SnapshotError(
                f"a page has {page.nbytes} bytes, but pages of its group have "
                f"{page_format.page_bytes}"
            )
        digest = sha256(page.data).hexdigest()
        with self._lock:
            if self._finished:
                raise SnapshotError(
                    f"rank {self._rank} has already finished, and accepts no more pages"
                )
            if (group, block) in self._added:
                raise SnapshotError(f"rank {self._rank} added block {block} of group {group} twice")
            self._added[group, block] = SnapshotPage(group, block, self._rank, digest, key.hex())
            first = digest not in self._begun
            self._begun.add(digest)
        if first:
            with disk_errors("a page of the snapshot cannot be written"):
                stored = self._store(digest, page_format, page)
            with self._lock:
                self._files[digest] = stored

    def finish(self) -> None:
        """Make all pages durable, and write the rank's part.

        Raises:
            SnapshotError: a page could not be written, or could not be made durable, or this method
                was already called.
        """
        with self._lock:
            if self._finished:
                raise SnapshotError(f"rank {self._rank} has already finished")
            self._finished = True
        if len(self._files) != len(self._begun):
            raise SnapshotError(f"rank {self._rank} could not write all of its pages")
        part = Part(self._rank, tuple(self._added.values()), self._files)
        with disk_errors("the pages of the snapshot cannot be made durable"):
            paths = [self._pages / digest for digest in self._files]
            # Includes files of other ranks, which may have been written a moment ago.
            with ThreadPoolExecutor(SYNC_THREADS, "tiered-kv-snapshot") as threads:
                for _ in threads.map(sync_file, paths):
                    pass
            RealFiles().sync_folder(self._pages)
            write_new(part_path(self._folder, self._rank), [part.dump()], durable=True)
            RealFiles().sync_folder(self._folder)

    def _store(self, digest: str, page_format: PageFormat, page: Bytes) -> StoredPage:
        path = self._pages / digest
        origin = self._pool.link_to(digest, path)
        if origin in (Origin.SHARED, Origin.BESIDE):
            nbytes = _size_of_same(path, page_format, page)
            if nbytes is not None:
                return StoredPage(nbytes, origin)
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            origin = Origin.AGAIN
        # Another rank may write the same page now. Each renames a complete file.
        making = self._folder / f"page-{self._rank}-{next(self._numbers)}"
        nbytes = write_new(making, encode_page(page, page_format))
        os.rename(making, path)  # noqa: PTH104
        return StoredPage(nbytes, origin)


def _size_of_same(path: Path, page_format: PageFormat, page: Bytes) -> int | None:
    """Return the size of a page's file; None if the file does not contain exactly the page
    ``page``."""
    try:
        with opened(path) as fd:
            nbytes = os.fstat(fd).st_size
            if not least_file_bytes() <= nbytes <= most_file_bytes(page_format):
                return None
            stored = _stored.bytes(nbytes)
            fill(fd, 0, stored)
        found = _found.bytes(page.nbytes)
        decode_page(stored, page_format, found)
    except (OSError, SnapshotError):
        return None
    return nbytes if np.array_equal(found, page) else None


_stored, _found = Scratch(), Scratch()
