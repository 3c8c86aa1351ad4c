"""If requests wait and nothing is computed for long, whatever we hold is given up."""

from __future__ import annotations

import math

STUCK_S = 30.0
"""No wait that we ask for is longer and without a limit of its own: promotions end when computing
would be as fast, and a new job is let in when nothing else runs."""

STUCK_STEPS = 8
"""Steps without work that it takes as well."""

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
        """A step computed something, or there was nothing to compute."""
        self._since = None
        self._steps = 0

    def barks(self, now: float) -> bool:
        """A step computed nothing although requests wait: whether that has lasted for too long.
        True once."""
        if self._since is None or now - self._last >= AT_REST_S:
            self._since, self._steps = now, 0
        self._last = now
        self._steps += 1
        if self.barked or now - self._since < STUCK_S or self._steps < STUCK_STEPS:
            return False
        self.barked = True
        return True
