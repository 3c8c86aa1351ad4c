"""Transfer on CUDA: torch copies on streams of their own, ordered by events.

Not yet run on a GPU (docs/gpu.md says what was). Saves wait for the compute stream as it
stands when they are submitted; loads wait for it too, since it may still read what the
blocks held before; and what is enqueued on the compute stream after ``run`` waits for the
copy. No call here waits for the device, but ``drain`` and ``close``.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from tiered_kv.layout import PageLayout
from tiered_kv.storage.cpu_pool import CpuPool
from tiered_kv.transfer.base import CopyJob, CopyResult, Direction, TransferBackend

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Flight:
    job: CopyJob
    failed: frozenset[int]
    began: Any
    done: Any


class CudaTransfer(TransferBackend):
    """Copies between VRAM and a (pinned) CPU pool.

    Args:
        layout: where a block's bytes lie in the storage.
        storage: the engine's KV allocation, uint8 ``[bytes]`` on the GPU.
        pool: slots of ``layout.page_bytes`` bytes.
    """

    def __init__(self, layout: PageLayout, storage: torch.Tensor, pool: CpuPool) -> None:
        self._device = storage.device
        slots = torch.from_numpy(pool.slots)
        self._pairs = []
        start = 0
        for region in layout.regions:
            blocks = storage.as_strided(
                (layout.num_blocks, region.count, region.nbytes),
                (region.block_stride, region.run_stride, 1),
                region.offset,
            )
            end = start + region.bytes_per_block
            part = slots[:, start:end].unflatten(1, (region.count, region.nbytes))
            self._pairs.append((blocks, part))
            start = end
        self._page_bytes = layout.page_bytes
        lowest, _ = torch.cuda.Stream.priority_range()
        self._streams = {
            direction: torch.cuda.Stream(self._device, priority=lowest) for direction in Direction
        }
        self._flights: deque[_Flight] = deque()

    def submit(self, job: CopyJob) -> None:
        self._flights.append(self._enqueue(job))

    def run(self, job: CopyJob) -> CopyResult:
        flight = self._enqueue(job)
        torch.cuda.current_stream(self._device).wait_event(flight.done)
        return self._result(flight, seconds=0.0)

    def poll(self) -> list[CopyResult]:
        results = []
        for _ in range(len(self._flights)):
            flight = self._flights.popleft()
            if flight.done.query():
                seconds = flight.began.elapsed_time(flight.done) / 1e3
                results.append(self._result(flight, seconds))
            else:
                self._flights.append(flight)
        return results

    def drain(self) -> None:
        for flight in self._flights:
            flight.done.synchronize()

    def close(self) -> None:
        self.drain()
        self._flights.clear()
        self._pairs = []

    def _enqueue(self, job: CopyJob) -> _Flight:
        stream = self._streams[job.direction]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        failed = set()
        with torch.cuda.stream(stream):
            began.record(stream)
            for i, (block, slot) in enumerate(zip(job.blocks, job.slots, strict=True)):
                try:
                    self._copy(job.direction, block, slot)
                except Exception:
                    logger.exception("%s of block %s, slot %s failed", job.direction, block, slot)
                    failed.add(i)
            done.record(stream)
        return _Flight(job, frozenset(failed), began, done)

    def _copy(self, direction: Direction, block: int, slot: int) -> None:
        if block < 0 or slot < 0:
            raise IndexError(f"block {block}, slot {slot}")
        for blocks, slots in self._pairs:
            if direction is Direction.SAVE:
                slots[slot].copy_(blocks[block], non_blocking=True)
            else:
                blocks[block].copy_(slots[slot], non_blocking=True)

    def _result(self, flight: _Flight, seconds: float) -> CopyResult:
        nbytes = (len(flight.job.blocks) - len(flight.failed)) * self._page_bytes
        return CopyResult(flight.job.job_id, flight.failed, nbytes, seconds)
