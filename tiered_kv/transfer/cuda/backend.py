"""Transfer on CUDA: with the copy engines, on separate streams ordered by events.

A page that is one run of VRAM is copied directly. Any other page is staged, since the copy engines
are slow at short runs (``staging``). docs/gpu.md lists the tests that ran on a GPU.

Saves wait for the work that the compute stream contains when they are submitted. Loads wait for
this work too, because it may still read the blocks' old contents. Work enqueued on the compute
stream after ``run`` waits for the copy. Saves yield to the model, whose streams have the same or a
higher priority. Loads do not yield, because requests wait for them.

A job is reported when its event has passed. Everything that the GPU wrote before an event is
visible to the CPU once the CPU has seen the event pass, so the CPU may then read the slots
immediately. The submitter of a job must hold its blocks and slots until the job is reported.
``run`` returns before the copy is done. Its slots are free once the compute stream has passed the
copy, which is the case when a forward pass has returned its tokens.

No copy may be captured into a CUDA graph, because replays would copy stale blocks. The connector's
hooks run between graphs, and a job submitted during a capture is refused. No call waits for the
device, except ``drain`` and ``close``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from tiered_kv.page_group import PageLayout
from tiered_kv.transfer.base import CopyJob, CopyResult, Direction, TransferBackend
from tiered_kv.transfer.copy_plan import Pages, check_layouts, page_runs, plan_copies, sort_out
from tiered_kv.transfer.host_memory import CpuPool

from .copy_engines import CopyEngines
from .runtime import CudaRuntime, cuda_major
from .staging import BUFFER_BYTES, Lane, Lanes, StagedCopies

logger = logging.getLogger(__name__)


class CopyBy(Enum):
    """Copy method."""

    FASTER = "faster"
    """Staged if a page is more than one run and the pool is pinned, otherwise by runs."""
    STAGED = "staged"
    """Through a buffer in VRAM, so that whole pages cross the bus."""
    RUNS = "runs"
    """One copy per run, of any length."""


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
        layouts: locations of a block's bytes in the storage, for each page group.
        storage: the engine's KV allocation, uint8 ``[bytes]`` on the GPU, contiguous.
        pool: slots as large as the largest page. If the pool is not pinned, nothing is staged by
            default, because the driver uses its own buffers.
        by: copy method; tests and benchmarks set it.
        buffer_bytes: minimum size of each of the four staging buffers in VRAM, bytes. A page must
            fit.

    Raises:
        ValueError: the storage is too small for the layout, or a slot has another size than the
            largest page.
        CudaError: the pool counts as pinned, but its memory is not registered.
        torch.OutOfMemoryError: not enough VRAM for the buffers.
    """

    def __init__(
        self,
        layouts: Sequence[PageLayout],
        storage: torch.Tensor,
        pool: CpuPool,
        by: CopyBy = CopyBy.FASTER,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        slot_bytes = pool.slots.shape[1]
        check_layouts(layouts, storage.nbytes, slot_bytes)
        self._device = storage.device
        self._num_blocks = [layout.num_blocks for layout in layouts]
        self._num_slots = len(pool.slots)
        self._runs = [page_runs(layout, slot_bytes) for layout in layouts]
        lowest, highest = torch.cuda.Stream.priority_range()
        self._streams = {
            Direction.SAVE: torch.cuda.Stream(self._device, priority=lowest),
            Direction.LOAD: torch.cuda.Stream(self._device, priority=highest),
        }
        staged = {
            group: layout
            for group, layout in enumerate(layouts)
            if by is CopyBy.STAGED
            or (by is CopyBy.FASTER and pool.pinned and len(self._runs[group]) > 1)
        }
        with torch.cuda.device(self._device):
            runtime = CudaRuntime(cuda_major())
            self._engines = CopyEngines(runtime, storage.data_ptr(), pool)
            sizes = [layout.page_bytes for layout in staged.values()]
            lanes = self._lanes(max(buffer_bytes, *sizes)) if staged else {}
            self._staged = {
                group: StagedCopies(runtime, layout, storage, pool, lanes)
                for group, layout in staged.items()
            }
        self._refused: list[CopyResult] = []
        self._flights: deque[_Flight] = deque()
        self._reported_early: deque[_Flight] = deque()

    @property
    def under_way(self) -> int:
        """Number of jobs whose copies are not known to have finished. Each of these jobs may hold
        GPU memory."""
        return len(self._flights) + len(self._reported_early)

    def _lanes(self, nbytes: int) -> Lanes:
        """Return two lanes per direction, with buffers of ``nbytes`` bytes. The first lane uses the
        direction's stream."""

        def lane(stream: torch.cuda.Stream) -> Lane:
            return Lane(stream, torch.empty(nbytes, dtype=torch.uint8, device=self._device))

        return {
            direction: (
                lane(stream),
                lane(torch.cuda.Stream(self._device, priority=stream.priority)),
            )
            for direction, stream in self._streams.items()
        }

    def fence(self) -> AbstractContextManager[None]:
        with torch.cuda.device(self._device):
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self._device))
        return self._behind(done)

    @contextmanager
    def _behind(self, done: Any) -> Iterator[None]:
        """Make the copies that this thread submits in a ``with`` block wait for an event, using a
        separate stream."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream(self._device)
            stream.wait_event(done)
            with torch.cuda.stream(stream):
                yield

    def submit(self, job: CopyJob) -> None:
        flight = self._enqueue(job)
        if flight is None:
            self._refused.append(CopyResult.refusal(job))
        else:
            self._flights.append(flight)

    def run(self, job: CopyJob) -> CopyResult:
        flight = self._enqueue(job)
        if flight is None:
            return CopyResult.refusal(job)
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
        self._staged.clear()  # and their buffers

    def _landed(self, flights: deque[_Flight]) -> list[_Flight]:
        """Remove the finished flights from ``flights``, and release the memory that they held.
        Returns these flights."""
        landed = []
        for _ in range(len(flights)):
            flight = flights.popleft()
            if not flight.done.query():
                flights.append(flight)
                continue
            landed.append(flight)
        return landed

    def _enqueue(self, job: CopyJob) -> _Flight | None:
        """Enqueue a copy. During the capture of a CUDA graph, enqueues nothing and returns None."""
        pages = sort_out(job, self._num_blocks[job.group], self._num_slots)
        if pages.failed:
            logger.error(
                "%s: %d pages are not copied, because their block or slot does not exist",
                job.direction.value,
                len(pages.failed),
            )
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                logger.error(
                    "%s refused, because a CUDA graph is being captured", job.direction.value
                )
                return None
            began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flight = _Flight(job, pages.failed, began, done)
            stream = self._streams[job.direction]
            stream.wait_stream(torch.cuda.current_stream(self._device))
            began.record(stream)
            try:
                if len(pages):
                    self._copy(job, pages, flight.held)
            except Exception:  # some copies may still be in progress, so the event is recorded
                logger.exception("%s of %d pages failed", job.direction.value, len(pages))
                flight.failed = frozenset(range(len(job.blocks)))
            done.record(stream)
        return flight

    def _copy(self, job: CopyJob, pages: Pages, held: list[torch.Tensor]) -> None:
        if job.group in self._staged:
            self._staged[job.group].enqueue(job.direction, pages, held)
        else:
            stream = self._streams[job.direction].cuda_stream
            copies = plan_copies(self._runs[job.group], pages)
            self._engines.enqueue(job.direction, copies, stream)

    def _result(self, flight: _Flight, seconds: float) -> CopyResult:
        page_bytes = self._runs[flight.job.group].page_bytes
        nbytes = (len(flight.job.blocks) - len(flight.failed)) * page_bytes
        return CopyResult(flight.job.job_id, flight.failed, nbytes, seconds)
