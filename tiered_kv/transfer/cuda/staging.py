"""Copies through a buffer in VRAM: whole pages cross the bus, and short runs stay within VRAM.

A copy engine needs a descriptor for every run, and the driver puts the bytes of loads of less than
48 KiB into its own commands, on the engine's thread. On an H100, runs of 16 KiB reached 6 GB/s, and
whole pages 54 GB/s (docs/gpu.md). A slot of the CPU pool is one run, so only VRAM has short runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tiered_kv.page_group import PageLayout
from tiered_kv.transfer.base import Direction
from tiered_kv.transfer.copy_plan import Copies, Numbers, Pages
from tiered_kv.transfer.host_memory import CpuPool

from .copy_engines import CopyEngines
from .page_views import PageViews
from .runtime import CudaRuntime

BUFFER_BYTES = 32 << 20
"""Size of a lane's buffer in VRAM, bytes. A copy of this size takes 0.6 ms on a PCIe 5.0 bus. That
is longer than most kernels of a model, for which the gather of the next part may have to wait, and
several times as long as the engine's thread needs to start the copy (docs/gpu.md)."""


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """A stream and its buffer, uint8 ``[bytes]``. Copies of one lane overlap with the gather or
    scatter of another lane."""

    stream: torch.cuda.Stream
    buffer: torch.Tensor


Lanes = Mapping[Direction, Sequence[Lane]]


class StagedCopies:
    """Enqueues copies of the pages of one group.

    Args:
        runtime: the CUDA runtime.
        layout: locations of a block's bytes.
        storage: the engine's allocation, uint8 ``[bytes]`` on the GPU.
        pool: the pinned CPU pool.
        lanes: streams and buffers of each direction, shared by all groups. A job starts and ends on
            the first lane's stream.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        layout: PageLayout,
        storage: torch.Tensor,
        pool: CpuPool,
        lanes: Lanes,
    ) -> None:
        self._views = PageViews(layout, storage)
        self._device = storage.device
        self._lanes = lanes
        self._slot_bytes = pool.slots.shape[1]
        buffers = [lane.buffer.nbytes for each in lanes.values() for lane in each]
        self._at_once = min(buffers) // layout.page_bytes
        self._engines = CopyEngines(runtime, 0, pool)

    def enqueue(self, direction: Direction, pages: Pages, held: list[torch.Tensor]) -> None:
        """Start the copy of one or more pages.

        Args:
            held: receives memory that the copy reads, which must be kept until the copy is done.

        Raises:
            CudaError, torch.OutOfMemoryError: some pages were not copied; others may be.
        """
        lanes = self._lanes[direction]
        first = lanes[0].stream
        with torch.cuda.stream(first):
            # Pinned, because a copy of unpinned memory would wait for the stream.
            numbers = torch.from_numpy(pages.blocks).pin_memory()
            blocks = numbers.to(self._device, non_blocking=True)
        held += [numbers, blocks]
        others = lanes[1:] if len(pages) > self._at_once else ()
        for lane in others:
            lane.stream.wait_stream(first)
        try:
            for number, copies in enumerate(self._parts(lanes, pages.slots)):
                part = blocks[number * self._at_once : (number + 1) * self._at_once]
                self._copy(lanes[number % len(lanes)], direction, part, copies)
        finally:
            for lane in others:
                first.wait_stream(lane.stream)

    def _copy(self, lane: Lane, direction: Direction, blocks: torch.Tensor, copies: Copies) -> None:
        """Copy pages that fit into the lane's buffer."""
        whole = lane.buffer[: len(blocks) * self._views.page_bytes]
        with torch.cuda.stream(lane.stream):
            if direction is Direction.SAVE:
                self._views.gather(blocks, whole)
            self._engines.enqueue(direction, copies, lane.stream.cuda_stream)
            if direction is Direction.LOAD:
                self._views.scatter(whole, blocks)

    def _parts(self, lanes: Sequence[Lane], slots: Numbers) -> list[Copies]:
        """Plan the copies between slots and buffers, in parts that each fill a buffer.

        ``Copies.storage`` contains addresses. Consecutive slots become one copy. All parts are
        planned together, because numpy calls for each part would take more time than the CUDA
        calls.
        """
        page = self._views.page_bytes
        part, place = np.divmod(np.arange(len(slots)), self._at_once)
        begins = place == 0
        begins[1:] |= (np.diff(slots) != 1) | (page < self._slot_bytes)
        first = np.flatnonzero(begins)
        buffers = np.array([lane.buffer.data_ptr() for lane in lanes])
        buffer = buffers[part[first] % len(lanes)] + place[first] * page
        slot = slots[first] * self._slot_bytes
        nbytes = np.diff(first, append=len(slots)) * page
        bounds = [*np.flatnonzero(place[first] == 0).tolist(), len(first)]
        return [
            Copies(buffer[begin:end], slot[begin:end], nbytes[begin:end])
            for begin, end in itertools.pairwise(bounds)
        ]
