"""The CPU pool and its memory."""

from __future__ import annotations

import resource
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.transfer.host_memory import AnonymousMemory, CpuPool


@pytest.mark.parametrize(("slots", "page"), [(1, 1), (3, 4096), (7, 12345), (1000, 24)])
def test_slots_are_pages_of_one_slab(slots: int, page: int) -> None:
    pool = CpuPool(AnonymousMemory(slots * page), page)
    assert pool.slots.shape == (slots, page)
    assert pool.slots.dtype == np.uint8
    assert pool.slots.flags.c_contiguous
    assert not pool.slots.any()

    for slot in range(slots):
        pool.slots[slot] = slot % 251
    assert all((pool.slots[slot] == slot % 251).all() for slot in range(slots))
    pool.close()


def test_a_tier_that_is_switched_off_has_no_slots() -> None:
    pool = CpuPool(AnonymousMemory(0), 4096)
    assert pool.slots.shape == (0, 4096)
    pool.close()


def test_close_may_be_called_twice() -> None:
    pool = CpuPool(AnonymousMemory(2 * 4096), 4096)
    pool.close()
    pool.close()
    assert pool.slots.size == 0
    assert not pool.pinned


def test_memory_after_the_last_whole_slot_is_unused() -> None:
    memory = AnonymousMemory(3 * 100 + 99)
    pool = CpuPool(memory, 100)
    assert pool.slots.shape == (3, 100)
    pool.close()
    assert memory.view.size == 0


class SharedMemory:
    """Memory that several processes share by name."""

    pinned = False

    def __init__(self, name: str | None, nbytes: int) -> None:
        self._shared = shared_memory.SharedMemory(name, create=name is None, size=nbytes)
        self.name, self._owned = self._shared.name, name is None
        assert self._shared.buf is not None
        self.view = np.frombuffer(self._shared.buf, np.uint8, nbytes)

    def close(self) -> None:
        self.view = np.empty(0, np.uint8)
        self._shared.close()
        if self._owned:
            self._owned = False
            self._shared.unlink()


def test_memory_shared_by_several_processes_can_be_used() -> None:
    """A pool writes to memory that has a name, and the memory is read under that name. After the
    pool is closed, even twice, the name no longer exists."""
    memory = SharedMemory(None, 2 * 4096)
    pool = CpuPool(memory, 4096)
    pool.slots[1] = 7
    other = SharedMemory(memory.name, 2 * 4096)
    assert (other.view[4096:] == 7).all()
    other.close()
    pool.close()
    pool.close()
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(memory.name)


def test_a_view_outlives_the_pool() -> None:
    """A slot's view can be read after the pool is closed, so that a copy that still runs does not
    access unmapped memory."""
    pool = CpuPool(AnonymousMemory(2 * 4096), 4096)
    view = pool.slots[1]
    view[:] = 9
    pool.close()
    assert (view == 9).all()


def test_memory_that_cannot_be_allocated_is_an_error_and_not_a_crash() -> None:
    with pytest.raises((MemoryError, OSError)):
        CpuPool(AnonymousMemory((1 << 22) * (1 << 40)), 1 << 40)


def test_the_slab_is_in_memory_before_the_first_save() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    pool = CpuPool(AnonymousMemory(64 * (1 << 20)), 1 << 20)
    assert resident() - before > 56 << 20
    pool.close()
