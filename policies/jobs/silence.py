"""Silent jobs: the chance that one returns. Pure but for ``ReturnRate``, which learns.

Most clients never say that a job is over: they just stop.
"""

from __future__ import annotations

from tiered_kv.policies.distribution import Forecast

SOON_S = 60.0
"""A job takes room while it is away by its chance to return in this time: for one that comes later
a new one need not wait."""
RETURN_DECAY = 0.98
"""Share of a client's record that is kept with the next job that returned, or did not."""
PRIOR_RETURNS, PRIOR_LOSSES = 19.0, 1.0
"""Record of a client of which nothing is known: nearly all of its jobs go on."""


class ReturnRate:
    """Record of one client's jobs: they return, or end without a word."""

    def __init__(self) -> None:
        self._returned, self._gone = PRIOR_RETURNS, PRIOR_LOSSES

    def observe(self, *, returned: bool) -> None:
        """Count a job that was away: it returned, or is taken to have ended without a word."""
        self._returned = RETURN_DECAY * self._returned + returned
        self._gone = RETURN_DECAY * self._gone + (not returned)

    @property
    def share(self) -> float:
        """The chance that a turn that was not said to be the last is not."""
        return self._returned / (self._returned + self._gone)


def soon_chance(forecast: Forecast, away_s: float, goes_on: float) -> float:
    """Chance that a silent job returns in ``SOON_S``.

    Args:
        forecast: of its gap, if it returns at all.
        away_s: time since its last turn ended, seconds.
        goes_on: chance that it returns at all, as it was when the gap began.
    """
    gone = forecast.within(away_s)
    later = goes_on * (1 - gone) + 1 - goes_on
    soon = forecast.within(away_s + SOON_S) - gone
    return goes_on * soon / later if soon > 0 else 0.0
