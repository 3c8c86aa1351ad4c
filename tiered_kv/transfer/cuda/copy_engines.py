"""Copies by the GPU's copy engines, which use no multiprocessor but need a descriptor per run."""

from __future__ import annotations

from tiered_kv.transfer.base import Direction
from tiered_kv.transfer.copy_plan import Copies

from .runtime import CudaRuntime


class CopyEngines:
    """Enqueues copies between VRAM and CPU memory on a stream.

    Args:
        runtime: the CUDA runtime.
        storage: address in VRAM that the offsets ``Copies.storage`` are relative to.
        slab: address of the CPU pool.
        pinned: True if the pool is pinned. Copies of unpinned memory are not batched, because the
            driver stages them in its own buffers, one by one.
    """

    def __init__(self, runtime: CudaRuntime, storage: int, slab: int, *, pinned: bool) -> None:
        self._runtime = runtime
        self._storage = storage
        self._batches = pinned and runtime.has_batches
        # Batches need the GPU's address of registered memory. It differs from the CPU's in some
        # environments, for example under WSL2.
        self._slab = runtime.device_pointer(slab) if self._batches else slab

    def enqueue(self, direction: Direction, copies: Copies, stream: int) -> None:
        """Start one or more copies. Addresses are read before this returns.

        Raises:
            CudaError: some copies were not enqueued; others may have been.
        """
        source, to = copies.storage + self._storage, copies.slab + self._slab
        if direction is Direction.LOAD:
            source, to = to, source
        if self._batches:
            self._runtime.copy_batch(to, source, copies.nbytes, stream)
            return
        for one_to, one_source, nbytes in zip(
            to.tolist(), source.tolist(), copies.nbytes.tolist(), strict=True
        ):
            self._runtime.copy(direction, one_to, one_source, nbytes, stream)
