"""Snapshots on one rank: writes pages of CPU memory to files, and reads pages from files.

The files are handled on separate threads. Writing threads yield to all other work on the machine;
reading threads do not, because a job waits for them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiered_kv.codecs.base import Bytes
from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.machine import run_beside
from tiered_kv.orders import ExportOrder, ImportOrder, OrderReport, SnapshotOrder
from tiered_kv.pages.cold_pages import cold_place
from tiered_kv.snapshot.rank_writer import PageWriter
from tiered_kv.snapshot.reader import open_snapshot
from tiered_kv.storage.bundles import Bundles

from .compressor import Report

logger = logging.getLogger(__name__)

NICE = 19
"""Niceness of the writing threads."""
THREADS = 4
"""Number of reading threads, and of writing threads. One more thread waits for these threads."""


class SnapshotWorker:
    """Carries out snapshot orders, one after another.

    Args:
        slots: the CPU pool's slots.
        bundles: compressed pages, by page group.
        report: called on a thread of this object with the report of each order.
    """

    def __init__(
        self,
        facts: EngineFacts,
        rank: int,
        slots: NDArray[np.uint8],
        bundles: Mapping[int, Bundles],
        report: Report,
    ) -> None:
        self._groups = facts.groups
        self._rank = rank
        self._slots = slots
        self._bundles = bundles
        self._report = report
        self._orders = run_beside("snapshot", 1)
        self._readers = run_beside("snapshot-read", THREADS)
        self._writers = run_beside("snapshot-write", THREADS, NICE)

    def carry_out(self, order: SnapshotOrder) -> None:
        """Start an order."""
        self._orders.submit(self._carry_out, order)

    def _carry_out(self, order: SnapshotOrder) -> None:
        began, all_of_them = time.perf_counter(), frozenset(range(len(order.keys)))
        try:
            failed = self._write(order) if isinstance(order, ExportOrder) else self._read(order)
        except Exception:
            logger.exception("the pages of a snapshot could not be copied")
            failed = all_of_them
        nbytes = sum(self._groups[group].page_bytes for group in order.groups)
        seconds = time.perf_counter() - began
        self._report((order.order_id, OrderReport(1, failed, nbytes, seconds)))

    def _write(self, order: ExportOrder) -> frozenset[int]:
        writer = PageWriter(Path(order.folder), self._rank)

        def write(i: int) -> bool:
            group = order.groups[i]
            page = self._page(order, i)
            if page is None:
                return False
            writer.add(group, order.blocks[i], order.keys[i], self._groups[group].page_format, page)
            return True

        failed = _each(self._writers, write, len(order.keys))
        if not failed:
            writer.finish()
        return failed

    def _page(self, order: ExportOrder, i: int) -> Bytes | None:
        """Return a page to be written; None if it is damaged."""
        group, slot = order.groups[i], order.slots[i]
        nbytes = self._groups[group].page_bytes
        if slot >= 0:
            return self._slots[slot, :nbytes]
        out = np.empty(nbytes, dtype=np.uint8)
        bundles = self._bundles.get(group)
        good = bundles is not None and bundles.read(cold_place(slot), order.keys[i], out)
        return out if good else None

    def _read(self, order: ImportOrder) -> frozenset[int]:
        with open_snapshot(Path(order.path)) as snapshot:
            mine = {
                (page.group, page.block): page
                for page in snapshot.manifest.pages
                if page.rank == self._rank
            }

            def read(i: int) -> bool:
                group = order.groups[i]
                out = self._slots[order.slots[i], : self._groups[group].page_bytes]
                snapshot.read_page(mine[group, order.blocks[i]], out)
                return True

            return _each(self._readers, read, len(order.keys))

    def drain(self) -> None:
        """Wait until all orders that were started before have finished."""
        self._orders.submit(int).result()

    def close(self) -> None:
        """Finish work in flight, and stop the threads. Idempotent."""
        self._orders.shutdown()
        self._readers.shutdown()
        self._writers.shutdown()


def _each(threads: Executor, move: Callable[[int], bool], count: int) -> frozenset[int]:
    """Call ``move`` for each of ``count`` pages. Returns the indices of the pages that could not be
    moved."""

    def moved(i: int) -> bool:
        try:
            return move(i)
        except Exception as error:  # a damaged file may raise anything
            logger.error("a page of a snapshot could not be copied: %s", error)
            return False

    return frozenset(i for i, good in enumerate(threads.map(moved, range(count))) if not good)
