"""Ranks of a job's own earlier gaps: its recent ones, and those after answers of similar length.

An agent's answers are mostly tool calls, and calls of one tool have similar lengths. So the length
of an answer tells which earlier gaps to compare with, even where no tool is named.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numba import float64  # type: ignore[import-untyped]
from numpy.typing import NDArray

from tiered_kv.policies.base import JobKey, TurnEnd

from .compiled import array, compiled
from .job_moments import RECENT_DECAY, Moments
from .ranks import EVEN, KNOTS

Array = NDArray[np.float64]

SIMILAR_DECAY = 0.97
"""Decay of a gap's weight with each later gap, among gaps after answers of similar length."""
SIMILAR_SIGMA = 0.3
"""Difference in log length at which two answers stop being similar."""
PRIOR_WEIGHT = 1.0
"""Weight of an evenly spread rank that every job starts with, in gaps."""
MAX_GAPS = 64
"""Gaps kept per job. Older ones would weigh almost nothing."""
MAX_JOBS = 4096
"""Jobs remembered, about 5 KiB each. The least recently active job is forgotten first."""


class Past(NamedTuple):
    """A job's history, as seen from the end of a turn.

    Attributes:
        recent, similar: log of how much more often than evenly the ranks fell at each knot, in the
            recent gaps and in those after answers of similar length. Shape (knots,).
        moments: what all turns of the job were like; may change with the job's next gap.
    """

    recent: Array
    similar: Array
    moments: Moments


NO_PAST = Past(np.zeros(len(KNOTS)), np.zeros(len(KNOTS)), Moments())


class _Job:
    __slots__ = ("log_lengths", "moments", "ranks", "recent")

    def __init__(self) -> None:
        self.moments = Moments()
        self.log_lengths = np.empty(0)
        self.ranks = np.empty((0, len(KNOTS)))
        self.recent = NO_PAST.recent


class JobHistory:
    """Ranks of every job's last gaps. Not thread-safe."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[JobKey, _Job] = OrderedDict()

    def past(self, turn: TurnEnd) -> Past:
        """Return the history of a turn's job, as seen from the turn's end. Does not mutate."""
        found = self._jobs.get(turn.job) if turn.job else None
        if found is None:
            return NO_PAST
        similar = _similar(found.log_lengths, _log_length(turn), found.ranks)
        return Past(found.recent, similar, found.moments)

    def observe(self, turn: TurnEnd, gap_s: float, at_knots: Array) -> None:
        """Add the gap after a turn, and its rank. ``at_knots``: shape (knots,), sum 1."""
        job = turn.job
        if job is None:
            return
        found = self._jobs.setdefault(job, _Job())
        self._jobs.move_to_end(job)
        found.moments.observe(turn, gap_s)
        found.log_lengths = np.append(found.log_lengths, _log_length(turn))[-MAX_GAPS:]
        found.ranks = np.vstack([found.ranks, at_knots])[-MAX_GAPS:]
        found.recent = _recent(found.ranks)
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)


_NUMBERS = array(float64, 1)
_RANKS = array(float64, 2)
_VIEW = array(float64, 1, written=True)


@compiled(_VIEW, _NUMBERS, float64, _RANKS)
def _similar(log_lengths: Array, log_length: float, ranks: Array) -> Array:
    shares = PRIOR_WEIGHT * EVEN
    total = PRIOR_WEIGHT
    for age in range(len(ranks)):
        gap = len(ranks) - 1 - age
        off = (log_lengths[gap] - log_length) / SIMILAR_SIGMA
        weight = SIMILAR_DECAY**age * np.exp(-off * off / 2)
        total += weight
        for knot in range(len(EVEN)):
            shares[knot] += weight * ranks[gap, knot]
    return np.log(shares / (total * EVEN))


@compiled(_VIEW, _RANKS)
def _recent(ranks: Array) -> Array:
    shares = PRIOR_WEIGHT * EVEN
    total = PRIOR_WEIGHT
    for age in range(len(ranks)):
        weight = RECENT_DECAY**age
        total += weight
        for knot in range(len(EVEN)):
            shares[knot] += weight * ranks[len(ranks) - 1 - age, knot]
    return np.log(shares / (total * EVEN))


def _log_length(turn: TurnEnd) -> float:
    return math.log1p(max(turn.output_tokens, 0))
