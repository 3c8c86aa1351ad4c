"""Transfer on machines without a GPU, where "VRAM" is the engine's CPU tensor.

Forward passes are over when they return, so ordering against compute is free. Copies
run on one thread, without the interpreter lock.
"""

from __future__ import annotations

import logging
import queue
import threading
import time

import numpy as np
from numpy.typing import NDArray

from tiered_kv.layout import PageLayout

from .base import CopyJob, CopyResult, Direction, TransferBackend
from .copy_plan import Pages, page_runs, plan_copies, sort_out
from .cpu_pool import CpuPool
from .streaming import copy_runs

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]


class CpuTransfer(TransferBackend):
    """Copies between ``storage`` and ``pool``.

    Args:
        layout: where a block's bytes lie in the storage.
        storage: the engine's KV allocation, uint8 ``[bytes]``, contiguous.
        pool: slots of ``layout.page_bytes`` bytes.

    Raises:
        ValueError: storage or slots too small for the layout.
    """

    def __init__(self, layout: PageLayout, storage: Bytes, pool: CpuPool) -> None:
        if storage.nbytes < layout.storage_bytes:
            raise ValueError(
                f"the KV cache has {storage.nbytes} bytes, its layout spans {layout.storage_bytes}"
            )
        if pool.slots.shape[1] != layout.page_bytes:
            raise ValueError(f"slots of {pool.slots.shape[1]} B for pages of {layout.page_bytes} B")
        self._storage = storage.reshape(-1)
        self._slab = pool.slots.reshape(-1)
        self._num_blocks, self._num_slots = layout.num_blocks, len(pool.slots)
        self._runs = page_runs(layout)
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
        """Copy the pages that exist; the others are reported."""
        began = time.perf_counter()
        pages = sort_out(job, self._num_blocks, self._num_slots)
        failed = pages.failed
        if failed:
            logger.error("%s: %d pages do not exist", job.direction, len(failed))
        try:
            if len(pages):
                self._copy_pages(job.direction, pages)
        except Exception:
            logger.exception("%s of %d pages failed", job.direction, len(pages))
            failed = frozenset(range(len(job.blocks)))
        nbytes = (len(job.blocks) - len(failed)) * self._runs.page_bytes
        return CopyResult(job.job_id, failed, nbytes, time.perf_counter() - began)

    def _copy_pages(self, direction: Direction, pages: Pages) -> None:
        copies = plan_copies(self._runs, pages)
        if direction is Direction.SAVE:
            copy_runs(self._slab, copies.slab, self._storage, copies.storage, copies.nbytes)
        else:
            copy_runs(self._storage, copies.storage, self._slab, copies.slab, copies.nbytes)
