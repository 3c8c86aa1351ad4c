"""Contexts that are to come up again before their job asks for them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tiered_kv.keys import PageKey
from tiered_kv.policies.base import JobKey

SPARE = 64
"""Entries of jobs that are no longer expected which the heap may keep beyond one for each job that
is. The time that a client names may be days ahead."""


class PrefetchQueue:
    """Contexts by the time they should come up. One thread; no clock.

    Whoever takes one out orders its promotion: when it is due, or ahead of that if the engine
    falls idle, since no hook runs then.
    """

    def __init__(self) -> None:
        self._keys: dict[JobKey, tuple[float, Sequence[PageKey]]] = {}
        self._heap: list[tuple[float, JobKey]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def expect(self, job: JobKey, due: float, keys: Sequence[PageKey]) -> None:
        """Expect the job back soon after ``due``, in place of the time before."""
        self._keys[job] = (due, keys)
        heapq.heappush(self._heap, (due, job))
        if len(self._heap) > 2 * len(self._keys) + SPARE:
            self._heap = [(due, job) for job, (due, _) in self._keys.items()]
            heapq.heapify(self._heap)

    def forget(self, job: JobKey) -> None:
        """Expect the job no longer. Unknown jobs are ignored."""
        self._keys.pop(job, None)

    def take(self, until: float) -> list[tuple[JobKey, float, Sequence[PageKey]]]:
        """Take out the contexts that are due until then, in that order: job, time and pages."""
        taken = []
        while self._heap and self._heap[0][0] <= until:
            due, job = heapq.heappop(self._heap)
            found = self._keys.get(job)
            if found is not None and found[0] == due:
                del self._keys[job]
                taken.append((job, *found))
        return taken
