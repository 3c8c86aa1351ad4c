"""The probability that a job returns although its client has been silent for some time.

Most clients never declare that a job is over. They just send no further request. All functions are
pure; only ``ReturnRate`` learns.
"""

from __future__ import annotations

from tiered_kv.policies.distribution import Forecast

SOON_S = 60.0
"""Time in seconds. The demand of a job between turns counts in proportion to the job's chance to
return within this time. A new job need not wait for a job that returns later."""
RETURN_DECAY = 0.98
"""Factor by which a client's record decays with each further observation."""
PRIOR_RETURNS, PRIOR_LOSSES = 19.0, 1.0
"""Initial record of an unknown client, in numbers of jobs. Almost all jobs continue."""


class ReturnRate:
    """Record of how often one client's jobs return after a turn, and how often they end without
    notice."""

    def __init__(self) -> None:
        self._returned, self._gone = PRIOR_RETURNS, PRIOR_LOSSES

    def observe(self, *, returned: bool) -> None:
        """Count a job that was between turns: it returned, or is presumed to have ended."""
        self._returned = RETURN_DECAY * self._returned + returned
        self._gone = RETURN_DECAY * self._gone + (not returned)

    @property
    def share(self) -> float:
        """Probability that a job returns after a turn that was not declared to be its last."""
        return self._returned / (self._returned + self._gone)


def soon_chance(forecast: Forecast, away_s: float, goes_on: float) -> float:
    """Return the probability that a silent job returns within the next ``SOON_S`` seconds.

    Args:
        forecast: forecast of the job's gap, provided that the job returns at all.
        away_s: time since the job's last turn ended, seconds.
        goes_on: probability that the job returns at all, as estimated at the start of the gap.
    """
    gone = forecast.within(away_s)
    later = goes_on * (1 - gone) + 1 - goes_on
    soon = forecast.within(away_s + SOON_S) - gone
    return goes_on * soon / later if soon > 0 else 0.0
