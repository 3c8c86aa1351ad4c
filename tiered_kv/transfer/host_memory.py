"""Host memory for the CPU pool's slots, and the CPU pool: memory divided into page slots.

The code that creates a pool provides the pool's memory.
"""

from __future__ import annotations

import logging
import mmap
from contextlib import suppress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)


class HostMemory(Protocol):
    """One contiguous piece of memory. All users of the object see the same bytes."""

    @property
    def view(self) -> NDArray[np.uint8]:
        """The whole memory, one-dimensional, contiguous and writable; empty once the memory is
        closed."""

    @property
    def pinned(self) -> bool:
        """True if the memory is registered with the CUDA driver, so that devices access it
        directly."""

    def close(self) -> None:
        """Release the memory. Idempotent.

        No device copy may be in progress. Existing views stay readable and writable: the memory is
        unmapped when the last view is deleted.
        """


class AnonymousMemory:
    """Private memory of this process, initially zeros.

    The memory is one anonymous mapping, in huge pages where the kernel provides them. It is touched
    in advance, so that no save incurs page faults.

    Raises:
        MemoryError, OSError: the memory cannot be allocated.
    """

    pinned = False

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE)
        with suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8, count=nbytes)
        self.view[:: mmap.PAGESIZE] = 0  # touch every page once

    def close(self) -> None:
        self.view = np.empty(0, dtype=np.uint8)
        try:
            self._map.close()
        except BufferError:  # views still exist; unmapped with the last view
            logger.debug("memory was closed although a view of it still exists")


class CpuPool:
    """Slots of ``page_bytes`` bytes, as many as fit into the memory.

    Args:
        memory: memory of the slots; closed with the pool.
        page_bytes: size of a page, bytes.

    Attributes:
        slots: the memory as uint8 ``[slots, page_bytes]``; empty once the pool is closed.
    """

    def __init__(self, memory: HostMemory, page_bytes: int) -> None:
        self._memory = memory
        count = memory.view.nbytes // page_bytes
        self.slots: NDArray[np.uint8] = memory.view[: count * page_bytes].reshape(count, page_bytes)

    @property
    def pinned(self) -> bool:
        """True if devices access the slots directly."""
        return self._memory.pinned

    def close(self) -> None:
        """Release the memory. Idempotent; no copy may be in progress."""
        self.slots = np.empty((0, 0), dtype=np.uint8)
        self._memory.close()
