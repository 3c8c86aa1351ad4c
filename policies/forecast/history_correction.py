"""Correction of a tool's forecast for the job's own earlier gaps.

The probability of each cell is multiplied by exp(s(rank)), then normalised (exponential tilting). s
is piecewise linear in the rank of the cell and linear in the job's history. As s depends on ranks
and not on seconds, a correction learned with one tool holds for another. It is learned online:
AdaGrad (Duchi, Hazan & Singer, 2011) on the log loss of every gap, which is convex.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .job_history import Past
from .ranks import KNOTS, at_knots, ranks_of, tilted
from .saved_state import entry, numbers

Array = NDArray[np.float64]

TRUST = 0.5
"""Initial exponent of each of the two views of the job's history: their geometric mean."""
RATE = 0.05
"""Step size of AdaGrad."""
CAUTION = 1.0
"""Initial sum of squared gradients, so that the first steps are not the largest."""

FEATURES = 1 + 2 * len(KNOTS)


def features_of(past: Past) -> Array:
    """Features of a job's history: 1, and its two views. Shape (features,)."""
    return np.concatenate([_ONE, past.recent, past.similar])


_ONE = np.ones(1)


class HistoryCorrection:
    """The correction and its online learning. Not thread-safe."""

    def __init__(self) -> None:
        eye = TRUST * np.eye(len(KNOTS))
        self.weights: Array = np.vstack([np.zeros((1, len(KNOTS))), eye, eye])
        self.squares: Array = np.full_like(self.weights, CAUTION)

    def corrected(self, masses: Array, features: Array) -> Array:
        """Return the corrected probability of each cell. Does not mutate. Shape (cells,)."""
        return tilted(masses, features @ self.weights)

    def observe(self, masses: Array, features: Array, missed: Array) -> None:
        """Learn from a gap after a turn with these features.

        Args:
            masses: the forecast by tool alone, which was corrected.
            missed: the probability of each cell by what came, less the corrected forecast's.
        """
        gradient = np.outer(features, at_knots(ranks_of(masses), missed))
        self.squares += gradient * gradient
        self.weights += RATE * gradient / np.sqrt(self.squares)

    def dump(self) -> dict[str, object]:
        """Return the learned state as JSON."""
        return {"weights": self.weights.tolist(), "squares": self.squares.tolist()}

    @classmethod
    def loaded(cls, saved: object) -> HistoryCorrection:
        """Build from what ``dump`` returned.

        Raises:
            ValueError: the state is malformed.
        """
        made = cls()
        made.weights = numbers(entry(saved, "weights"), *made.weights.shape)
        made.squares = numbers(entry(saved, "squares"), *made.squares.shape, least=1e-6)
        return made
