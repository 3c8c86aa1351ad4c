"""Pinned host memory, which devices access directly."""

from __future__ import annotations

import logging
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from tiered_kv.transfer.host_memory import HostMemory

from .runtime import CudaError, CudaRuntime, cuda_major

logger = logging.getLogger(__name__)


class PinnedMemory:
    """Memory registered with the CUDA driver.

    It is registered in place, because allocators of pinned memory would round 100 GiB up to 128.

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
        self._address = memory.view.ctypes.data
        self._runtime.register(self._address, memory.view.nbytes)
        self.pinned = True

    @property
    def view(self) -> NDArray[np.uint8]:
        return self._memory.view

    def close(self) -> None:
        if self.pinned:
            self.pinned = False
            with suppress(CudaError):  # the context may have failed; the memory is freed anyway
                self._runtime.unregister(self._address)
        self._memory.close()


def pinned(memory: HostMemory) -> HostMemory:
    """Pin the memory if possible. Otherwise log a warning, and return it unpinned."""
    if memory.view.nbytes == 0:
        return memory
    try:
        return PinnedMemory(memory)
    except (CudaError, OSError) as error:
        logger.warning(
            "the CPU tier could not be pinned (%s): copies will be slower; "
            "raise the memlock limit or lower TIERED_KV_CPU_GIB",
            error,
        )
        return memory
