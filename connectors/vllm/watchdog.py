"""If requests wait and nothing is computed for long, whatever we hold is given up."""

from __future__ import annotations

STUCK_S = 30.0
"""No wait that we ask for is longer and without a limit of its own: promotions end when computing
would be as fast, and a new job is let in when nothing else runs."""

STUCK_STEPS = 8
"""Steps without work that it takes as well: an engine that was paused makes none for long."""


class Watchdog:
    """Sees steps without work. One thread.

    Attributes:
        barked: it has done so, once for the engine's life.
    """

    def __init__(self) -> None:
        self.barked = False
        self._since: float | None = None
        self._steps = 0

    def worked(self) -> None:
        """A step computed something, or there was nothing to compute."""
        self._since = None
        self._steps = 0

    def barks(self, now: float) -> bool:
        """A step computed nothing although requests wait: whether that has lasted for too long.
        True once."""
        if self._since is None:
            self._since = now
        self._steps += 1
        if self.barked or now - self._since < STUCK_S or self._steps < STUCK_STEPS:
            return False
        self.barked = True
        return True
