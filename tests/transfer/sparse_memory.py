"""Sparse memory that may be larger than the machine's RAM."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

GIB = 1 << 30
NO_RESERVE = 0x4000
"""MAP_NORESERVE, which Python's mmap does not name before 3.13."""


class SparseMemory:
    """CPU pool memory that occupies RAM only where a test writes."""

    pinned = False

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        self._map = mmap.mmap(-1, nbytes, flags=flags)
        self.view: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        self.view = np.empty(0, np.uint8)
