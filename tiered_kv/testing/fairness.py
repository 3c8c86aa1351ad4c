"""An independent check of the fairness rule of admission.

No request may be admitted before an older request that has waited for ``admission_max_wait_s``.
Preempted requests and requests of a higher priority are exempt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiered_kv.connectors.runtime.base import Request


class FairnessWatch:
    """Watches a scheduler half. An admission that breaks the rule raises ``AssertionError``.

    Args:
        half: the scheduler half, before its first request.
        clock: the clock of the scheduler half.
    """

    def __init__(self, half: Any, clock: Callable[[], float]) -> None:
        self._limit_s = half.deps.config.admission_max_wait_s
        self._priorities = half.facts.limits.priorities
        self._clock = clock
        self._half = half
        self._waiting: dict[str, tuple[Request, float]] = {}
        self._wrap("on_arrived", self._arrived)
        self._wrap("on_allocated", self._allocated)
        self._wrap("on_finished", self._finished)

    def _wrap(self, name: str, watch: Callable[..., None]) -> None:
        hook = getattr(self._half, name)

        def watched(*args: Any) -> Any:
            watch(*args)
            return hook(*args)

        setattr(self._half, name, watched)

    def _arrived(self, request: Request, _hints: object) -> None:
        self._waiting[request.request_id] = request, self._clock()

    def _allocated(self, request_id: str, _num_external: int) -> None:
        found = self._waiting.pop(request_id, None)
        if found is None:  # already admitted once: its restore has finished, or it was preempted
            return
        request, arrived_at = found
        now = self._clock()
        for other, since in self._waiting.values():  # by arrival
            if since >= arrived_at:
                return
            counts = other.ready and not self._precedes(request, other)
            assert not counts or now - since < self._limit_s, (
                f"{request_id} was admitted before {other.request_id}, which had waited "
                f"{now - since:g} s of {self._limit_s:g}"
            )

    def _precedes(self, request: Request, other: Request) -> bool:
        return self._priorities and request.priority < other.priority

    def _finished(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
