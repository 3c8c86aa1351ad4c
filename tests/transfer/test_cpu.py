"""The CPU transfer backend obeys the transfer contract for every KV dtype."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.random_transfers import RandomTransfers
from tiered_kv.page_group import PageLayout, Placement, page_layout
from tiered_kv.testing.conformance.transfer import Bytes, TransferConformance
from tiered_kv.transfer.base import CopyJob, Direction, TransferBackend
from tiered_kv.transfer.cpu import CpuTransfer
from tiered_kv.transfer.host_memory import AnonymousMemory, CpuPool

LAYERS, BLOCKS, HEADS, TOKENS, HEAD_SIZE = 3, 5, 2, 16, 8
DTYPES = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


class TestCpuTransfer(TransferConformance):
    def make_backend(
        self, layouts: Sequence[PageLayout], storage: Any, pool: CpuPool
    ) -> TransferBackend:
        return CpuTransfer(layouts, storage, pool)


class Engine:
    """KV tensors in the layout of vLLM's CPU attention, with one allocation for all layers."""

    def __init__(self, dtype: str) -> None:
        self.dtype = getattr(torch, dtype)
        shape = (LAYERS, BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE)
        self.kv = torch.zeros(shape, dtype=self.dtype)
        page = HEADS * TOKENS * 2 * HEAD_SIZE * self.dtype.itemsize
        self.layout = page_layout([Placement(LAYERS, BLOCKS * page, page, 0)], BLOCKS)
        self.bits = self.kv.view(torch.uint8).flatten().numpy()  # a view of the same memory

    def block_bits(self, block: int) -> bytes:
        bits: bytes = self.kv[:, block].contiguous().view(torch.uint8).numpy().tobytes()
        return bits


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_of_every_dtype_are_restored_bit_for_bit(dtype: str) -> None:
    engine = Engine(dtype)
    values = torch.randn(engine.kv.shape, generator=torch.Generator().manual_seed(0))
    engine.kv.copy_(values.to(engine.dtype))
    pool = CpuPool(AnonymousMemory(4 * engine.layout.page_bytes), engine.layout.page_bytes)
    backend = CpuTransfer([engine.layout], engine.bits, pool)
    saved = [engine.block_bits(block) for block in range(BLOCKS)]

    backend.run(CopyJob(1, Direction.SAVE, (0, 1, 2), (3, 0, 2)))
    engine.kv.zero_()
    backend.run(CopyJob(2, Direction.LOAD, (4, 3, 1), (3, 0, 2)))

    assert [engine.block_bits(block) for block in (4, 3, 1)] == saved[:3]
    restored = engine.kv[:, 4].float()
    assert torch.equal(restored, values[:, 0].to(engine.dtype).float())
    backend.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_keep_their_payload_and_their_sign(dtype: str) -> None:
    """Every bit pattern of the dtype is saved and loaded unchanged: NaNs of all payloads, both
    zeros, subnormal numbers and infinities."""
    engine = Engine(dtype)
    width = np.uint8 if engine.dtype.itemsize == 1 else np.uint16
    patterns = np.arange(np.iinfo(width).max + 1, dtype=width)
    per_block = engine.layout.page_bytes // engine.dtype.itemsize
    pool = CpuPool(AnonymousMemory(engine.layout.page_bytes), engine.layout.page_bytes)
    backend = CpuTransfer([engine.layout], engine.bits, pool)
    special = 0
    for start in range(0, len(patterns), per_block):
        chunk = np.resize(patterns[start : start + per_block], per_block)
        block = torch.from_numpy(chunk.view(np.uint8).copy()).view(engine.dtype)
        engine.kv[:, 0] = block.reshape(engine.kv[:, 0].shape)
        special += int((~torch.isfinite(engine.kv[:, 0].float())).sum())
        saved = engine.block_bits(0)
        assert saved == chunk.tobytes()

        backend.run(CopyJob(1, Direction.SAVE, (0,), (0,)))
        backend.run(CopyJob(2, Direction.LOAD, (2,), (0,)))

        assert engine.block_bits(2) == saved
    assert special > 0, "no NaN was among them"
    backend.close()


def test_storage_that_is_smaller_than_its_layout_is_refused() -> None:
    layout = page_layout([Placement(2, 5 * 64, 64, 0)], 5)
    with pytest.raises(ValueError, match="has 639 bytes, but its layout spans 640"):
        CpuTransfer([layout], np.zeros(639, dtype=np.uint8), CpuPool(AnonymousMemory(128), 128))


def test_slots_of_another_size_are_refused() -> None:
    layout = page_layout([Placement(2, 5 * 64, 64, 0)], 5)
    with pytest.raises(ValueError, match="slots have 127 bytes, but the largest page has 128"):
        CpuTransfer([layout], np.zeros(640, dtype=np.uint8), CpuPool(AnonymousMemory(127), 127))
    assert "tiered-kv-copy" not in {thread.name for thread in threading.enumerate()}


def test_a_pool_without_slots_fails_every_page_and_continues() -> None:
    layout = page_layout([Placement(1, 5 * 64, 64, 0)], 5)
    backend = CpuTransfer([layout], np.zeros(320, dtype=np.uint8), CpuPool(AnonymousMemory(0), 64))
    assert backend.run(CopyJob(1, Direction.SAVE, (0,), (0,))).failed == {0}
    backend.close()


@pytest.mark.parametrize(
    "place", [Placement(3, 12 * 700, 700, 0), Placement(3, 700, 2100, 0)], ids=["layers", "blocks"]
)
def test_random_operations_leave_every_page_correct(place: Placement) -> None:
    layout = page_layout([place], 12)
    storage = np.zeros(layout.storage_bytes, dtype=np.uint8)
    pool = CpuPool(AnonymousMemory(16 * layout.page_bytes), layout.page_bytes)
    backend = CpuTransfer([layout], storage, pool)

    def write(block: int, where: NDArray[np.int64], page: Bytes) -> None:
        storage[where] = page

    RandomTransfers(layout, pool, backend, write, storage.copy).go(4000)

    backend.close()
