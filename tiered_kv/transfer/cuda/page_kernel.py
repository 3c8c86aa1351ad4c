"""Copies by a kernel that accesses pinned host memory: one launch for a batch of pages.

The grid is small on purpose. A thread block lives on one multiprocessor, so a launch occupies at
most ``BLOCKS`` of them, whichever the GPU picks. Simultaneous saves and loads occupy twice as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiered_kv.transfer.base import Direction
from tiered_kv.transfer.copy_plan import Numbers, PageRuns, Pages, cut

from .runtime import CudaRuntime

SOURCE = Path(__file__).with_suffix(".cu")
BLOCKS = 2
"""Thread blocks per launch. 1,024 threads with 128 bytes in flight each make 256 KiB; PCIe 5.0
x16 needs about 80 KiB."""
THREADS = 1024
PIECE_BYTES = 8192
MAX_PAGES = 4096
"""Pages per launch; larger batches take several."""
STAGED = 8
"""Launches in flight that have pinned memory from the start. Pinning more may delay the engine's
thread."""


@cache
def compiled() -> Any:
    """Compile the kernel by NVRTC at its first launch on a device.

    Raises:
        ImportError: cupy is missing or does not work here.
    """
    import cupy

    return cupy.RawKernel(SOURCE.read_text(), "copy_pages", options=("-std=c++17",))


class _Stream:
    """A torch stream in the form that cupy accepts."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


class PageKernel:
    """Launches the kernel for one layout, storage and pool.

    Args:
        runtime: the CUDA runtime.
        runs: runs of a page.
        storage: the engine's allocation, on the current device.
        slab: address of the pinned CPU pool.
        blocks: thread blocks per launch.

    Raises:
        ImportError: cupy is missing or does not work here.
        CudaError: the pool is not pinned.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        runs: PageRuns,
        storage: torch.Tensor,
        slab: int,
        blocks: int = BLOCKS,
    ) -> None:
        import cupy

        self._kernel = compiled()
        self._wrap = cupy.cuda.Stream.from_external
        self._device = cupy.cuda.Device(storage.device.index)
        self._runtime = runtime
        self._blocks = blocks
        self._storage = np.uint64(storage.data_ptr())
        self._slab = np.uint64(runtime.device_pointer(slab))
        self._slot_bytes = np.int64(runs.slot_bytes)
        pieces = cut(runs, PIECE_BYTES)
        table = np.stack([pieces.offset, pieces.stride, pieces.start, pieces.nbytes], axis=1)
        self._pieces = torch.from_numpy(table).to(storage.device)
        torch.cuda.synchronize(storage.device)  # the table is there, whichever stream asks
        self._staging = [self._new_staging() for _ in range(STAGED)]

    def enqueue(
        self, direction: Direction, pages: Pages, stream: int, held: list[torch.Tensor]
    ) -> None:
        """Begin to copy at least one page.

        Args:
            held: receives the pinned memory that the kernel reads, for ``reuse`` when the copy is
                done, also if this raises.
        """
        with self._device, self._wrap(_Stream(stream)):
            for start in range(0, len(pages), MAX_PAGES):
                part = slice(start, start + MAX_PAGES)
                self._launch(direction, pages.blocks[part], pages.slots[part], held)

    def _launch(
        self, direction: Direction, blocks: Numbers, slots: Numbers, held: list[torch.Tensor]
    ) -> None:
        """Write the page numbers where the kernel reads them: no copy of them is enqueued, and
        none is overwritten before the launch that reads it is done."""
        staging = self._staging.pop() if self._staging else self._new_staging()
        held.append(staging)
        numbers = staging.numpy()
        numbers[0, : len(blocks)] = blocks
        numbers[1, : len(slots)] = slots
        address = self._runtime.device_pointer(staging.data_ptr())
        self._kernel(
            (self._blocks,),
            (THREADS,),
            (
                self._storage,
                self._slab,
                np.uint64(address),
                np.uint64(address + numbers.strides[0]),
                np.int64(len(blocks)),
                np.uint64(self._pieces.data_ptr()),
                np.int64(len(self._pieces)),
                self._slot_bytes,
                np.int32(direction is Direction.SAVE),
            ),
        )

    def _new_staging(self) -> torch.Tensor:
        return torch.empty((2, MAX_PAGES), dtype=torch.int64, pin_memory=True)

    def reuse(self, held: Sequence[torch.Tensor]) -> None:
        """Take back the memory that a finished copy has read."""
        self._staging.extend(held)
