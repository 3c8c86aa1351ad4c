"""Memory for direct I/O: it begins where a disk wants it to, and is used again."""

from __future__ import annotations

import pytest

from tiered_kv.storage.aligned import HUGE_PAGE, BufferPool, aligned_bytes, is_blocks
from tiered_kv.storage.files import BLOCK


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK, BLOCK + 1, HUGE_PAGE // 2, HUGE_PAGE, 5 << 20])
def test_memory_begins_at_a_page_and_large_memory_at_a_huge_one(nbytes: int) -> None:
    memory = aligned_bytes(nbytes)
    assert memory.nbytes >= nbytes
    assert is_blocks(memory)
    if nbytes >= HUGE_PAGE // 2:
        assert memory.ctypes.data % HUGE_PAGE == 0
    memory[:] = 7


def test_buffers_are_used_again_and_only_so_many_are_kept() -> None:
    pool = BufferPool(BLOCK, keep=2)
    taken = [pool.take(BLOCK) for _ in range(3)]
    places = [buffer.ctypes.data for buffer in taken]
    for buffer in taken:
        pool.give(buffer)
    again = [pool.take(BLOCK).ctypes.data for _ in range(2)]
    assert sorted(again) == sorted(places[:2])


def test_a_buffer_that_is_too_small_is_not_handed_out() -> None:
    pool = BufferPool(BLOCK, keep=2)
    pool.give(pool.take(BLOCK))
    assert pool.take(3 * BLOCK).nbytes >= 3 * BLOCK
