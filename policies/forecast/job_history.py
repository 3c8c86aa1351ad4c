"""What a job's own past says: lately, and after answers of about this length.

An agent's answers are mostly tool calls, and calls of one tool are about equally long, so the
length of an answer says which of the job's earlier gaps to look at even where no tool is named.
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

LATELY = 0.8
"""What a gap still counts after the next one, in the job's latest gaps."""
ALIKE = 0.97
"""The same, in the gaps after answers of about this length."""
ALIKE_SIGMA = 0.3
"""Two answers are alike if their lengths differ by about this factor, as a logarithm."""
PRIOR_WEIGHT = 1.0
"""Gaps spread evenly over the ranks that a job is taken to have had before its first."""
MAX_GAPS = 64
"""Of a job; more are forgotten by then, nearly."""
MAX_JOBS = 4096
"""Jobs remembered, about 5 KiB each. The one longest unheard of is forgotten first."""

_AGES = np.arange(MAX_GAPS)[::-1]
_WEIGHTS = np.stack([LATELY**_AGES, ALIKE**_AGES]).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Past:
    """A job's past, as seen from the end of a turn.

    Attributes:
        lately, alike: ln of how much more often than evenly the ranks fell at each knot, in
            the latest gaps and in those after answers of about this length. Shape (knots,).
        lately_weight, alike_weight: ln(1 + weight of these gaps).
    """

    lately: Array
    alike: Array
    lately_weight: float = 0.0
    alike_weight: float = 0.0


NO_PAST = Past(np.zeros(len(KNOTS)), np.zeros(len(KNOTS)))


class _Job:
    __slots__ = ("log_lengths", "ranks")

    def __init__(self) -> None:
        self.log_lengths = np.empty(0)
        self.ranks = np.empty((0, len(KNOTS)))


class JobHistory:
    """The last gaps of every job, by rank. One thread at a time."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[JobKey, _Job] = OrderedDict()

    def past(self, job: JobKey | None, output_tokens: int) -> Past:
        """Of a turn of that job with an answer of so many tokens. Changes nothing."""
        found = self._jobs.get(job) if job else None
        if found is None:
            return NO_PAST
        off = (found.log_lengths - math.log1p(max(output_tokens, 0))) / ALIKE_SIGMA
        weights = _WEIGHTS[:, -len(off) :].copy()
        weights[1] *= np.exp(-0.5 * off * off)
        totals = weights.sum(axis=1)
        shares = weights @ found.ranks
        shares += PRIOR_WEIGHT * EVEN
        shares /= (totals + PRIOR_WEIGHT)[:, None] * EVEN
        lately, alike = np.log(shares)
        lately_weight, alike_weight = np.log1p(totals).tolist()
        return Past(lately, alike, lately_weight, alike_weight)

    def observe(self, job: JobKey | None, output_tokens: int, at_knots: Array) -> None:
        """The gap after that turn had that rank. ``at_knots``: shape (knots,), sum 1."""
        if job is None:
            return
        found = self._jobs.setdefault(job, _Job())
        self._jobs.move_to_end(job)
        length = math.log1p(max(output_tokens, 0))
        found.log_lengths = np.append(found.log_lengths, length)[-MAX_GAPS:]
        found.ranks = np.vstack([found.ranks, at_knots])[-MAX_GAPS:]
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
