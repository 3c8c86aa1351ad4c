"""The CUDA transfer backend, with the transfer conformance suite. Skipped without CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.memory import BUFFER_BYTES, NEEDS_CUDA, WAYS, make_backend, pinned_pool, vram
from tiered_kv.page_group import PageLayout, Placement, Region, page_layout
from tiered_kv.testing.conformance.transfer import Bytes, TransferConformance, addresses
from tiered_kv.transfer.base import CopyJob, Direction, TransferBackend
from tiered_kv.transfer.cuda.pinned_memory import pinned
from tiered_kv.transfer.cuda.runtime import CudaError, CudaRuntime, cuda_major
from tiered_kv.transfer.host_memory import AnonymousMemory, CpuPool

pytestmark = NEEDS_CUDA

BLOCKS = 24
TOKENS = 16
KV = Placement(6, BLOCKS * 2 * TOKENS * 4 * 128 * 2, 2 * TOKENS * 4 * 128 * 2, 0)
LAYOUTS = {
    "keys and values, 2 bytes": page_layout([KV], BLOCKS),
    "keys and values, 1 byte": page_layout(
        [Placement(6, BLOCKS * TOKENS * 4 * 128 * 2, TOKENS * 4 * 128 * 2, 0)], BLOCKS
    ),
    "head groups": page_layout([Placement(3, 4 * BLOCKS * TOKENS * 256, TOKENS * 256, 0)], BLOCKS),
    "MLA": page_layout([Placement(61, BLOCKS * TOKENS * 1152, TOKENS * 1152, 0)], BLOCKS),
    "MLA, blocks outermost": page_layout(
        [Placement(61, TOKENS * 1152, 61 * TOKENS * 1152, 0)], BLOCKS
    ),
    "odd": PageLayout((Region(5, 3, BLOCKS * 9001 + 7, 9001, 8999),), BLOCKS),
    "four bytes at a time": PageLayout((Region(4, 3, BLOCKS * 1004, 1004, 1004),), BLOCKS),
}


class OnCuda(TransferConformance):
    way: str

    def make_backend(
        self, layouts: Sequence[PageLayout], storage: Any, pool: CpuPool
    ) -> TransferBackend:
        return make_backend(self.way, layouts, storage, pool)

    def make_pool(self, num_slots: int, page_bytes: int) -> CpuPool:
        return pinned_pool(num_slots, page_bytes)

    def make_storage(self, nbytes: int) -> Any:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cuda")

    def read(self, storage: Any) -> Bytes:
        torch.cuda.synchronize()
        copied: Bytes = storage.cpu().numpy()
        return copied

    def write(self, storage: Any, content: Bytes) -> None:
        storage.copy_(torch.from_numpy(content))


class TestStaged(OnCuda):
    way = "staged"


class TestRunByRun(OnCuda):
    way = "runs"


class TestByTheFaster(OnCuda):
    way = "faster"


class TestMemoryThatCouldNotBePinned(OnCuda):
    way = "faster"

    def make_pool(self, num_slots: int, page_bytes: int) -> CpuPool:
        return CpuPool(AnonymousMemory(num_slots * page_bytes), page_bytes)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_pages_of_every_kind_come_back_bit_for_bit(kind: str, way: str) -> None:
    with vram(way, LAYOUTS[kind], BLOCKS) as gpu:
        before = gpu.read()
        blocks, slots = (gpu.rng.permutation(BLOCKS).tolist() for _ in range(2))
        others = gpu.rng.permutation(BLOCKS).tolist()

        assert not gpu.backend.run(CopyJob(1, Direction.SAVE, blocks, slots)).failed
        gpu.storage.zero_()
        assert not gpu.backend.run(CopyJob(2, Direction.LOAD, others, slots)).failed

        after = np.zeros_like(before)
        for block, other in zip(blocks, others, strict=True):
            after[addresses(gpu.layout, other)] = before[addresses(gpu.layout, block)]
        assert np.array_equal(gpu.read(), after), "and nothing beside the pages has changed"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_a_tensor_of_every_dtype_is_restored_exactly(dtype: str, way: str) -> None:
    """A tensor of random bytes, which include NaNs with many payloads, is saved and loaded in
    reverse order. Every byte is restored."""
    kind = getattr(torch, dtype)
    shape = (3, BLOCKS, 2, TOKENS, 2, 64)  # layers, blocks, keys and values, tokens, heads
    page = int(np.prod(shape[2:])) * kind.itemsize
    layout = page_layout([Placement(3, BLOCKS * page, page, 0)], BLOCKS)
    with vram(way, layout, BLOCKS) as gpu:
        kv = gpu.storage.view(kind).reshape(shape)
        before = kv.view(torch.uint8).clone()
        gpu.backend.run(CopyJob(1, Direction.SAVE, range(BLOCKS), range(BLOCKS)))
        gpu.storage.zero_()

        gpu.backend.run(CopyJob(2, Direction.LOAD, range(BLOCKS)[::-1], range(BLOCKS)))

        assert torch.equal(kv.view(torch.uint8), before.flip(1))


@pytest.mark.parametrize("way", WAYS)
def test_more_pages_than_a_buffer_holds_are_copied(way: str) -> None:
    many, run = 1_000, BUFFER_BYTES // 6
    with vram(way, page_layout([Placement(2, many * run, run, 0)], many), many) as gpu:
        pages = gpu.read().reshape(2, many, run)
        order = gpu.rng.permutation(many)

        gpu.backend.run(CopyJob(1, Direction.SAVE, order.tolist(), range(many)))
        gpu.backend.drain()

        assert np.array_equal(gpu.pool.slots.reshape(many, 2, run), pages[:, order].swapaxes(0, 1))


@pytest.mark.parametrize("way", WAYS)
def test_pages_beyond_four_gib_are_copied(way: str) -> None:
    """Three pages are saved and loaded. Their byte offsets in VRAM and in CPU memory exceed 32
    bits, as in real KV caches. Each page arrives in the correct place, and nothing else changes."""
    page = 64 << 20
    layout = PageLayout((Region(0, 2, 5 << 30, page, page // 2),), 66)
    storage = torch.zeros(layout.storage_bytes, dtype=torch.uint8, device="cuda")
    assert layout.storage_bytes > 2 << 32
    with closing(pinned_pool(66, layout.page_bytes)) as pool:
        assert pool.slots.nbytes > 1 << 32
        with closing(make_backend(way, [layout], storage, pool)) as backend:
            halves = storage[(5 << 30) :], storage
            for number, block in enumerate((0, 33, 65), 1):
                for half, where in enumerate(halves):
                    where[block * page :][: page // 2] = 10 * number + half
            blocks, slots = (0, 33, 65), (65, 0, 64)
            assert not backend.run(CopyJob(1, Direction.SAVE, blocks, slots)).failed
            backend.drain()
            for number, slot in enumerate(slots, 1):
                seen = (
                    np.unique(pool.slots[slot, : page // 2]),
                    np.unique(pool.slots[slot, page // 2 :]),
                )
                assert [one.tolist() for one in seen] == [[10 * number + 1], [10 * number]]
            storage.zero_()
            assert not backend.run(CopyJob(2, Direction.LOAD, blocks, slots)).failed
            torch.cuda.synchronize()
            for number, block in enumerate(blocks, 1):
                for half, where in enumerate(halves):
                    assert (where[block * page :][: page // 2] == 10 * number + half).all()
            # In parts, because counting needs eight bytes per element.
            there = sum(int(torch.count_nonzero(part)) for part in storage.split(1 << 28))
            assert there == 3 * page, "and nowhere else"


def test_memory_that_cannot_be_pinned_does_not_affect_later_calls() -> None:
    """Memory that is already pinned cannot be pinned again. A torch kernel that runs after this
    error succeeds, although CUDA keeps the error of a call."""
    with closing(CpuPool(pinned(AnonymousMemory(4 * (1 << 20))), 1 << 20)) as pool:
        with pytest.raises(CudaError):
            CudaRuntime(cuda_major()).register(pool.slots.ctypes.data, pool.slots.nbytes)
        assert int((torch.ones(8, device="cuda") + 1).sum()) == 16


def test_a_storage_that_is_smaller_than_its_layout_is_refused() -> None:
    from tiered_kv.transfer.cuda.backend import CudaTransfer

    layout = page_layout([Placement(2, 5 * 64, 64, 0)], 5)
    storage = torch.zeros(639, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="has 639 bytes, but its layout spans 640"):
        CudaTransfer([layout], storage, CpuPool(AnonymousMemory(128), 128))
    with pytest.raises(ValueError, match="slots have 127 bytes, but the largest page has 128"):
        CudaTransfer(
            [layout],
            torch.zeros(640, dtype=torch.uint8, device="cuda"),
            CpuPool(AnonymousMemory(127), 127),
        )
