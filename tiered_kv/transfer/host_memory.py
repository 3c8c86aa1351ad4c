"""Memory of the host for the CPU pool's slots. Whoever makes the pool gives it some.

The CPU pool: memory cut into page slots.
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
    """One piece of memory, the same bytes for whoever else has it."""

    @property
    def view(self) -> NDArray[np.uint8]:
        """All of it, one-dimensional, contiguous and writable; empty once it is closed."""

    @property
    def pinned(self) -> bool:
        """True if it is registered with the CUDA driver, so that devices reach it themselves."""

    def close(self) -> None:
        """Give it back. Idempotent.

        No copy by a device may be under way. Views that others still hold stay readable and
        writable: the memory goes with the last of them.
        """


class AnonymousMemory:
    """Memory of this process alone, zeros at first.

    One anonymous mapping, in huge pages where the kernel gives them, touched before use so
    that no save pays for page faults.

    Raises:
        MemoryError, OSError: the memory cannot be had.
    """

    pinned = False

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE)
        with suppress(OSError):  # of a kernel that has none
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8, count=nbytes)
        self.view[:: mmap.PAGESIZE] = 0  # touch every page once

    def close(self) -> None:
        self.view = np.empty(0, dtype=np.uint8)
        try:
            self._map.close()
        except BufferError:  # somebody still holds a view: unmapped with the last of them
            logger.debug("memory is closed while a view of it is alive")


class CpuPool:
    """Slots of ``page_bytes`` bytes, as many as the memory has room for.

    Args:
        memory: closed with the pool.
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
        """True if devices reach the slots themselves."""
        return self._memory.pinned

    def close(self) -> None:
        """Give the memory back. Idempotent; no copy may be under way."""
        self.slots = np.empty((0, 0), dtype=np.uint8)
        self._memory.close()
