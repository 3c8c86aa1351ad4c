"""Order of requests, where it is not that of arrival.

Jobs: the job that began first. Autellix's PLAS: the job that has had the least service so far, in
levels whose bounds double, and back to the first level once it has waited ``STARVED`` times as
long as it was served.
"""

from __future__ import annotations

import math
from typing import Any

from .servers import Order

FIRST_QUANTUM_S = 1.0
"""Service up to which a job is in the first level; each level has twice the one before."""
STARVED = 8.0
"""β: waiting over service from which a job is put first."""
LOOK_EVERY_S = 0.5


class Ordering:
    """Priorities of requests; the lower goes first. vLLM takes equals in their order."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._rank: dict[str, int] = {}
        self._served_s: dict[str, float] = {}
        self._waited_s: dict[str, float] = {}
        self._waiting: dict[str, tuple[str, float]] = {}  # request -> job, since
        self._looked_at = -math.inf

    def began(self, job: str, parent: str | None) -> None:
        """A job begins; a sub-agent counts as its parent."""
        rank = self._rank[parent] if parent is not None else len(self._rank)
        self._rank[job] = rank

    def asked(self, job: str, request_id: str, now: float) -> int:
        """A turn of the job arrives; returns the priority of its request."""
        self._waiting[request_id] = (job, now)
        if self._order is Order.JOB:
            return self._rank[job]
        return self._level(job) if self._order is Order.ATTAINED else 0

    def answered(self, job: str, request_id: str, waited_s: float, served_s: float) -> None:
        """A turn of the job ended."""
        self._waiting.pop(request_id, None)
        self._served_s[job] = self._served_s.get(job, 0.0) + served_s
        self._waited_s[job] = self._waited_s.get(job, 0.0) + waited_s

    def _level(self, job: str) -> int:
        served = self._served_s.get(job, 0.0)
        if served > 0 and self._waited_s.get(job, 0.0) >= STARVED * served:
            self._served_s[job] = self._waited_s[job] = 0.0
            return 0
        return max(0, math.ceil(math.log2(served / FIRST_QUANTUM_S))) if served > 0 else 0

    def look(self, scheduler: Any, now: float) -> None:
        """Put those first that have starved in vLLM's queue."""
        if self._order is not Order.ATTAINED or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        for request in list(scheduler.waiting):
            job, since = self._waiting[request.request_id]
            served = max(self._served_s.get(job, 0.0), FIRST_QUANTUM_S)
            waited = self._waited_s.get(job, 0.0) + now - since
            if request.priority > 0 and waited >= STARVED * served:
                scheduler.waiting.remove_request(request)
                request.priority = 0
                scheduler.waiting.add_request(request)
