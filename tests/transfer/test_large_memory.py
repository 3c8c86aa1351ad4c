"""CPU memory of 600 GiB, whose byte offsets need more than 39 bits."""

from __future__ import annotations

import mmap
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.transfer.memory_file.made_memory import GEOMETRY, key_of
from tests.transfer.sparse_memory import GIB, NO_RESERVE, SparseMemory
from tiered_kv.page_group import Placement, page_layout
from tiered_kv.storage.disk.files import BLOCK
from tiered_kv.transfer.base import CopyJob, Direction
from tiered_kv.transfer.cpu import CpuTransfer
from tiered_kv.transfer.host_memory import CpuPool
from tiered_kv.transfer.memory_file.lasting_memory import LastingMemory
from tiered_kv.transfer.memory_file.memory_format import (
    FileHeader,
    SlotHeader,
    pack_file_header,
    parse_file_header,
)

LARGE = 600 * GIB
LAYERS, BLOCKS, RUN = 3, 6, (1 << 20) + 64
PAGE = LAYERS * RUN


def test_a_context_in_the_last_slots_is_saved_and_restored() -> None:
    layout = page_layout([Placement(LAYERS, BLOCKS * RUN, RUN, 0)], BLOCKS)
    vram = np.random.default_rng(0).integers(0, 256, layout.storage_bytes, dtype=np.uint8)
    saved = vram.copy()
    pool = CpuPool(SparseMemory(LARGE), PAGE)
    above_4_gib, above_512_gib = ((1 << bits) // PAGE + 1 for bits in (32, 39))
    slots = (above_4_gib, above_512_gib, len(pool.slots) - 1, 0, above_512_gib + 1)
    assert above_512_gib < len(pool.slots)
    with closing(CpuTransfer([layout], vram, pool)) as backend:
        assert not backend.run(CopyJob(1, Direction.SAVE, range(5), slots)).failed
        for block, slot in enumerate(slots):
            page = saved.reshape(LAYERS, BLOCKS, RUN)[:, block].reshape(-1)
            assert np.array_equal(pool.slots[slot], page), f"slot {slot}"
        vram[:] = 0
        assert not backend.run(CopyJob(2, Direction.LOAD, range(5), slots)).failed
    kept = saved.reshape(LAYERS, BLOCKS, RUN)
    kept[:, 5] = 0  # block 5 was not saved
    assert np.array_equal(vram, kept.reshape(-1))
    pool.close()


def test_the_next_engine_finds_the_page_in_the_last_slot_of_a_large_file(tmp_path: Path) -> None:
    geometry = replace(GEOMETRY, slot_bytes=16 << 20, slots=LARGE // (16 << 20))
    path, key = tmp_path / "0-0.slots", key_of(7)
    header = FileHeader(geometry, nonce=5, created=1, size=geometry.nbytes)
    path.write_bytes(pack_file_header(header))
    last, page = geometry.slots - 1, np.random.default_rng(0).integers(0, 256, PAGE, np.uint8)

    def opened() -> LastingMemory:
        fd = os.open(path, os.O_RDWR)
        os.truncate(fd, header.size)
        mapped = mmap.mmap(fd, header.size, flags=mmap.MAP_SHARED | NO_RESERVE)
        there = parse_file_header(mapped[:BLOCK])
        return LastingMemory(path, fd, mapped, there, keep=True, clock=float)

    memory = opened()
    memory.invalidate([last])
    start = last * geometry.slot_bytes
    assert start > 1 << 39
    memory.view[start : start + PAGE] = page
    digest = memory.digest(last, PAGE)
    assert memory.validate(last, memory.ticket(last), SlotHeader(key, PAGE, 1, digest))
    memory.close()

    memory = opened()
    memory.check_adopted(threads=1)
    assert {slot: one.key for slot, one in memory.adopted.items()} == {last: key}
    memory.close()
