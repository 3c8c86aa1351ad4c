"""The two sides of ``bench.transfer``: a backend, and one large copy between the same memories.

Two sides of one shape, so that the benchmark need not know which it has: on a GPU, VRAM and
pinned memory; without one, two pieces of CPU memory.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np

from tiered_kv.page_group import PageLayout
from tiered_kv.transfer.base import CopyJob, Direction, TransferBackend
from tiered_kv.transfer.cuda.pinned_memory import pinned
from tiered_kv.transfer.host_memory import AnonymousMemory, CpuPool

MATRIX = 8192
MATMULS = 100


class Way(Enum):
    """Direction of a copy."""

    D2H = "d2h"
    H2D = "h2d"
    BOTH = "both"

    @property
    def directions(self) -> tuple[Direction, ...]:
        return {
            Way.D2H: (Direction.SAVE,),
            Way.H2D: (Direction.LOAD,),
            Way.BOTH: (Direction.SAVE, Direction.LOAD),
        }[self]


class Side(ABC):
    """A storage and a pool of ``nbytes`` each, and a backend between them.

    Call ``use`` before anything else.
    """

    name: str
    backend: TransferBackend | None = None
    pool: CpuPool | None = None

    def use(self, layout: PageLayout, slots: int) -> None:
        """Make the backend for a layout."""
        if self.pool is not None and self.pool.slots.shape == (slots, layout.page_bytes):
            self._close_backend()  # pinning takes seconds: the pool is kept where it fits
        else:
            self.close()
            self.pool = self.make_pool(slots, layout.page_bytes)
            self.pool.slots[:] = 1
        self.backend = self.make_backend(layout, self.pool)

    @abstractmethod
    def make_pool(self, slots: int, page_bytes: int) -> CpuPool: ...

    @abstractmethod
    def make_backend(self, layout: PageLayout, pool: CpuPool) -> TransferBackend: ...

    def seconds(self, jobs: Sequence[CopyJob]) -> float:
        """Time from the first call until the last byte is there.

        Raises:
            RuntimeError: a page was not copied.
        """
        assert self.backend is not None
        began = time.perf_counter()
        for job in jobs:
            self.backend.submit(job)
        self.backend.drain()
        seconds = time.perf_counter() - began
        if any(result.failed for result in self.backend.poll()):
            raise RuntimeError("pages were not copied")
        return seconds

    @abstractmethod
    def one_copy_s(self, way: Way, nbytes: int) -> float:
        """A contiguous copy of ``nbytes``; both ways at once, one of half as much each."""

    @abstractmethod
    def slowdown(self, jobs: Sequence[CopyJob]) -> float | None:
        """Seconds of matrix products beside these copies, over and over, by their seconds
        alone; None where there is no GPU."""

    def _close_backend(self) -> None:
        if self.backend is not None:
            self.backend.close()
            self.backend = None

    def close(self) -> None:
        self._close_backend()
        if self.pool is not None:
            self.pool.close()
            self.pool = None


class CpuSide(Side):
    """The CPU backend beside memcpy."""

    name = "cpu"

    def __init__(self, nbytes: int) -> None:
        self._storage = CpuPool(AnonymousMemory(nbytes), nbytes)
        self._bytes = self._storage.slots[0]

    def make_pool(self, slots: int, page_bytes: int) -> CpuPool:
        return CpuPool(AnonymousMemory(slots * page_bytes), page_bytes)

    def make_backend(self, layout: PageLayout, pool: CpuPool) -> TransferBackend:
        from tiered_kv.transfer.cpu import CpuTransfer

        return CpuTransfer([layout], self._bytes, pool)

    def one_copy_s(self, way: Way, nbytes: int) -> float:
        assert self.pool is not None
        slab = self.pool.slots.reshape(-1)
        began = time.perf_counter()
        for i, direction in enumerate(way.directions):
            half = nbytes // len(way.directions)
            part = slice(i * half, (i + 1) * half)
            if direction is Direction.SAVE:
                np.copyto(slab[part], self._bytes[part])
            else:
                np.copyto(self._bytes[part], slab[part])
        return time.perf_counter() - began

    def slowdown(self, jobs: Sequence[CopyJob]) -> float | None:
        return None


class CudaSide(Side):
    """The CUDA backend beside one pinned copy.

    Args:
        by: a :class:`~tiered_kv.transfer.cuda.backend.CopyBy`'s value.
    """

    def __init__(self, nbytes: int, by: str) -> None:
        import torch

        from tiered_kv.transfer.cuda.backend import CopyBy

        self._torch = torch
        self._by = CopyBy(by)
        self._bytes = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        self._streams = [torch.cuda.Stream() for _ in Direction]
        self._matrices = [
            torch.randn(MATRIX, MATRIX, device="cuda").to(torch.bfloat16) for _ in range(2)
        ]
        self.name = torch.cuda.get_device_name()

    def make_pool(self, slots: int, page_bytes: int) -> CpuPool:
        pool = CpuPool(pinned(AnonymousMemory(slots * page_bytes)), page_bytes)
        if not pool.pinned:
            raise RuntimeError("memory cannot be pinned here: raise the memlock limit")
        return pool

    def make_backend(self, layout: PageLayout, pool: CpuPool) -> TransferBackend:
        from tiered_kv.transfer.cuda.backend import CudaTransfer

        return CudaTransfer([layout], self._bytes, pool, self._by)

    def one_copy_s(self, way: Way, nbytes: int) -> float:
        assert self.pool is not None
        torch = self._torch
        slab = torch.from_numpy(self.pool.slots.reshape(-1))
        torch.cuda.synchronize()
        half = nbytes // len(way.directions)
        began = time.perf_counter()
        for i, direction in enumerate(way.directions):
            vram, host = (memory[i * half : (i + 1) * half] for memory in (self._bytes, slab))
            with torch.cuda.stream(self._streams[i]):
                if direction is Direction.SAVE:
                    host.copy_(vram, non_blocking=True)
                else:
                    vram.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def slowdown(self, jobs: Sequence[CopyJob]) -> float | None:
        """
        Raises:
            RuntimeError: not one copy was made meanwhile.
        """
        alone = self._matmuls_s(lambda: None)
        under_way = finished = 0

        def keep_copying() -> None:
            """As from another request: copies do not wait for these products."""
            nonlocal under_way, finished
            assert self.backend is not None
            done = len(self.backend.poll())
            finished += done
            under_way -= done
            while under_way < 2 * len(jobs):
                with self._torch.cuda.stream(self._streams[0]):
                    for job in jobs:
                        self.backend.submit(job)
                under_way += len(jobs)

        keep_copying()
        beside = self._matmuls_s(keep_copying)
        self.seconds([])
        if not finished:
            raise RuntimeError("the matrix products were over before a single copy was")
        return beside / alone

    def _matmuls_s(self, meanwhile: Callable[[], None]) -> float:
        torch = self._torch
        began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(MATMULS):
            self._matrices[0] @ self._matrices[1]
        done.record()
        while not done.query():
            meanwhile()
        return float(began.elapsed_time(done)) / 1e3
