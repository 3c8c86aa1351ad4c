"""VRAM and pinned memory for tests, and the available copy methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tiered_kv.page_group import PageLayout
from tiered_kv.testing.conformance.transfer import Bytes
from tiered_kv.transfer.base import TransferBackend
from tiered_kv.transfer.cuda.pinned_memory import pinned
from tiered_kv.transfer.host_memory import AnonymousMemory, CpuPool

WAYS = ["staged", "runs", "faster"]
BUFFER_BYTES = 384 << 10
"""Size of a staging buffer: three pages of the race tests, so that jobs use both buffers many
times."""
NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_backend(
    way: str, layouts: Sequence[PageLayout], storage: torch.Tensor, pool: CpuPool
) -> TransferBackend:
    from tiered_kv.transfer.cuda.backend import CopyBy, CudaTransfer

    return CudaTransfer(layouts, storage, pool, CopyBy(way), BUFFER_BYTES)


def pinned_pool(num_slots: int, page_bytes: int) -> CpuPool:
    pool = CpuPool(pinned(AnonymousMemory(num_slots * page_bytes)), page_bytes)
    assert pool.pinned
    return pool


@dataclass
class Vram:
    """A transfer backend with a KV storage in VRAM and a pinned pool, both filled with random
    bytes."""

    layout: PageLayout
    storage: Any
    pool: CpuPool
    backend: Any
    rng: np.random.Generator

    def read(self) -> Bytes:
        """Wait for all work enqueued so far, and return a copy of the storage."""
        torch.cuda.synchronize()
        copied: Bytes = self.storage.cpu().numpy()
        return copied

    def writer(self) -> Callable[[int, NDArray[np.int64], Bytes], None]:
        """Return a function that writes pages on the compute stream without blocking the CPU. It
        uploads each page and its indices only once."""
        indices: dict[int, Any] = {}
        pages: dict[int, Any] = {}

        def write(block: int, where: NDArray[np.int64], page: Bytes) -> None:
            if block not in indices:
                indices[block] = torch.from_numpy(where).cuda()
            name = page.ctypes.data
            if name not in pages:
                pages[name] = torch.from_numpy(page).cuda()
            self.storage[indices[block]] = pages[name]

        return write


def keep_busy(cycles: int) -> None:
    """Make the compute stream sleep for this number of GPU cycles, so that the GPU falls behind the
    CPU."""
    torch.cuda._sleep(cycles)  # noqa: SLF001 - torch has no other


@contextmanager
def vram(way: str, layout: PageLayout, num_slots: int) -> Iterator[Vram]:
    rng = np.random.default_rng(0)
    content = rng.integers(0, 256, layout.storage_bytes, dtype=np.uint8)
    storage = torch.from_numpy(content).cuda()
    pool = pinned_pool(num_slots, layout.page_bytes)
    try:
        pool.slots[:] = rng.integers(0, 256, pool.slots.shape, dtype=np.uint8)
        backend = make_backend(way, [layout], storage, pool)
        try:
            yield Vram(layout, storage, pool, backend, rng)
        finally:
            backend.close()
    finally:
        pool.close()
