"""Copies by the GPU's copy engines, which use no multiprocessor but need a descriptor for each
run."""

from __future__ import annotations

import numpy as np

from tiered_kv.transfer.base import Direction
from tiered_kv.transfer.copy_plan import Copies, cut_copies
from tiered_kv.transfer.host_memory import CpuPool

from .pinned_memory import PIECE_BYTES
from .runtime import CudaRuntime


class CopyEngines:
    """Enqueues copies between VRAM and CPU memory on a stream.

    Args:
        runtime: the CUDA runtime.
        storage: address in VRAM to which the offsets ``Copies.storage`` are relative.
        pool: the CPU pool. Copies of unpinned memory are not batched, because the driver stages
            them in its own buffers, one by one.
    """

    def __init__(self, runtime: CudaRuntime, storage: int, pool: CpuPool) -> None:
        self._runtime = runtime
        self._storage = storage
        self._batches = pool.pinned and runtime.has_batches
        at = np.arange(0, pool.slots.nbytes, PIECE_BYTES)
        pieces = at + pool.slots.ctypes.data
        if self._batches:
            # Batches need the GPU's address of registered memory. It differs from the CPU's in some
            # environments, for example under WSL2.
            pieces = np.array([runtime.device_pointer(one) for one in pieces.tolist()])
        self._bases = pieces - at

    def enqueue(self, direction: Direction, copies: Copies, stream: int) -> None:
        """Start one or more copies. Addresses are read before the call returns.

        Raises:
            CudaError: some copies were not enqueued; others may have been.
        """
        copies = cut_copies(copies, PIECE_BYTES)  # a copy across two registrations is refused
        slab = copies.slab + self._bases[copies.slab // PIECE_BYTES]
        source, to = copies.storage + self._storage, slab
        if direction is Direction.LOAD:
            source, to = to, source
        if self._batches:
            self._runtime.copy_batch(to, source, copies.nbytes, stream)
            return
        for one_to, one_source, nbytes in zip(
            to.tolist(), source.tolist(), copies.nbytes.tolist(), strict=True
        ):
            self._runtime.copy(direction, one_to, one_source, nbytes, stream)
