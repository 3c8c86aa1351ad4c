"""The CUDA transfer backend obeys the same contract. Skipped, and said so, without CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiered_kv.layout import PageLayout
from tiered_kv.storage.cpu_pool import CpuPool
from tiered_kv.testing.transfer import Bytes, TransferConformance
from tiered_kv.transfer.base import TransferBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class TestCudaTransfer(TransferConformance):
    def make_backend(self, layout: PageLayout, storage: Any, pool: CpuPool) -> TransferBackend:
        from tiered_kv.transfer.cuda import CudaTransfer

        return CudaTransfer(layout, storage, pool)

    def make_pool(self, num_slots: int, page_bytes: int) -> CpuPool:
        pool = CpuPool(num_slots, page_bytes, pin=True)
        assert pool.pinned
        return pool

    def make_storage(self, nbytes: int) -> Any:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cuda")

    def read(self, storage: Any) -> Bytes:
        torch.cuda.synchronize()
        copied: Bytes = storage.cpu().numpy()
        return copied

    def write(self, storage: Any, content: Bytes) -> None:
        storage.copy_(torch.from_numpy(content))
