"""``StaticBatchScheduler``: vLLM's scheduler with static batches, as servers had them before Orca
(Yu et al., OSDI 2022) let requests join at every step.

When nothing runs, the requests that wait are a batch, as many of them as may run at once. No other
request begins before the last of them has ended. An answer is sent when it is complete, and not
with those of its batch.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class StaticBatchScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's synchronous scheduler with this change; see the module."""

    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most = self.max_num_active_reqs
        self._batch: frozenset[str] = frozenset()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step, in which none but requests of the batch may begin."""
        left = self._batch & self.requests.keys()
        if not left:
            waiting = [request.request_id for request in self.waiting]
            left = self._batch = frozenset(waiting[: self._most])
        self.max_num_active_reqs = len(left)
        return super().schedule(*args, **kwargs)
