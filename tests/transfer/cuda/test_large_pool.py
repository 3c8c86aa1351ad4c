"""CPU memory that is too large for one registration, on a fake driver with CUDA's limits."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest

from tests.transfer.sparse_memory import GIB, SparseMemory
from tiered_kv.transfer.base import Direction
from tiered_kv.transfer.copy_plan import Copies, Numbers
from tiered_kv.transfer.cuda import pinned_memory
from tiered_kv.transfer.cuda.copy_engines import CopyEngines
from tiered_kv.transfer.cuda.pinned_memory import pinned
from tiered_kv.transfer.cuda.runtime import CudaError
from tiered_kv.transfer.host_memory import CpuPool

PER_CALL = 512 * GIB
"""Number of bytes that a driver refuses to register in one call (vllm-project/vllm#51080)."""
SLOT = 3 << 20
"""Bytes of a slot. 64 GiB is not a multiple of it."""


class Driver:
    """A fake CUDA runtime whose copies are memmoves. It registers less than 512 GiB in a call,
    rejects copies that cross two registrations, and gives each registration another address on the
    device.

    Args:
        limit: total bytes that it registers.
        has_batches: copies are enqueued in batches, by device addresses.
    """

    def __init__(self, limit: int, *, has_batches: bool = True) -> None:
        self.has_batches = has_batches
        self.registered = dict[int, int]()
        self._limit = limit

    def register(self, host: int, nbytes: int) -> None:
        if nbytes >= PER_CALL or sum(self.registered.values()) + nbytes > self._limit:
            raise CudaError("CUDA error 2: out of memory")
        assert host % mmap.PAGESIZE == 0
        self.registered[host] = nbytes

    def unregister(self, host: int) -> None:
        del self.registered[host]

    def _shift(self, at: int) -> int:
        """Return the distance from a registration's host address to its device address."""
        return (1 + sorted(self.registered).index(at)) << 50

    def device_pointer(self, host: int) -> int:
        return host + self._shift(host)

    def _host(self, address: int, nbytes: int) -> int:
        """Return the host address of a run, which must not cross the end of a registration. An
        address outside all registrations is in the test's VRAM."""
        for at, size in self.registered.items():
            start = address - self._shift(at) if self.has_batches else address
            if at <= start < at + size:
                assert start + nbytes <= at + size, "a copy across two registrations"
                return start
        return address

    def copy(self, direction: Direction, to: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(self._host(to, nbytes), self._host(source, nbytes), nbytes)

    def copy_batch(self, to: Numbers, source: Numbers, nbytes: Numbers, stream: int) -> None:
        for one in zip(to.tolist(), source.tolist(), nbytes.tolist(), strict=True):
            self.copy(Direction.SAVE, *one, stream)


@contextmanager
def large_pool(driver: Driver, nbytes: int) -> Iterator[CpuPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned_memory, "CudaRuntime", lambda major: driver)
        patch.setattr(pinned_memory, "cuda_major", lambda: 13)
        memory = pinned(SparseMemory(nbytes))
        with closing(CpuPool(memory, SLOT)) as pool:
            yield pool


@pytest.mark.parametrize("has_batches", [True, False])
def test_pages_reach_every_slot_of_600_gib(has_batches: bool) -> None:
    """Pages are saved to the four slots around the end of each registration, and to the last slots
    of the pool. They are loaded unchanged from there."""
    driver = Driver(700 * GIB, has_batches=has_batches)
    rng = np.random.default_rng(0)
    vram = rng.integers(0, 256, (4, SLOT), dtype=np.uint8)
    back = np.empty_like(vram)
    with large_pool(driver, 600 * GIB) as pool:
        assert pool.pinned
        assert sum(driver.registered.values()) == 600 * GIB
        assert max(driver.registered.values()) <= 64 * GIB
        ends = [at * 64 * GIB // SLOT for at in range(1, 10)]
        for first in [end - 1 for end in ends] + [len(pool.slots) - 4]:
            whole = (first * SLOT, vram.nbytes)
            save, load = (
                Copies(*(np.array([one], np.int64) for one in (0, *whole))) for _ in range(2)
            )
            to_slots = CopyEngines(driver, vram.ctypes.data, pool)  # type: ignore[arg-type]
            to_slots.enqueue(Direction.SAVE, save, stream=1)
            assert np.array_equal(pool.slots[first : first + 4], vram)
            from_slots = CopyEngines(driver, back.ctypes.data, pool)  # type: ignore[arg-type]
            from_slots.enqueue(Direction.LOAD, load, stream=1)
            assert np.array_equal(back, vram)
            back[:] = 0
    assert not driver.registered, "each piece is unregistered"


def test_memory_that_cannot_be_pinned_completely_is_not_pinned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A driver can pin 200 of 600 GiB. No memory stays pinned, and pages are still copied. Copies
    of partly pinned memory would have two speeds, and batches would fail."""
    driver = Driver(200 * GIB)
    with large_pool(driver, 600 * GIB) as pool:
        assert not pool.pinned
        assert not driver.registered, "and what it did pin is the system's again"
        assert "could not be pinned" in caplog.text
        vram = np.full((1, SLOT), 7, np.uint8)
        last = len(pool.slots) - 1
        copy = Copies(*(np.array([one], np.int64) for one in (0, last * SLOT, SLOT)))
        CopyEngines(driver, vram.ctypes.data, pool).enqueue(  # type: ignore[arg-type]
            Direction.SAVE, copy, stream=1
        )
        assert (pool.slots[last] == 7).all()
