"""Measures step times of the engine."""

from __future__ import annotations

ASSUMED_S = 0.05
LONGEST_S = 1.0
WEIGHT = 0.3
"""Weight of a new measurement in the average."""


class StepTimer:
    """Measures the duration of steps with work. Used on one thread.

    Attributes:
        step_s: smoothed step time, seconds.
    """

    def __init__(self) -> None:
        self.step_s = ASSUMED_S
        self._looked_at: float | None = None

    def look(self, now: float, steps: int) -> None:
        """Record the average step time since the last call.

        Args:
            steps: number of steps built since the last call; 0 if one of them was idle, so that the
                measurement is ignored.
        """
        if steps and self._looked_at is not None:
            seen = min((now - self._looked_at) / steps, LONGEST_S)
            self.step_s += WEIGHT * (seen - self.step_s)
        self._looked_at = now
