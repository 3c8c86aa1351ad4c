"""Variants of vLLM's scheduler: a pool without eviction, and static batches.

``ReachScheduler`` schedules over a large pool, of which running requests may hold only a small
part::

    vllm serve MODEL --num-gpu-blocks-override LARGE --scheduler-cls \\
        tiered_kv.bench.sim.servers.schedulers.ReachScheduler \\
        --additional-config '{"reach_blocks": N}'

This is a bound that a policy could reach: all computed KV is found again at no cost, but no more
contexts run concurrently than in a pool of N blocks. The pool reports the size of the small pool,
and the free blocks that the small pool would have, so vLLM admits and preempts as with N blocks. A
free block keeps its KV, because the large pool has blocks that were never used. After a preemption,
only the request's partial last block is recomputed.

``StaticBatchScheduler`` has static batches, as was usual before Orca (Yu et al., OSDI 2022) let
requests join at every step. When no request is running, the waiting requests form a batch, up to
the limit of running requests. No other request starts before the whole batch has finished. Each
answer is sent when that answer is complete, not when the whole batch has finished.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

REACH_BLOCKS = "reach_blocks"
"""Key in ``--additional-config`` for the number of blocks of the small pool, including vLLM's null
block."""


class _WithinReach:
    """Mixin that limits the blocks of running requests, for both of vLLM's schedulers.

    Raises:
        ValueError: ``reach_blocks`` is missing, or not a number from 2 to the pool's size.
    """

    kv_cache_manager: Any

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        pool = self.kv_cache_manager.block_pool
        blocks = vllm_config.additional_config.get(REACH_BLOCKS)
        if not isinstance(blocks, int) or not 1 < blocks <= pool.num_gpu_blocks:
            raise ValueError(
                f'"{REACH_BLOCKS}" in --additional-config must be 2 to {pool.num_gpu_blocks}, '
                f"not {blocks!r}"
            )
        beyond = pool.num_gpu_blocks - blocks
        free_in_all = pool.get_num_free_blocks
        pool.get_num_free_blocks = lambda: free_in_all() - beyond
        pool.num_gpu_blocks = blocks


class ReachScheduler(_WithinReach, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with a pool that never evicts, and limited blocks for running requests."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the asynchronous variant where vLLM would choose its own asynchronous
        scheduler.
        """
        if cls is ReachScheduler and vllm_config.scheduler_config.async_scheduling:
            return AsyncReachScheduler(vllm_config, *args, **kwargs)
        return super().__new__(cls)


class AsyncReachScheduler(_WithinReach, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler with the same pool and limit as ``ReachScheduler``."""


class StaticBatchScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's synchronous scheduler with static batches."""

    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most = self.max_num_active_reqs
        self._batch: frozenset[str] = frozenset()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step in which only requests of the batch may start."""
        left = self._batch & self.requests.keys()
        if not left:
            waiting = [request.request_id for request in self.waiting]
            left = self._batch = frozenset(waiting[: self._most])
        self.max_num_active_reqs = len(left)
        return super().schedule(*args, **kwargs)
