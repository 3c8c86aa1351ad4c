"""The CPU pool: one slab of memory cut into page slots.

One anonymous mapping, in huge pages where the kernel gives them, touched before use so
that no save pays for page faults. Where CUDA is present the slab is registered with the
driver (pinned) as it is: allocators of pinned memory would round a 100 GiB slab up to 128.
"""

from __future__ import annotations

import logging
import mmap
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)


def memory() -> tuple[int, int]:
    """Bytes in all, and those that this process may still take: the machine's, or its cgroup's
    if that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return total, available
    if limit == "max":
        return total, available
    return min(total, int(limit)), min(available, int(limit) - used)


class CpuPool:
    """``num_slots`` slots of ``page_bytes`` bytes.

    Attributes:
        slots: the slab as uint8 ``[num_slots, page_bytes]``.
        pinned: whether the driver has registered it for DMA.

    Raises:
        MemoryError, OSError: the memory cannot be had.
    """

    def __init__(self, num_slots: int, page_bytes: int, *, pin: bool = False) -> None:
        nbytes = num_slots * page_bytes
        self._map = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE)
        with suppress(OSError):  # of a kernel that has none
            self._map.madvise(mmap.MADV_HUGEPAGE)
        slab = np.frombuffer(self._map, dtype=np.uint8, count=nbytes)
        slab[:: mmap.PAGESIZE] = 0  # touch every page once
        self.slots: NDArray[np.uint8] = slab.reshape(num_slots, page_bytes)
        self.pinned = False
        if pin and nbytes:
            self._register()

    def _register(self) -> None:
        from tiered_kv.transfer.cuda.runtime import CudaError, CudaRuntime, cuda_major

        try:
            CudaRuntime(cuda_major()).register(self.slots.ctypes.data, self.slots.nbytes)
        except (CudaError, OSError) as error:
            logger.warning(
                "the CPU tier could not be pinned (%s): copies will be slower; "
                "raise the memlock limit or lower TIERED_KV_CPU_GIB",
                error,
            )
            return
        self.pinned = True

    def close(self) -> None:
        """Unregister and unmap. Idempotent; no copy may be under way."""
        if self.pinned:
            from tiered_kv.transfer.cuda.runtime import CudaError, CudaRuntime, cuda_major

            with suppress(CudaError):  # of a context that failed; the mapping goes all the same
                CudaRuntime(cuda_major()).unregister(self.slots.ctypes.data)
            self.pinned = False
        self.slots = np.empty((0, 0), dtype=np.uint8)
        try:
            self._map.close()
        except BufferError:  # somebody still holds a view: unmapped with the last of them
            logger.debug("the CPU pool is closed while a view of it is alive")
