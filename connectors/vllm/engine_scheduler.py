"""``ContinuumScheduler``: vLLM's scheduler with job order and admission control, for
``--scheduler-cls``.

    vllm serve MODEL --kv-transfer-config … \\
        --scheduler-cls tiered_kv.connectors.vllm.engine_scheduler.ContinuumScheduler

The scheduler differs from vLLM's in a few ways. Requests that the connector holds back are parked
outside the waiting queue. Requests in the queue are ordered by the start of their jobs, with jobs
that have pinned KV first; if more requests wait than vLLM may run, they are ordered nearly by
arrival. A client gets an equal share while other clients wait, and a request that has waited for
the admission limit precedes every later request. The youngest job is preempted first, and a job's
last turn after all others. With ``TIERED_KV_HIDE_RESTORES=1`` vLLM does not count requests that
wait for a restore. Without tiered-kv's connector nothing is changed; with
``--scheduling-policy priority`` (the operator's own order), requests are only parked. Diffusion
models, for which vLLM has a separate scheduler, are refused (``UnsupportedError``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler

from tiered_kv.errors import UnsupportedError

from .engine_config import is_diffusion

if TYPE_CHECKING:
    from tiered_kv.connectors.runtime.admission.queue import JobQueue
    from tiered_kv.connectors.runtime.parts import AdmissionGroup
    from tiered_kv.connectors.runtime.scheduler import SchedulerHalf


MOST_UNPARKED = 256
"""Maximum number of parked requests that are admitted in one step, and maximum number of overdue
requests in addition. Admitting a job takes tens of microseconds."""


class _InJobOrder:
    """Changes to both of vLLM's schedulers; see the module docstring.

    Attributes:
        parked: held-back requests by id, in the order of admission.
    """

    connector: Any
    requests: dict[str, Any]
    waiting: Any
    running: list[Any]
    max_num_running_reqs: int
    policy: SchedulingPolicy
    _pause_state: PauseState

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if is_diffusion(vllm_config):
            raise UnsupportedError(
                "ContinuumScheduler does not support diffusion models, for which vLLM has a "
                "separate scheduler: remove --scheduler-cls."
            )
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        self.parked: dict[str, Any] = {}
        self._came: deque[str] = deque()  # ids by arrival; may include requests that left
        self._unsorted = False
        self._counts_parked = True
        half = getattr(self.connector, "scheduler_half", None)
        if half is not None and half.deps.config.observes:
            half = None  # observe mode observes vLLM's own order
        self._half: SchedulerHalf | None = half
        self._hides_restores = half is not None and half.deps.config.hide_restores
        if half is not None:
            half.take_over_queue(in_job_order=self.policy is SchedulingPolicy.FCFS)

    def add_request(self, request: Any) -> None:
        known = request.request_id in self.requests
        super().add_request(request)  # type: ignore[misc]
        if self._half is None or known:
            return
        self._unsorted = True
        try:
            queue = self._half.admission.queue
            if queue.holds(request.request_id, behind=self._is_behind(request)):
                self.waiting.remove_request(request)
                self.parked[request.request_id] = request
                self._came.append(request.request_id)
                queue.on_parked(request.request_id)
                queue.ranks_changed |= self.policy is not SchedulingPolicy.FCFS
        except Exception:
            self._half.on_scheduler_failed()

    def _is_behind(self, request: Any) -> bool:
        """Return True if a parked request precedes this request of a new job."""
        if self.policy is SchedulingPolicy.FCFS:
            return bool(self.parked)
        return any(one.priority <= request.priority for one in self.parked.values())

    def _sort_parked(self, queue: JobQueue) -> None:
        order = queue.in_parked_order(self.parked)
        self.parked = {request_id: self.parked[request_id] for request_id in order}
        if self.policy is not SchedulingPolicy.FCFS:
            by_priority = sorted(self.parked.items(), key=lambda item: item[1].priority)
            self.parked = dict(by_priority)

    def finish_requests(self, request_ids: str | Iterable[str] | None, status: Any) -> Any:
        ended = super().finish_requests(request_ids, status)  # type: ignore[misc]
        for request in ended:
            self.parked.pop(request.request_id, None)
        return ended

    def get_request_counts(self) -> tuple[int, int]:
        running, waiting = super().get_request_counts()  # type: ignore[misc]
        return running, waiting + (len(self.parked) if self._counts_parked else 0)

    def get_num_unfinished_requests(self) -> int:
        unfinished: int = super().get_num_unfinished_requests()  # type: ignore[misc]
        if not unfinished and self._pause_state == PauseState.UNPAUSED:
            return len(self.parked)  # vLLM 0.30 counts only its queues, and would go idle
        return unfinished

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None and self._half is not None and self._hides_restores:
            # vLLM defers these requests, and its metric for all waiting requests includes them.
            hidden = min(self._half.turns.waiting_for_pages(), stats.num_skipped_waiting_reqs)
            stats.num_skipped_waiting_reqs -= hidden
        return stats

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._half is not None:
            try:
                self._let_in(self._half.admission.queue)
                if self.policy is SchedulingPolicy.FCFS:
                    self._put_in_order(self._half.admission)
            except Exception:
                self._half.on_scheduler_failed()
                self._unpark_all()
        self._counts_parked = False  # vLLM divides the step's tokens among counted requests
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._counts_parked = True

    def _let_in(self, queue: JobQueue) -> None:
        came = self._came
        if queue.ranks_changed:
            queue.ranks_changed = False
            if len(self.parked) > 1:
                self._sort_parked(queue)
        for request_id in [*islice(self.parked, MOST_UNPARKED)]:
            if queue.holds(request_id):
                break
            self._unpark(request_id)
        # The order of parked requests must not extend a wait beyond the limit.
        for _ in range(MOST_UNPARKED):
            while came and came[0] not in self.parked:
                came.popleft()
            if not came or not queue.lets_overdue_in(came[0]):
                break
            self._unpark(came.popleft())

    def _unpark(self, request_id: str) -> None:
        self.waiting.add_request(self.parked.pop(request_id))
        self._unsorted = True

    def _unpark_all(self) -> None:
        while self.parked:
            self._unpark(next(iter(self.parked)))

    def _put_in_order(self, admission: AdmissionGroup) -> None:
        queue, fairness, waiting = admission.queue, admission.fairness, self.waiting
        seats_short = len(waiting) > self.max_num_running_reqs - len(self.running)
        if seats_short != fairness.seats_short:
            fairness.seats_short, self._unsorted = seats_short, True
        if len(waiting) > 1 and (self._unsorted or queue.order_is_stale):
            ordered = queue.in_waiting_order(waiting)
            waiting.clear()
            waiting.extend(ordered)
        self._unsorted = False
        if len(self.running) > 1 and queue.is_tight(len(self.running)):
            # vLLM preempts the last request.
            self.running = sorted(self.running, key=queue.running_rank)


class ContinuumScheduler(_InJobOrder, Scheduler):
    """vLLM's scheduler with the changes that the module docstring describes."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the asynchronous class if vLLM would have chosen its asynchronous scheduler."""
        if cls is ContinuumScheduler and vllm_config.scheduler_config.async_scheduling:
            return AsyncContinuumScheduler(vllm_config, *args, **kwargs)
        return super().__new__(cls)


class AsyncContinuumScheduler(_InJobOrder, AsyncScheduler):
    """vLLM's asynchronous scheduler with the same changes as ``ContinuumScheduler``."""
