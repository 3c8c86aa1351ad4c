"""Ranks of a job's own earlier gaps: its recent gaps, and the gaps after answers of similar length.

An agent's answers are mostly tool calls, and calls of one tool have similar lengths. So the length
of an answer shows which earlier gaps to compare with, even if no tool is named.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered_kv.policies.base import JobKey, TurnEnd

from .ranks import EVEN, KNOTS

Array = NDArray[np.float64]

RECENT_DECAY = 0.8
"""Decay of a gap's weight with each later gap, among the job's recent gaps."""
SIMILAR_DECAY = 0.97
"""Decay of a gap's weight with each later gap, among gaps after answers of similar length."""
SIMILAR_SIGMA = 0.3
"""Standard deviation of the Gaussian weight of a gap, in the difference of log answer lengths."""
PRIOR_WEIGHT = 1.0
"""Weight of the uniform distribution of ranks with which every job starts, as a number of gaps."""
MAX_GAPS = 64
"""Maximum number of gaps kept per job. Older gaps would have weights below 0.15."""
MAX_JOBS = 4096
"""Maximum number of jobs kept, about 5 KiB each. The least recently active job is dropped first."""


class Past(NamedTuple):
    """A job's history at the end of a turn.

    Attributes:
        recent, similar: log of the ratio of the ranks' frequency to a uniform distribution at each
            knot, for recent gaps and for gaps after answers of similar length. Shape (knots,).
    """

    recent: Array
    similar: Array


NO_PAST = Past(np.zeros(len(KNOTS)), np.zeros(len(KNOTS)))


class _Job:
    __slots__ = ("log_lengths", "ranks", "recent")

    def __init__(self) -> None:
        self.log_lengths = np.empty(0)
        self.ranks = np.empty((0, len(KNOTS)))
        self.recent = NO_PAST.recent


class JobHistory:
    """Ranks of the latest gaps of every job. Not thread-safe."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[JobKey, _Job] = OrderedDict()

    def past(self, turn: TurnEnd) -> Past:
        """Return the history of a turn's job at the end of the turn, or ``NO_PAST`` if the job is
        unknown. Changes nothing."""
        found = self._jobs.get(turn.job) if turn.job else None
        if found is None:
            return NO_PAST
        similar = _similar(found.log_lengths, _log_length(turn), found.ranks)
        return Past(found.recent, similar)

    def observe(self, turn: TurnEnd, at_knots: Array) -> None:
        """Add the gap after a turn. ``at_knots`` is the distribution of the gap's rank over the
        knots, with shape (knots,) and sum 1. A turn of an unknown job is ignored."""
        job = turn.job
        if job is None:
            return
        found = self._jobs.setdefault(job, _Job())
        self._jobs.move_to_end(job)
        found.log_lengths = np.append(found.log_lengths, _log_length(turn))[-MAX_GAPS:]
        found.ranks = np.vstack([found.ranks, at_knots])[-MAX_GAPS:]
        found.recent = _recent(found.ranks)
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)


def _similar(log_lengths: Array, log_length: float, ranks: Array) -> Array:
    off = (log_lengths - log_length) / SIMILAR_SIGMA
    return _view(_decays(SIMILAR_DECAY, len(ranks)) * np.exp(-off * off / 2), ranks)


def _recent(ranks: Array) -> Array:
    return _view(_decays(RECENT_DECAY, len(ranks)), ranks)


@cache
def _decays(decay: float, gaps: int) -> Array:
    """Return the weights of a job's latest gaps, oldest first. The latest gap has weight 1. Shape
    (gaps,)."""
    weights: Array = np.power(decay, np.arange(gaps, dtype=np.float64)[::-1])
    return weights


def _view(weights: Array, ranks: Array) -> Array:
    shares: Array = weights @ ranks
    shares += PRIOR_WEIGHT * EVEN
    shares /= (PRIOR_WEIGHT + weights.sum()) * EVEN
    return np.log(shares)


def _log_length(turn: TurnEnd) -> float:
    return math.log1p(max(turn.output_tokens, 0))
