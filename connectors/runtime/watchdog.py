"""Watchdog: tells when requests wait and nothing is computed for long."""

from __future__ import annotations

import math

STUCK_S = 30.0
"""Seconds without work. Waits that we ask for are shorter or end by themselves: promotions when
computing would be as fast, and a new job is let in when nothing else runs."""

STUCK_STEPS = 8
"""Steps without work, which it takes as well."""

AT_REST_S = 1.0
"""An engine that is stuck goes on making steps. One that makes none for so long was paused, or had
nothing to do, and being stuck begins anew."""


class Watchdog:
    """Sees steps without work. One thread.

    Attributes:
        barked: it has done so, once for the engine's life.
    """

    def __init__(self) -> None:
        self.barked = False
        self._since: float | None = None
        self._last = -math.inf
        self._steps = 0

    def worked(self) -> None:
        """Begin anew: a step computed something, or there was nothing to compute."""
        self._since = None
        self._steps = 0

    def barks(self, now: float) -> bool:
        """Count a step that computed nothing although requests wait. True, once, if that has lasted
        for too long."""
        if self._since is None or now - self._last >= AT_REST_S:
            self._since, self._steps = now, 0
        self._last = now
        self._steps += 1
        if self.barked or now - self._since < STUCK_S or self._steps < STUCK_STEPS:
            return False
        self.barked = True
        return True
