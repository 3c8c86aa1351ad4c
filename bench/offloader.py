"""vLLM's own offloading connector, for machines on which it cannot copy.

Uses ``OffloadingConnector`` as shipped with vLLM, with its CPU memory manager. Only the part that
copies KV is replaced, because vLLM's copies need a GPU. With this module, a transfer moves no
bytes, and finishes as soon as it is submitted. vLLM loads this module by name.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class UncopiedSpec(CPUOffloadingSpec):
    """vLLM's CPU memory tier, without copying any bytes."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return _UncopiedWorker()


class _UncopiedWorker(OffloadingWorker):
    def __init__(self) -> None:
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self.submit_store(job_id, src_spec, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return immediately, because all transfers have finished."""
