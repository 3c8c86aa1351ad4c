"""Rank of a gap in its forecast: 0 is the earliest possible return, 1 the latest.

Ranks (the probability integral transform) make the gaps of an `ls` and of a test suite comparable:
a job whose tools are all slow has high ranks, whatever it runs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

KNOTS: Array = np.array([0.0, 0.02, 0.08, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0])
"""Ranks at which piecewise linear functions of the rank may bend. The knots are dense at both ends,
where the difference between a short and a very short gap matters. Shape (knots,)."""
_STEPS = np.diff(KNOTS)
EVEN: Array = np.convolve(_STEPS, [0.5, 0.5])
"""Weight of each knot under uniform ranks. Shape (knots,), sum 1."""


def ranks_of(masses: Array) -> Array:
    """Return the rank of the middle of each cell, whose probabilities are ``masses``. Shape
    (cells,)."""
    ranks: Array = masses.cumsum()
    ranks -= masses * 0.5
    return ranks


def at_knots(ranks: Array, weights: Array) -> Array:
    """Distribute the weight of each rank to its two neighbouring knots. Returns the weight of each
    knot, shape (knots,)."""
    low = np.clip(np.searchsorted(KNOTS, ranks, "right") - 1, 0, len(KNOTS) - 2)
    upper = weights * (ranks - KNOTS[low]) / _STEPS[low]
    shared = np.zeros(len(KNOTS))
    shared += np.bincount(low, weights - upper, len(KNOTS))
    shared[1:] += np.bincount(low, upper, len(KNOTS) - 1)
    return shared


def tilted(masses: Array, heights: Array) -> Array:
    """Multiply the probability of each cell by exp(s), and normalise. s is linear in the rank of
    the cell between the knots.

    Args:
        masses: probability of each cell. Shape (cells,).
        heights: s at each knot. Shape (knots,).
    """
    made = np.interp(ranks_of(masses), KNOTS, heights)
    made -= heights.max()
    np.exp(made, out=made)
    made *= masses
    made /= made.sum()
    return made
