"""The time that a page stays in CPU memory, by the rate at which slots are taken."""

from __future__ import annotations

import math
from collections.abc import Callable

from tiered_kv.pages.cpu_index import PageIndex

EVERY_S = 5.0
"""Seconds between two looks at how fast slots are taken."""
WEIGHT = 0.5
"""Weight of a new rate in the average."""


class CpuStay:
    """Measures how long a page stays in CPU memory. One thread.

    The order of eviction asks for it, and is part of the index that is watched: so that comes
    second, with ``watch``.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._index: PageIndex | None = None
        self._looked_at = -math.inf
        self._taken = 0
        self._taken_per_s = 0.0

    def watch(self, index: PageIndex) -> None:
        """Measure this index from now on."""
        self._index = index

    def seconds(self) -> float:
        """Seconds that a page stays at the present rate before it is evicted; infinite while
        slots are free."""
        index, now = self._index, self._clock()
        if index is None:
            return math.inf
        if now - self._looked_at >= EVERY_S:
            rate = (index.taken - self._taken) / (now - self._looked_at)  # 0 the first time
            self._taken_per_s += WEIGHT * (rate - self._taken_per_s)
            self._taken, self._looked_at = index.taken, now
        if index.free_slots or not self._taken_per_s:
            return math.inf
        return index.num_slots / self._taken_per_s
