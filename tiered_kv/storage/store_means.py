"""What the parts of an open store work with: its files, buffers, threads and counters."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tiered_kv.storage.aligned import BufferPool
from tiered_kv.storage.files import FileLayer
from tiered_kv.storage.store_options import StoreOptions, StoreStats

logger = logging.getLogger(__name__)

WRITE_BYTES = 4 << 20
"""Of a write, if there are pages enough."""


@dataclass(frozen=True, slots=True)
class StoreMeans:
    """Made once, when a store is opened.

    Attributes:
        direct: whether files are read and written past the page cache.
        stats: counted by whoever does a thing, on the store's thread.
    """

    options: StoreOptions
    stats: StoreStats
    files: FileLayer
    direct: bool
    buffers: BufferPool
    threads: ThreadPoolExecutor

    def write_failed(self, what: str, error: OSError) -> None:
        """Count and log it."""
        self.stats.write_errors += 1
        logger.warning("%s: %s", what, error)
