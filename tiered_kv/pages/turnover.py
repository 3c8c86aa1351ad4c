"""Rate at which slots of CPU memory are taken."""

from __future__ import annotations

import math
from collections.abc import Callable

STAY_EVERY_S = 5.0
"""Least time between two measurements."""


class Turnover:
    """Measures how fast slots are taken.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._measured_at = -math.inf
        self._before = 0
        self._per_s = 0.0

    def per_s(self, taken: int) -> float:
        """Slots a second, smoothed; 0 at first.

        Args:
            taken: slots taken so far.
        """
        now = self._clock()
        if now - self._measured_at >= STAY_EVERY_S:
            rate = (taken - self._before) / (now - self._measured_at)  # 0 at first
            self._per_s += 0.5 * (rate - self._per_s)
            self._before, self._measured_at = taken, now
        return self._per_s
