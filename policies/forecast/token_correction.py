"""A forecast by tool, corrected for the job and its tokens.

The probability of each cell is multiplied by exp(s(rank)) and made to sum to 1 again (exponential
tilting), where s is piecewise linear in the rank of the cell and linear in features of the turn.
As s sees ranks and not seconds, what was learned with one tool holds for another. Learned online:
AdaGrad (Duchi, Hazan & Singer, 2011) on the log loss of every gap, which is convex.
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

LATELY_TRUST, ALIKE_TRUST = 0.7, 0.6
"""Powers to which the two views of the job's past are taken before anything is learned."""
RATE = 0.05
"""AdaGrad's step."""
CAUTION = 10.0
"""Squared gradients that it starts from: the first steps are not the largest."""

_OUTPUT_OCTAVES = np.arange(5.0, 12.0)
_NEW_OCTAVES = np.arange(4.0, 15.0, 2.0)
_TOKENS_BEGIN = 1
_PAST_BEGIN = _TOKENS_BEGIN + len(_OUTPUT_OCTAVES) + len(_NEW_OCTAVES)
FEATURES = _PAST_BEGIN + 2 * len(KNOTS) + 2


def features_of(turn: TurnEnd, past: Past) -> Array:
    """Shape (features,)."""
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
    features[begin : begin + knots] = past.lately
    features[begin + knots : begin + 2 * knots] = past.alike
    features[-2] = past.lately_weight
    features[-1] = past.alike_weight
    return features


class Tilt:
    """The correction and how it is learned. One thread at a time."""

    def __init__(self) -> None:
        self.weights: Array = np.zeros((FEATURES, len(KNOTS)))
        knots = len(KNOTS)
        lately, alike = _PAST_BEGIN, _PAST_BEGIN + knots
        self.weights[lately : lately + knots] = LATELY_TRUST * np.eye(knots)
        self.weights[alike : alike + knots] = ALIKE_TRUST * np.eye(knots)
        self.squares: Array = np.full_like(self.weights, CAUTION)

    def tilted(self, masses: Array, features: Array) -> Array:
        """The corrected probability of each cell. Changes nothing. Shape (cells,)."""
        heights = features @ self.weights
        bends = np.interp(ranks_of(masses), KNOTS, heights - heights.max())
        tilted: Array = np.exp(bends)
        tilted *= masses
        tilted /= tilted.sum()
        return tilted

    def observe(self, masses: Array, features: Array, cells: Array) -> None:
        """A gap that lies in each cell with that probability followed a turn of these
        features, whose forecast by tool alone was ``masses``."""
        missed = cells - self.tilted(masses, features)
        gradient = np.outer(features, at_knots(ranks_of(masses), missed))
        self.squares += gradient * gradient
        self.weights += RATE * gradient / np.sqrt(self.squares)

    def dump(self) -> dict[str, object]:
        """As JSON."""
        return {"weights": self.weights.tolist(), "squares": self.squares.tolist()}

    @classmethod
    def loaded(cls, saved: object) -> Tilt:
        """What ``dump`` gave.

        Raises:
            ValueError: it is not that.
        """
        made = cls()
        made.weights = numbers(entry(saved, "weights"), *made.weights.shape)
        made.squares = numbers(entry(saved, "squares"), *made.squares.shape, least=1e-6)
        return made
