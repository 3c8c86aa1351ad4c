"""Buffers for direct I/O are aligned, and reused."""

from __future__ import annotations

import contextlib
import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.storage.disk.aligned import HUGE_PAGE, BufferPool, aligned_bytes, is_blocks
from tiered_kv.storage.disk.files import BLOCK


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK, BLOCK + 1, HUGE_PAGE // 2, HUGE_PAGE, 5 << 20])
def test_memory_is_page_aligned_and_large_memory_huge_page_aligned(nbytes: int) -> None:
    memory = aligned_bytes(nbytes)
    assert memory.nbytes >= nbytes
    assert is_blocks(memory)
    if nbytes >= HUGE_PAGE // 2:
        assert memory.ctypes.data % HUGE_PAGE == 0
    memory[:] = 7


def may_be_huge(address: int) -> bool:
    """Return True if the memory at this address is marked for huge pages."""
    asked = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            asked = int(match[1], 16) <= address < int(match[2], 16)
        elif asked and line.startswith("VmFlags:"):
            return " hg" in line
    return False


def test_only_large_memory_requests_huge_pages() -> None:
    control = mmap.mmap(-1, 4 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        control.madvise(mmap.MADV_HUGEPAGE)
    if not may_be_huge(np.frombuffer(control, np.uint8).ctypes.data):
        pytest.skip("a kernel without huge pages")
    for nbytes in (HUGE_PAGE // 2, HUGE_PAGE):
        assert may_be_huge(aligned_bytes(nbytes).ctypes.data)
    assert not may_be_huge(aligned_bytes(HUGE_PAGE // 2 - BLOCK).ctypes.data)


def test_buffers_are_reused_and_a_limited_number_is_kept() -> None:
    pool = BufferPool(BLOCK, keep=2)
    taken = [pool.take(BLOCK) for _ in range(3)]
    places = [buffer.ctypes.data for buffer in taken]
    for buffer in taken:
        pool.give(buffer)
    again = [pool.take(BLOCK).ctypes.data for _ in range(2)]
    assert sorted(again) == sorted(places[:2])


def test_a_buffer_that_is_too_small_is_not_reused() -> None:
    pool = BufferPool(BLOCK, keep=2)
    pool.give(pool.take(BLOCK))
    assert pool.take(3 * BLOCK).nbytes >= 3 * BLOCK
