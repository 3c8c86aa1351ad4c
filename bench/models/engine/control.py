"""Control of a test: a transfer that restores zeros of one group, and says that all went well."""

from __future__ import annotations

from typing import Any

from tiered_kv.transfer.base import CopyJob, CopyResult, Direction, TransferBackend
from tiered_kv.transfer.host_memory import CpuPool


class ZeroedGroup(TransferBackend):
    """Zeroes a group's pages in CPU memory just before they are restored.

    Args:
        inner: the backend that copies.
        pool: its CPU memory.
        group: position of the group among those that are offloaded.

    Attributes:
        struck: pages zeroed so far.
    """

    def __init__(self, inner: TransferBackend, pool: CpuPool, group: int) -> None:
        self.inner = inner
        self.struck = 0
        self._pool = pool
        self._group = group

    def submit(self, job: CopyJob) -> None:
        self._zero(job)
        self.inner.submit(job)

    def run(self, job: CopyJob) -> CopyResult:
        self._zero(job)
        return self.inner.run(job)

    def poll(self) -> list[CopyResult]:
        return self.inner.poll()

    def drain(self) -> None:
        self.inner.drain()

    def close(self) -> None:
        self.inner.close()

    def _zero(self, job: CopyJob) -> None:
        if job.direction is Direction.LOAD and job.group == self._group:
            self._pool.slots[list(job.slots)] = 0
            self.struck += len(job.slots)


def begin_to_zero(_worker: Any, position: int) -> None:
    """Have a worker restore zeros of a group. Runs in the worker's process."""
    half = _half()
    half.backend = ZeroedGroup(half.backend, half.pool, position)


def end_zeroing(_worker: Any) -> int:
    """Put a worker's own transfer back; returns the pages that were zeroed. Runs there as well."""
    half = _half()
    zeroed: ZeroedGroup = half.backend
    half.backend = zeroed.inner
    return zeroed.struck


def _half() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker_half
