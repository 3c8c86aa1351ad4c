"""Ranks of a job's own earlier gaps: its recent ones, and those after answers of similar length.

An agent's answers are mostly tool calls, and calls of one tool have similar lengths. So the length
of an answer tells which earlier gaps to compare with, even where no tool is named.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiered_kv.policies.base import JobKey

from .ranks import EVEN, KNOTS

Array = NDArray[np.float64]

RECENT_DECAY = 0.8
"""Decay of a gap's weight with each later gap, among the job's recent gaps."""
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

_AGES = np.arange(MAX_GAPS)[::-1]
_WEIGHTS = np.stack([RECENT_DECAY**_AGES, SIMILAR_DECAY**_AGES]).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Past:
    """A job's history, as seen from the end of a turn.

    Attributes:
        recent, similar: log of how much more often than evenly the ranks fell at each knot, in the
            recent gaps and in those after answers of similar length. Shape (knots,).
        recent_weight, similar_weight: ln(1 + weight of these gaps).
    """

    recent: Array
    similar: Array
    recent_weight: float = 0.0
    similar_weight: float = 0.0


NO_PAST = Past(np.zeros(len(KNOTS)), np.zeros(len(KNOTS)))


class _Job:
    __slots__ = ("log_lengths", "ranks")

    def __init__(self) -> None:
        self.log_lengths = np.empty(0)
        self.ranks = np.empty((0, len(KNOTS)))


class JobHistory:
    """Ranks of every job's last gaps. Not thread-safe."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[JobKey, _Job] = OrderedDict()

    def past(self, job: JobKey | None, output_tokens: int) -> Past:
        """Return the job's history for a turn with an answer of ``output_tokens``. Does not
        mutate."""
        found = self._jobs.get(job) if job else None
        if found is None:
            return NO_PAST
        off = (found.log_lengths - math.log1p(max(output_tokens, 0))) / SIMILAR_SIGMA
        weights = _WEIGHTS[:, -len(off) :].copy()
        weights[1] *= np.exp(-0.5 * off * off)
        totals = weights.sum(axis=1)
        shares = weights @ found.ranks
        shares += PRIOR_WEIGHT * EVEN
        shares /= (totals + PRIOR_WEIGHT)[:, None] * EVEN
        recent, similar = np.log(shares)
        recent_weight, similar_weight = np.log1p(totals).tolist()
        return Past(recent, similar, recent_weight, similar_weight)

    def observe(self, job: JobKey | None, output_tokens: int, at_knots: Array) -> None:
        """Add the rank of the gap after a turn. ``at_knots``: shape (knots,), sum 1."""
        if job is None:
            return
        found = self._jobs.setdefault(job, _Job())
        self._jobs.move_to_end(job)
        length = math.log1p(max(output_tokens, 0))
        found.log_lengths = np.append(found.log_lengths, length)[-MAX_GAPS:]
        found.ranks = np.vstack([found.ranks, at_knots])[-MAX_GAPS:]
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
