"""Where in its forecast a gap fell: 0 is sooner, 1 is later than was thought possible.

Ranks (the probability integral transform) make the gaps of a `ls` and of a test suite comparable:
a job whose tools all take long has high ranks whatever it runs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

KNOTS: Array = np.array([0.0, 0.02, 0.08, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0])
"""Ranks between which everything is linear; close where little is decided by chance: whether a
gap is very short, or very long. Shape (knots,)."""
_STEPS = np.diff(KNOTS)
EVEN: Array = np.convolve(_STEPS, [0.5, 0.5])
"""What each knot gets of evenly spread ranks. Shape (knots,), sum 1."""


def ranks_of(masses: Array) -> Array:
    """The rank of the middle of each cell. ``masses``: probability of each cell."""
    return np.cumsum(masses) - masses / 2


def at_knots(ranks: Array, weights: Array) -> Array:
    """Weighted ranks shared out between the two knots beside each. Shape (knots,)."""
    low = np.clip(np.searchsorted(KNOTS, ranks, "right") - 1, 0, len(KNOTS) - 2)
    upper = weights * (ranks - KNOTS[low]) / _STEPS[low]
    shared = np.zeros(len(KNOTS))
    shared += np.bincount(low, weights - upper, len(KNOTS))
    shared[1:] += np.bincount(low, upper, len(KNOTS) - 1)
    return shared
