"""Silent jobs: the chance that one returns, and when it is taken to have ended. Pure but for
``ReturnRate``, which learns.

Most clients never say that a job is over: they just stop.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiered_kv.policies.base import JobKey
from tiered_kv.policies.distribution import Forecast

SOON_S = 60.0
"""A job takes room while it is away by its chance to return in this time: for one that comes later
a new one need not wait."""
LEAST_CHANCE, LEAST_SILENCE_S = 0.05, 30.0
"""A job that has less of one, and was silent for so long, is taken to have ended until it
returns."""
SILENT_TIMES = 8.0
"""Without a forecast: so is one that is away for so many times the mean gap, of which none counts
for more than ``SOON_S``: what one client does must not hold others up."""
LONGEST_S = 4 * 3600.0
"""A job silent for so long is not waited for any longer: its gap is censored."""
MOST_OPEN = 8192
"""Open gaps kept; beyond this the oldest is closed as censored."""
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


def unforecast_chance(away_s: float, mean_gap_s: float, *, pinned: bool) -> float:
    """The same without a forecast: 1 while it is pinned or has not been away for long, else 0.

    Args:
        mean_gap_s: mean of all jobs' gaps, seconds; 0 if unknown.
    """
    silent = away_s >= max(SILENT_TIMES * mean_gap_s, LEAST_SILENCE_S)
    return float(pinned or not silent)


def unlikely(chances: Mapping[JobKey, float]) -> list[JobKey]:
    """The jobs of which nothing is expected any more: what these have pinned goes before all other
    pins."""
    return [job for job, chance in chances.items() if chance < LEAST_CHANCE]


def has_ended(away_s: float) -> bool:
    """True if an unlikely job has been silent for long enough to be taken to have ended."""
    return away_s >= LEAST_SILENCE_S


def is_given_up(away_s: float, open_gaps: int) -> bool:
    """True if the job that has been away for longest is not waited for any longer.

    Args:
        open_gaps: jobs that are away, each of which takes memory.
    """
    return open_gaps > MOST_OPEN or away_s >= LONGEST_S
