"""Options of a store, and its totals since it was opened.

The module also has the resources that the parts of an open store share: files, buffers, threads and
counters.
"""

from __future__ import annotations

import errno
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tiered_kv.codecs.base import Bytes, Codec, PageFormat
from tiered_kv.remote.breaker import Complaint
from tiered_kv.storage.disk.aligned import BufferPool
from tiered_kv.storage.disk.files import BLOCK, FileLayer
from tiered_kv.storage.segment.format import MIN_PAGES, SEGMENT_BYTES, least_segment_bytes

from .locks import StoreError


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Location and owner of a store, and the space it may use.

    Attributes:
        root: folder shared by all ranks, replicas and fingerprints.
        fingerprint: the first 16 bytes of the page keys; pages of other fingerprints are in other
            folders.
        replica: index of the engine among data-parallel engines.
        rank: index of the worker.
        ranks: number of workers.
        page_format: format of a page.
        capacity_bytes: space for the segments of all stores under the root, bytes; less if the disk
            has less space.
        io_threads: number of threads that encode, decode, read and write.
    """

    root: Path
    fingerprint: bytes
    replica: int
    rank: int
    ranks: int
    page_format: PageFormat
    capacity_bytes: int
    io_threads: int = 4

    @property
    def folder(self) -> Path:
        return self.root / self.fingerprint.hex() / f"{self.replica}-{self.rank}"

    @property
    def segment_bytes(self) -> int:
        """Size of a segment if the disk has space for the whole capacity, bytes."""
        return self.segment_bytes_of(self.capacity_bytes)

    def segment_bytes_of(self, capacity_bytes: int) -> int:
        """Return the size of a segment for that capacity, bytes: a sixteenth of a rank's part,
        within limits."""
        least = least_segment_bytes(self.page_format)
        fair = capacity_bytes // (16 * max(1, self.ranks)) // BLOCK * BLOCK
        return max(least, min(SEGMENT_BYTES, fair))

    def is_page(self, page: Bytes) -> bool:
        """Return True if the array is one page of this format."""
        return (
            page.dtype == np.uint8
            and page.shape == (self.page_format.page_bytes,)
            and page.flags.c_contiguous
        )

    def check(self, codec: Codec) -> None:
        """Check that the options work with that codec for new pages.

        Raises:
            StoreError: the fingerprint does not have 16 bytes, the codec has another page format,
                or the capacity is less than two segments.
        """
        if len(self.fingerprint) != 16:
            raise StoreError("the fingerprint of a store must have 16 bytes")
        if codec.page_format != self.page_format:
            raise StoreError("the codec and the store must have the same page format")
        if self.capacity_bytes < 2 * self.segment_bytes:
            needed = 2 * self.segment_bytes / (1 << 30)
            raise StoreError(
                f"a store of {self.capacity_bytes} bytes cannot hold two segments of {MIN_PAGES} "
                f"pages: raise TIERED_KV_SSD_GIB to {needed:.2f} or more"
            )


@dataclass(slots=True)
class StoreStats:
    """Totals of a store since it was opened. Bytes written and read are stored bytes."""

    bytes_written: int = 0
    bytes_read: int = 0
    pages_bad: int = 0
    """Number of pages that were damaged or could not be read, each of which was dropped."""
    pages_refused: int = 0
    """Number of pages passed to ``put`` that were not stored, for any reason."""
    pages_kept_coded: int = 0
    """Number of pages that arrived encoded and were stored unchanged."""
    pages_recoded: int = 0
    """Number of pages that arrived encoded, and were decoded and encoded again with the store's
    codec."""
    no_room: int = 0
    """Number of segments that could not be allocated for lack of space."""
    write_errors: int = 0
    read_errors: int = 0
    segments_bad: int = 0
    """Number of segments that were unusable when the store was opened."""


def io_threads(cores: int) -> int:
    """Return the number of threads for a store that may use that many cores.

    There are two threads per core, because half of them wait for the disk; at least four, for the
    disk's queue depth; and at most eight.
    """
    return max(4, min(8, 2 * cores))


logger = logging.getLogger(__name__)

WRITE_BYTES = 4 << 20
"""Target size of one write, bytes."""


def is_full(error: OSError) -> bool:
    """Return True if the error means that the disk, or its quota, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class StoreContext:
    """Shared resources of one open store.

    Attributes:
        direct: True if files are read and written with direct I/O.
        stats: totals, counted on the store's thread by the part that does the work.
        full: limits how often a full disk is logged.
    """

    options: StoreOptions
    stats: StoreStats
    files: FileLayer
    direct: bool
    buffers: BufferPool
    threads: ThreadPoolExecutor
    full: Complaint = field(default_factory=Complaint)

    def write_failed(self, what: str, error: OSError) -> None:
        """Count a failed write and log it. A full disk is logged at most every ten minutes."""
        self.stats.write_errors += 1
        if not is_full(error):
            logger.warning("%s: %s", what, error)
        elif self.full.begins("", time.monotonic()):
            logger.warning("%s: %s. Old pages on SSD are deleted to make space", what, error)

    def no_room(self, limit: int) -> None:
        """Count a segment that could not be allocated.

        If ``limit``, the space for segments, is less than the configured capacity, this is logged,
        at most every ten minutes.
        """
        self.stats.no_room += 1
        if limit < self.options.capacity_bytes and self.full.begins("", time.monotonic()):
            logger.warning(
                "the disk of %s has space for only %.3g GiB of pages, less than TIERED_KV_SSD_GIB, "
                "so old pages are deleted to make space",
                self.options.root,
                limit / (1 << 30),
            )
