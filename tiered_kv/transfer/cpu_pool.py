"""The CPU pool: memory cut into page slots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .host_memory import HostMemory


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
