"""Moments of the scheduler's clock, as seconds since the epoch."""

from __future__ import annotations

import math

from tiered_kv.connectors.runtime.dependencies import Dependencies


class Moments:
    """Both clocks at one moment, from which others follow.

    Attributes:
        now: on the scheduler's clock, seconds.
        wall: the same moment in seconds since the epoch.
    """

    def __init__(self, given: Dependencies) -> None:
        self.now, self.wall = given.clock(), given.wall()

    def since_epoch(self, at: float) -> float | None:
        """A moment of the scheduler's clock, to the millisecond; None if it never comes."""
        return round(self.wall + at - self.now, 3) if math.isfinite(at) else None


def finite(seconds: float) -> float | None:
    """Seconds to the tenth of a millisecond; None for those that JSON cannot tell."""
    return round(seconds, 4) if math.isfinite(seconds) else None
