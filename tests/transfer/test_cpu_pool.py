"""The slab of the CPU tier."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.transfer.cpu_pool import CpuPool, memory


@pytest.mark.parametrize(("slots", "page"), [(1, 1), (3, 4096), (7, 12345), (1000, 24)])
def test_slots_are_pages_of_one_slab(slots: int, page: int) -> None:
    pool = CpuPool(slots, page)
    assert pool.slots.shape == (slots, page)
    assert pool.slots.dtype == np.uint8
    assert pool.slots.flags.c_contiguous
    assert not pool.slots.any()

    for slot in range(slots):
        pool.slots[slot] = slot % 251
    assert all((pool.slots[slot] == slot % 251).all() for slot in range(slots))
    pool.close()


def test_a_tier_that_is_switched_off_has_no_slots() -> None:
    pool = CpuPool(0, 4096)
    assert pool.slots.shape == (0, 4096)
    pool.close()


def test_close_may_be_called_twice() -> None:
    pool = CpuPool(2, 4096)
    pool.close()
    pool.close()
    assert pool.slots.size == 0
    assert not pool.pinned


def test_a_view_outlives_the_pool() -> None:
    """A copy that is still running must not read unmapped memory."""
    pool = CpuPool(2, 4096)
    view = pool.slots[1]
    view[:] = 9
    pool.close()
    assert (view == 9).all()


def test_memory_that_cannot_be_had_is_an_error_and_not_a_crash() -> None:
    with pytest.raises((MemoryError, OSError)):
        CpuPool(1 << 22, 1 << 40)


def test_the_memory_left_is_some_of_the_machines() -> None:
    total, available = memory()
    assert 0 < available <= total < 1 << 50


def test_the_slab_is_in_memory_before_anybody_saves_to_it() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    pool = CpuPool(64, 1 << 20)
    assert resident() - before > 56 << 20
    pool.close()
