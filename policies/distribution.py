"""Forecast of a gap, as a distribution over a fixed grid of seconds."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Round numbers, because programs wait for them: `sleep 30`, `timeout 120`, a poll every 5 s, a
# trace with whole seconds. A pin that ends just short of such a number is wasted.
_MINUTES = [1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 45]
_HOURS = [1, 1.5, 2, 3, 4]

GRID: Array = np.concatenate(
    [
        [0.05, 0.06, 0.07, 0.08, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3, 0.35],
        [0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9],
        np.arange(1, 3, 0.25),
        np.arange(3, 6, 0.5),
        np.arange(6, 20, 1),
        np.arange(20, 40, 2),
        np.arange(40, 60, 5),
        np.array(_MINUTES) * 60,
        np.array(_HOURS) * 3600,
    ]
)
"""Grid points in seconds, ascending in steps of 5% to 50%. Shape (points,)."""
GRID.flags.writeable = False
_POINTS: list[float] = GRID.tolist()

CELLS = len(GRID) + 1
"""Number of cells. Each cell ends at a grid point, inclusive; the last cell is everything beyond
the grid."""

_EDGES = np.concatenate([[0.0], GRID])
_WIDTHS = np.diff(_EDGES)
_HALF_WIDTHS = _WIDTHS / 2
_STARTS: list[float] = _EDGES.tolist()
_LENGTHS: list[float] = _WIDTHS.tolist()

CELL_LOG_S: Array = np.log(np.concatenate([[0.03], np.sqrt(GRID[:-1] * GRID[1:]), [GRID[-1] * 2]]))
"""Log of a typical gap in each cell, in seconds. Shape (cells,)."""
CELL_LOG_S.flags.writeable = False


def cell_of(gap_s: float) -> int:
    """Return the index of the cell that contains a gap of ``gap_s`` seconds."""
    return bisect_left(_POINTS, gap_s)


def masses_of(cdf: Array) -> Array:
    """Return the probability of each cell, from a forecast's ``cdf``. Shape (cells,)."""
    masses = np.empty(CELLS)
    masses[:-1] = cdf
    masses[-1] = 1.0
    masses[1:] -= cdf
    return masses


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """The distribution of a gap X. Immutable; linear between grid points.

    Forecasts are mixed by a weighted sum of their ``cdf``.

    Attributes:
        cdf: P(X <= GRID[i]), non-descending, at most 1. The remainder to 1 is the probability of a
            return beyond the grid, or never. Shape (points,); becomes read-only.
    """

    cdf: Array

    def __post_init__(self) -> None:
        self.cdf.flags.writeable = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Forecast) and np.array_equal(self.cdf, other.cdf)

    def __hash__(self) -> int:
        return hash(self.cdf.tobytes())

    @classmethod
    def of_masses(cls, masses: Array) -> Forecast:
        """Create a forecast from the probability of each cell. ``masses`` has shape (cells,) and
        sum 1."""
        return cls(np.minimum(masses[:-1].cumsum(), 1.0))

    @property
    def masses(self) -> Array:
        """The probability of each cell. Shape (cells,)."""
        return masses_of(self.cdf)

    @property
    def held_s(self) -> Array:
        """E[min(X, t)] in seconds at every grid point. Shape (points,).

        The integral of P(X > t), which is linear between the points.
        """
        later = 1.0 - self.cdf
        steps = later * _HALF_WIDTHS
        steps[1:] += later[:-1] * _HALF_WIDTHS[1:]
        steps[0] += _HALF_WIDTHS[0]
        held_s: Array = steps.cumsum()
        return held_s

    def scaled(self, chance: float) -> Forecast:
        """Return the distribution of a gap that ends as forecast here with probability ``chance``,
        and otherwise never ends."""
        return Forecast(chance * self.cdf)

    def within(self, t: float) -> float:
        """Return P(X <= t), the probability that the gap ends within ``t`` seconds."""
        if not t > 0:
            return 0.0
        i = cell_of(t)
        if i == len(GRID):
            return float(self.cdf[-1])
        before = float(self.cdf[i - 1]) if i else 0.0
        share = (t - _STARTS[i]) / _LENGTHS[i]
        return float(before + share * (float(self.cdf[i]) - before))

    def held(self, t: float) -> float:
        """Return E[min(X, t)], the mean time for which KV is kept, seconds, if it is kept until the
        job returns, but at most for ``t`` seconds."""
        if not t > 0:
            return 0.0
        i = cell_of(t)
        before_s = float(self.held_s[i - 1]) if i else 0.0
        later = 1.0 - (float(self.cdf[i - 1]) if i else 0.0)
        return before_s + float(t - _STARTS[i]) * (later + 1.0 - self.within(t)) / 2

    def quantile(self, q: float) -> float:
        """Return the grid point g (or 0) for which P(X <= g) is closest to ``q``; inf if P(X <= g)
        is below ``q`` on the whole grid."""
        i = int(np.searchsorted(self.cdf, q))
        if i == len(GRID):
            return math.inf
        before = float(self.cdf[i - 1]) if i else 0.0
        nearer_before = q - before <= float(self.cdf[i]) - q
        return float(_EDGES[i] if nearer_before else GRID[i])

    def after(self, elapsed: float) -> Forecast:
        """Return the forecast of X (not of the remaining time) given that X > ``elapsed`` seconds.
        If the forecast excludes this, the result forecasts that the gap never ends."""
        gone = self.within(elapsed)
        if gone >= 1:
            return Forecast(np.zeros(len(GRID)))
        cdf = (self.cdf - gone) / (1 - gone)
        cdf[: np.searchsorted(GRID, elapsed, "right")] = 0.0
        return Forecast(np.maximum(cdf, 0.0))

    def between(self, least_s: float, most_s: float) -> Forecast:
        """Clamp the forecast of X to ``least_s`` and ``most_s`` seconds. A command that sleeps for
        30 s ends just after that, and a command that times out ends just after its timeout."""
        if not least_s > 0 and math.isinf(most_s):
            return self
        cdf = self.cdf.copy()
        cdf[np.searchsorted(GRID, most_s, "right") :] = 1.0
        cdf[: np.searchsorted(GRID, least_s, "right")] = 0.0
        return Forecast(cdf)
