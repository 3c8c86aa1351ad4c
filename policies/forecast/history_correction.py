"""Correction of a tool's forecast for the job and its tokens.

The probability of each cell is multiplied by exp(s(rank)), then normalised (exponential tilting). s
is piecewise linear in the rank of the cell and linear in features of the turn. As s depends on
ranks and not on seconds, a correction learned with one tool holds for another. It is learned
online: AdaGrad (Duchi, Hazan & Singer, 2011) on the log loss of every gap, which is convex.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tiered_kv.policies.base import TurnEnd

from .job_history import Past
from .ranks import KNOTS, at_knots, ranks_of
from .saved_state import entry, numbers

Array = NDArray[np.float64]

RECENT_TRUST, SIMILAR_TRUST = 0.7, 0.6
"""Initial exponents of the two views of the job's history."""
RATE = 0.05
"""Step size of AdaGrad."""
CAUTION = 10.0
"""Initial sum of squared gradients, so that the first steps are not the largest."""

_OUTPUT_OCTAVES = np.arange(5.0, 12.0)
_NEW_OCTAVES = np.arange(4.0, 15.0, 2.0)
_TOKENS_BEGIN = 1
_PAST_BEGIN = _TOKENS_BEGIN + len(_OUTPUT_OCTAVES) + len(_NEW_OCTAVES)
FEATURES = _PAST_BEGIN + 2 * len(KNOTS) + 2


def features_of(turn: TurnEnd, past: Past) -> Array:
    """Features of a turn and its job's history. Shape (features,)."""
    features = np.zeros(FEATURES)
    features[0] = 1.0
    begin = _TOKENS_BEGIN
    for tokens, octaves in (
        (turn.output_tokens, _OUTPUT_OCTAVES),
        (turn.new_tokens, _NEW_OCTAVES),
    ):
        step = octaves[1] - octaves[0]
        place = (math.log2(max(tokens, 0) + 1) - octaves[0]) / step
        place = min(max(place, 0.0), len(octaves) - 1.0)
        low = min(int(place), len(octaves) - 2)
        features[begin + low] = 1 - (place - low)
        features[begin + low + 1] = place - low
        begin += len(octaves)
    knots = len(KNOTS)
    features[begin : begin + knots] = past.recent
    features[begin + knots : begin + 2 * knots] = past.similar
    features[-2] = past.recent_weight
    features[-1] = past.similar_weight
    return features


class TokenCorrection:
    """The correction and its online learning. Not thread-safe."""

    def __init__(self) -> None:
        self.weights: Array = np.zeros((FEATURES, len(KNOTS)))
        knots = len(KNOTS)
        recent, similar = _PAST_BEGIN, _PAST_BEGIN + knots
        self.weights[recent : recent + knots] = RECENT_TRUST * np.eye(knots)
        self.weights[similar : similar + knots] = SIMILAR_TRUST * np.eye(knots)
        self.squares: Array = np.full_like(self.weights, CAUTION)

    def corrected(self, masses: Array, features: Array) -> Array:
        """Return the corrected probability of each cell. Does not mutate. Shape (cells,)."""
        heights = features @ self.weights
        bends = np.interp(ranks_of(masses), KNOTS, heights - heights.max())
        corrected: Array = np.exp(bends)
        corrected *= masses
        corrected /= corrected.sum()
        return corrected

    def observe(self, masses: Array, features: Array, cells: Array) -> None:
        """Learn from a gap that lies in each cell with probability ``cells``. It followed a turn
        with these features, whose forecast by tool alone was ``masses``."""
        missed = cells - self.corrected(masses, features)
        gradient = np.outer(features, at_knots(ranks_of(masses), missed))
        self.squares += gradient * gradient
        self.weights += RATE * gradient / np.sqrt(self.squares)

    def dump(self) -> dict[str, object]:
        """Return the learned state as JSON."""
        return {"weights": self.weights.tolist(), "squares": self.squares.tolist()}

    @classmethod
    def loaded(cls, saved: object) -> TokenCorrection:
        """Build from what ``dump`` returned.

        Raises:
            ValueError: the state is malformed.
        """
        made = cls()
        made.weights = numbers(entry(saved, "weights"), *made.weights.shape)
        made.squares = numbers(entry(saved, "squares"), *made.squares.shape, least=1e-6)
        return made
