"""Copies by the GPU's copy engines: they use no multiprocessor, but a descriptor per run."""

from __future__ import annotations

from tiered_kv.transfer.base import Direction
from tiered_kv.transfer.copy_plan import Copies

from .runtime import CudaRuntime


class CopyEngines:
    """Enqueues copies between two memories on a stream.

    Args:
        runtime: the CUDA runtime.
        storage: address in VRAM from which ``Copies.storage`` counts.
        slab: address of the CPU pool.
        pinned: True if the pool is pinned. Copies of other memory are not batched: the driver
            stages them in its own buffers, one by one.
    """

    def __init__(self, runtime: CudaRuntime, storage: int, slab: int, *, pinned: bool) -> None:
        self._runtime = runtime
        self._storage = storage
        self._batches = pinned and runtime.has_batches
        # Where registered memory has another address for the GPU, as under WSL2, batches need it;
        # elsewhere both are the same.
        self._slab = runtime.device_pointer(slab) if self._batches else slab

    def enqueue(self, direction: Direction, copies: Copies, stream: int) -> None:
        """Begin to make at least one copy. Addresses are read before this returns.

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
