"""Resources that the parts of an open store share: files, buffers, threads and counters."""

from __future__ import annotations

import errno
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tiered_kv.storage.disk.aligned import BufferPool
from tiered_kv.storage.disk.files import FileLayer

from .options import StoreOptions, StoreStats

logger = logging.getLogger(__name__)

WRITE_BYTES = 4 << 20
"""Target size of one write, bytes."""

_SAY_AGAIN_S = 600.0


def is_full(error: OSError) -> bool:
    """Test an error: True if the disk, or a quota of it, has no room left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True)
class Seldom:
    """Limits how often a message is logged."""

    said_at: float = -math.inf

    def due(self) -> bool:
        """True if the message is to be logged now."""
        now = time.monotonic()
        if now - self.said_at < _SAY_AGAIN_S:
            return False
        self.said_at = now
        return True


@dataclass(frozen=True, slots=True)
class StoreContext:
    """Shared resources of one open store.

    Attributes:
        direct: True if files are read and written past the page cache.
        stats: totals, counted on the store's thread by whoever does a thing.
    """

    options: StoreOptions
    stats: StoreStats
    files: FileLayer
    direct: bool
    buffers: BufferPool
    threads: ThreadPoolExecutor
    full: Seldom = field(default_factory=Seldom)

    def write_failed(self, what: str, error: OSError) -> None:
        """Count a failed write and log it: of a full disk, every ten minutes."""
        self.stats.write_errors += 1
        if not is_full(error):
            logger.warning("%s: %s", what, error)
        elif self.full.due():
            logger.warning("%s: %s; pages on SSD make room for new ones", what, error)

    def no_room(self, limit: int) -> None:
        """Count a segment that could not be had.

        It is logged every ten minutes, if the disk has room for no more than ``limit`` bytes.
        """
        self.stats.no_room += 1
        if limit < self.options.capacity_bytes and self.full.due():
            logger.warning(
                "the disk of %s has room for %.3g GiB of pages, not for TIERED_KV_SSD_GIB; pages "
                "on SSD make room for new ones",
                self.options.root,
                limit / (1 << 30),
            )
