"""Transfer on machines without a GPU, where "VRAM" is the engine's CPU tensor.

A forward pass has finished when it returns, so copies need no ordering against compute. Copies run
on one thread, without the interpreter lock.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiered_kv.page_group import PageLayout

from .base import CopyJob, CopyResult, Direction, TransferBackend
from .copy_plan import PageRuns, Pages, check_layouts, page_runs, plan_copies, sort_out
from .host_memory import CpuPool
from .streaming import copy_runs

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]


class CpuTransfer(TransferBackend):
    """Copies between ``storage`` and ``pool``.

    Args:
        layouts: locations of a block's bytes in the storage, for each page group.
        storage: the engine's KV allocation, uint8 ``[bytes]``, contiguous.
        pool: slots as large as the largest page.

    Raises:
        ValueError: the storage is too small for the layout, or a slot has another size than the
            largest page.
    """

    def __init__(self, layouts: Sequence[PageLayout], storage: Bytes, pool: CpuPool) -> None:
        slot_bytes = pool.slots.shape[1]
        check_layouts(layouts, storage.nbytes, slot_bytes)
        self._storage = storage.reshape(-1)
        self._slab = pool.slots.reshape(-1)
        self._num_blocks = [layout.num_blocks for layout in layouts]
        self._num_slots = len(pool.slots)
        self._runs = [page_runs(layout, slot_bytes) for layout in layouts]
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[CopyResult] = queue.SimpleQueue()
        self._pending = 0
        self._idle = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="tiered-kv-copy", daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        with self._idle:
            self._pending += 1
        self._jobs.put(job)

    def run(self, job: CopyJob) -> CopyResult:
        return self._copy(job)

    def poll(self) -> list[CopyResult]:
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        return results

    def drain(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._pending == 0)

    def close(self) -> None:
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
        self._storage = self._slab = np.empty(0, dtype=np.uint8)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._results.put(self._copy(job))
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()

    def _copy(self, job: CopyJob) -> CopyResult:
        """Copy the valid pages, and report the other pages as failed."""
        began = time.perf_counter()
        runs = self._runs[job.group]
        pages = sort_out(job, self._num_blocks[job.group], self._num_slots)
        failed = pages.failed
        if failed:
            logger.error(
                "%s: %d pages are not copied, because their block or slot does not exist",
                job.direction.value,
                len(failed),
            )
        try:
            if len(pages):
                self._copy_pages(job.direction, runs, pages)
        except Exception:
            logger.exception("%s of %d pages failed", job.direction.value, len(pages))
            failed = frozenset(range(len(job.blocks)))
        nbytes = (len(job.blocks) - len(failed)) * runs.page_bytes
        return CopyResult(job.job_id, failed, nbytes, time.perf_counter() - began)

    def _copy_pages(self, direction: Direction, runs: PageRuns, pages: Pages) -> None:
        copies = plan_copies(runs, pages)
        if direction is Direction.SAVE:
            copy_runs(self._slab, copies.slab, self._storage, copies.storage, copies.nbytes)
        else:
            copy_runs(self._storage, copies.storage, self._slab, copies.slab, copies.nbytes)
