"""Pinned host memory, which devices access directly."""

from __future__ import annotations

import logging
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from tiered_kv.transfer.host_memory import HostMemory

from .runtime import CudaError, CudaRuntime, cuda_major

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 30
"""Maximum size of the memory that is registered in one call, bytes. Drivers since R580 keep a table
of 16 bytes for each page of 4 KiB, and cannot allocate the table for 512 GiB or more
(vllm-project/vllm#51080). No copy may cross from one piece into the next."""


class PinnedMemory:
    """Memory registered with the CUDA driver, in pieces of ``PIECE_BYTES``.

    The memory is registered in place, because allocators of pinned memory would round 100 GiB up to
    128 GiB.

    Args:
        memory: memory to pin; closed with this object.

    Raises:
        CudaError: the memory cannot be pinned.
        OSError: CUDA is not available.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self.pinned = False
        self._runtime = CudaRuntime(cuda_major())
        self._registered: list[int] = []
        start, nbytes = memory.view.ctypes.data, memory.view.nbytes
        try:
            for at in range(0, nbytes, PIECE_BYTES):
                self._runtime.register(start + at, min(PIECE_BYTES, nbytes - at))
                self._registered.append(start + at)
        except CudaError:
            self._unregister()
            raise
        self.pinned = True

    @property
    def view(self) -> NDArray[np.uint8]:
        return self._memory.view

    def close(self) -> None:
        self.pinned = False
        self._unregister()
        self._memory.close()

    def _unregister(self) -> None:
        while self._registered:
            with suppress(CudaError):  # the context may have failed; the memory is freed anyway
                self._runtime.unregister(self._registered.pop())


def pinned(memory: HostMemory) -> HostMemory:
    """Pin the memory if possible. Otherwise, log a warning and return the memory unpinned."""
    if memory.view.nbytes == 0:
        return memory
    try:
        return PinnedMemory(memory)
    except (CudaError, OSError) as error:
        logger.warning(
            "CPU memory could not be pinned (%s), so copies to the GPU will be slower. Raise "
            "the locked-memory limit (ulimit -l) or lower TIERED_KV_CPU_GIB",
            error,
        )
        return memory
