"""Transfer on machines without a GPU, where "VRAM" is the engine's CPU tensor.

Forward passes are over when they return, so ordering against compute is free. Copies
run on one thread; numpy releases the GIL while it copies.
"""

from __future__ import annotations

import logging
import queue
import threading
import time

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from tiered_kv.layout import PageLayout
from tiered_kv.storage.cpu_pool import CpuPool
from tiered_kv.transfer.base import CopyJob, CopyResult, Direction, TransferBackend

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
        self._pairs = _views(layout, storage, pool.slots)
        self._page_bytes = layout.page_bytes
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
        self._pairs = []

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._results.put(self._copy(job))
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()

    def _copy(self, job: CopyJob) -> CopyResult:
        """Copy page by page; a page that fails is reported, the others go on."""
        began = time.perf_counter()
        failed = set()
        for i, (block, slot) in enumerate(zip(job.blocks, job.slots, strict=True)):
            try:
                if block < 0 or slot < 0:
                    raise IndexError(f"block {block}, slot {slot}")
                for blocks, slots in self._pairs:
                    if job.direction is Direction.SAVE:
                        np.copyto(slots[slot], blocks[block])
                    else:
                        np.copyto(blocks[block], slots[slot])
            except Exception:
                logger.exception("%s of block %s, slot %s failed", job.direction, block, slot)
                failed.add(i)
        nbytes = (len(job.blocks) - len(failed)) * self._page_bytes
        return CopyResult(job.job_id, frozenset(failed), nbytes, time.perf_counter() - began)


def _views(layout: PageLayout, storage: Bytes, slots: Bytes) -> list[tuple[Bytes, Bytes]]:
    """For each region the same bytes twice: ``[blocks, count, nbytes]`` and ``[slots, …]``."""
    pairs = []
    start = 0
    for region in layout.regions:
        blocks = as_strided(
            storage[region.offset :],
            shape=(layout.num_blocks, region.count, region.nbytes),
            strides=(region.block_stride, region.run_stride, 1),
        )
        parts = as_strided(
            slots[:, start:],
            shape=(len(slots), region.count, region.nbytes),
            strides=(layout.page_bytes, region.nbytes, 1),
        )
        pairs.append((blocks, parts))
        start += region.bytes_per_block
    return pairs
