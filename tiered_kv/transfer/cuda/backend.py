"""Transfer on CUDA: a kernel or the copy engines, on streams of their own, ordered by events.

Not yet run on a GPU (docs/gpu.md says what was).

Saves wait for the compute stream as it stands when they are submitted. Loads wait for it too,
since it may still read what the blocks held before; and what is enqueued on the compute
stream after ``run`` waits for the copy. Saves yield to the model, whose streams have a higher
priority or the same; loads do not, since a request waits for them.

A job is reported when its event has passed. Everything the GPU wrote before an event is
visible to the CPU that has seen it pass, so slots may then be read without further ado; and
blocks and slots of a job are held by whoever submitted it until it is reported. A result of
``run`` comes earlier, before the bytes: its slots are free when the compute stream has come
past it, as it has when a forward pass has given its tokens.

Nothing here may be captured into a CUDA graph, whose replays would copy blocks of long ago:
the connector's hooks run between graphs, and a job that comes during a capture is refused.
No call waits for the device, but ``drain`` and ``close``.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from tiered_kv.layout import PageLayout
from tiered_kv.transfer.base import CopyJob, CopyResult, Direction, TransferBackend
from tiered_kv.transfer.copy_plan import Pages, count_copies, page_runs, sort_out
from tiered_kv.transfer.cpu_pool import CpuPool

from .calibration import copy_costs
from .copy_cost import kernel_pays
from .copy_engines import CopyEngines
from .page_kernel import BLOCKS, PageKernel
from .runtime import CudaRuntime, cuda_major

logger = logging.getLogger(__name__)


class CopyBy(Enum):
    """What makes the copies."""

    FASTER = "faster"
    """Whichever is faster for the job, by what was measured at start."""
    KERNEL = "kernel"
    ENGINES = "engines"


@dataclass(slots=True)
class _Flight:
    job: CopyJob
    failed: frozenset[int]
    began: Any
    done: Any
    held: list[torch.Tensor] = field(default_factory=list)


class CudaTransfer(TransferBackend):
    """Copies between VRAM and a (pinned) CPU pool.

    Args:
        layout: where a block's bytes lie in the storage.
        storage: the engine's KV allocation, uint8 ``[bytes]`` on the GPU, contiguous.
        pool: slots of ``layout.page_bytes`` bytes. If it is not pinned, the copy engines make
            all copies.
        by: tests and benchmarks want one way or the other.
        kernel_blocks: thread blocks of a launch, which occupy at most as many multiprocessors.

    Raises:
        ValueError: storage or slots too small for the layout.
        ImportError, CudaError: ``by`` asks for a kernel, and there can be none.
    """

    def __init__(
        self,
        layout: PageLayout,
        storage: torch.Tensor,
        pool: CpuPool,
        by: CopyBy = CopyBy.FASTER,
        kernel_blocks: int = BLOCKS,
    ) -> None:
        if storage.nbytes < layout.storage_bytes:
            raise ValueError(
                f"the KV cache has {storage.nbytes} bytes, its layout spans {layout.storage_bytes}"
            )
        if pool.slots.shape[1] != layout.page_bytes:
            raise ValueError(f"slots of {pool.slots.shape[1]} B for pages of {layout.page_bytes} B")
        self._device = storage.device
        self._num_blocks, self._num_slots = layout.num_blocks, len(pool.slots)
        self._runs = page_runs(layout)
        self._by = by
        with torch.cuda.device(self._device):
            runtime = CudaRuntime(cuda_major())
            slab = pool.slots.ctypes.data
            self._engines = CopyEngines(
                runtime, self._runs, storage.data_ptr(), slab, pinned=pool.pinned
            )
            self._costs = copy_costs(self._device) if by is CopyBy.FASTER and pool.pinned else {}
            self._kernel: PageKernel | None = None
            if by is CopyBy.KERNEL or any(cost.kernel for cost in self._costs.values()):
                self._kernel = PageKernel(runtime, self._runs, storage, slab, kernel_blocks)
        lowest, highest = torch.cuda.Stream.priority_range()
        self._streams = {
            Direction.SAVE: torch.cuda.Stream(self._device, priority=lowest),
            Direction.LOAD: torch.cuda.Stream(self._device, priority=highest),
        }
        self._refused: list[CopyResult] = []
        self._flights: deque[_Flight] = deque()
        self._reported_early: deque[_Flight] = deque()

    def takes_kernel(self, job: CopyJob) -> bool:
        """Whether the kernel would make this copy, not the copy engines."""
        return self._takes_kernel(job.direction, sort_out(job, self._num_blocks, self._num_slots))

    def submit(self, job: CopyJob) -> None:
        flight = self._enqueue(job)
        if flight is None:
            self._refused.append(_refusal(job))
        else:
            self._flights.append(flight)

    def run(self, job: CopyJob) -> CopyResult:
        flight = self._enqueue(job)
        if flight is None:
            return _refusal(job)
        torch.cuda.current_stream(self._device).wait_event(flight.done)
        self._landed(self._reported_early)
        self._reported_early.append(flight)
        return self._result(flight, seconds=0.0)

    def poll(self) -> list[CopyResult]:
        self._landed(self._reported_early)
        results, self._refused = self._refused, []
        for flight in self._landed(self._flights):
            seconds = flight.began.elapsed_time(flight.done) / 1e3
            results.append(self._result(flight, seconds))
        return results

    def drain(self) -> None:
        for flight in (*self._flights, *self._reported_early):
            flight.done.synchronize()

    def close(self) -> None:
        self.drain()
        self._flights.clear()
        self._reported_early.clear()
        self._kernel = None

    def _landed(self, flights: deque[_Flight]) -> list[_Flight]:
        """Take out the flights that are done; what they held is free again."""
        landed = []
        for _ in range(len(flights)):
            flight = flights.popleft()
            if not flight.done.query():
                flights.append(flight)
                continue
            if self._kernel is not None:
                self._kernel.reuse(flight.held)
            landed.append(flight)
        return landed

    def _enqueue(self, job: CopyJob) -> _Flight | None:
        """None, and nothing enqueued, during the capture of a CUDA graph."""
        pages = sort_out(job, self._num_blocks, self._num_slots)
        if pages.failed:
            logger.error("%s: %d pages do not exist", job.direction, len(pages.failed))
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                logger.error("%s during the capture of a CUDA graph: refused", job.direction)
                return None
            began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flight = _Flight(job, pages.failed, began, done)
            stream = self._streams[job.direction]
            stream.wait_stream(torch.cuda.current_stream(self._device))
            began.record(stream)
            try:
                if len(pages):
                    self._copy(job.direction, pages, stream.cuda_stream, flight.held)
            except Exception:  # some copies may be under way all the same, hence the event
                logger.exception("%s of %d pages failed", job.direction, len(pages))
                flight.failed = frozenset(range(len(job.blocks)))
            done.record(stream)
        return flight

    def _copy(
        self, direction: Direction, pages: Pages, stream: int, held: list[torch.Tensor]
    ) -> None:
        if self._kernel is not None and self._takes_kernel(direction, pages):
            self._kernel.enqueue(direction, pages, stream, held)
        else:
            self._engines.enqueue(direction, pages, stream)

    def _takes_kernel(self, direction: Direction, pages: Pages) -> bool:
        if self._by is not CopyBy.FASTER or not self._costs:
            return self._by is CopyBy.KERNEL
        cost = self._costs[direction]
        if cost.kernel is None:
            return False
        copies = count_copies(self._runs, pages)
        return kernel_pays(cost.kernel, cost.engines, copies, len(pages) * self._runs.page_bytes)

    def _result(self, flight: _Flight, seconds: float) -> CopyResult:
        nbytes = (len(flight.job.blocks) - len(flight.failed)) * self._runs.page_bytes
        return CopyResult(flight.job.job_id, flight.failed, nbytes, seconds)


def _refusal(job: CopyJob) -> CopyResult:
    return CopyResult(job.job_id, frozenset(range(len(job.blocks))), 0, 0.0)
