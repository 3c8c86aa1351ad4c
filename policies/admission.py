"""Which new jobs may begin: those whose working set fits beside that of the jobs already begun.

vLLM admits whatever finds free blocks. With more jobs than fit, each job's KV is evicted before
its next turn, all of them compute their contexts again, and none ends. So a new job waits until
the highest demand that the others are heading for leaves room for it.

The forecast lets every job go on at the same pace, by so many blocks a turn, until it ends after
as many turns as jobs of its age had left. As some are slower than others, each is taken to stay
for a while after that: as much longer as turns differ in length. The highest total on the way is
reached just before some job goes, so only such moments are looked at.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from tiered_kv.policies.signals import JobKey

MOMENTS = 32
"""Looked at; of more, so many are taken evenly."""
JOBS = 256
"""Ended jobs whose numbers of turns are remembered."""
FORGETTING = 0.98
"""What a turn's growth still counts after the next one."""
MOST, LEAST = 1.25, 0.5
"""Bounds of the share of the pool that may be given out. More than all of it where the forecast
has been seen to ask for more than jobs then take."""
DOWN, UP = 0.9, 1.001
"""Factors of that share, for a context that was lost and for a job held beside free blocks. A lost
context is computed again while everybody waits, and a job that is held waits alone: so it falls a
hundred times faster than it rises."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a job is expected to take of the pool.

    Attributes:
        blocks: at the end of its present turn, or of its next if none runs; those that it
            shares with other jobs left out.
        grows: blocks more with every turn after that.
        left: turns after that.
        weight: how much of the time it needs them, 0 to 1: a job that waits in CPU memory needs
            them only while a turn of it runs.
    """

    blocks: float
    grows: float
    left: float
    weight: float = 1.0


class Demand:
    """What jobs are heading for together.

    Args:
        whole: as if every job needed its blocks all the time.
    """

    def __init__(self, shares: Iterable[Share], *, whole: bool = False) -> None:
        rows = []
        for one in shares:
            weight = 1.0 if whole else one.weight
            rows.append((weight * one.blocks, weight * one.grows, one.left))
        self._rows = np.array(rows, dtype=np.float64).reshape(-1, 3)

    def of_first(self, jobs: int) -> Demand:
        """What so many of them are heading for, the first ones."""
        demand = Demand(())
        demand._rows = self._rows[:jobs]
        return demand

    def peak(self, spread: float = 0.0, more: Collection[Share] = ()) -> float:
        """The most blocks that the jobs, and ``more`` of them, take at any time on their way.

        Args:
            spread: standard deviation of the time that a turn with its gap takes, over its mean.
        """
        rows = np.concatenate([self._rows, Demand(more)._rows]) if more else self._rows
        if not len(rows):
            return 0.0
        blocks, grows, left = rows.T
        stays = left + spread * np.sqrt(left)
        moments = np.append(np.unique(stays), 0.0)
        if len(moments) > MOMENTS:
            moments = moments[np.linspace(0, len(moments) - 1, MOMENTS).astype(int)]
        there = stays >= moments[:, None]
        totals = (blocks + grows * np.minimum(left, moments[:, None])) * there
        return float(totals.sum(axis=1).max())


class JobLengths:
    """How many turns a job still has, after those that ended lately."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] | None = None  # from each place on

    def ended(self, turns: int) -> None:
        """A job ended after so many turns."""
        if turns < 1:
            return
        if len(self._latest) >= JOBS:
            self._sorted.remove(self._latest.popleft())
        self._latest.append(turns)
        insort(self._sorted, turns)
        self._sums = None

    def left(self, turns: int) -> float:
        """Turns that follow the ``turns`` that have begun: the mean of the jobs that had more;
        as many again if there was none."""
        if self._sums is None:
            total, sums = 0, [0]
            for one in reversed(self._sorted):
                total += one
                sums.append(total)
            self._sums = sums[::-1]
        # Jobs that end here count too, with none left.
        at = bisect_right(self._sorted, turns - 1)
        count = len(self._sorted) - at
        if not count:
            return float(turns)
        return self._sums[at] / count - turns


class Growth:
    """Blocks that contexts gain with a turn, lately."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def observe(self, blocks: float) -> None:
        self._sum = FORGETTING * self._sum + max(0.0, blocks)
        self._weight = FORGETTING * self._weight + 1.0

    @property
    def mean(self) -> float:
        """0 before the first."""
        return self._sum / self._weight if self._weight else 0.0


class Course:
    """How a job goes on: for as many turns as those of its age had left, each of which adds the
    mean of what its own have added, the mean of all jobs' counted as one of them.

    Attributes:
        lengths: of jobs that ended. growth: of all contexts, in blocks a turn.
    """

    def __init__(self) -> None:
        self.lengths = JobLengths()
        self.growth = Growth()

    def ahead(self, job: JobKey, turns: int, grown: float) -> tuple[float, float]:
        """Of a job that has begun so many turns, and has grown by so many blocks since the first.

        Returns:
            Blocks that it grows with a turn, and turns after those that have begun.
        """
        return (grown + self.growth.mean) / max(1, turns), self.lengths.left(turns)


class Pace:
    """How evenly turns follow one another: times from one turn's arrival to the job's next."""

    def __init__(self) -> None:
        self._mean = self._square = 0.0

    def observe(self, seconds: float) -> None:
        keeps = FORGETTING if self._mean else 0.0
        self._mean += (1 - keeps) * (seconds - self._mean)
        self._square += (1 - keeps) * (seconds * seconds - self._square)

    @property
    def spread(self) -> float:
        """Standard deviation over mean; 0 before the second."""
        if self._mean <= 0:
            return 0.0
        return math.sqrt(max(0.0, self._square - self._mean**2)) / self._mean


class Allowance:
    """The share of the pool that jobs may be let in for. It begins at all of it, falls with every
    context that was evicted before its job returned, and rises with jobs that are held although
    blocks stay free, beyond all of it if need be."""

    def __init__(self) -> None:
        self.share = 1.0

    def lost(self) -> None:
        """A job's KV was no longer there, though it was to stay."""
        self.share = max(LEAST, self.share * DOWN)

    def spare(self) -> None:
        """A job is held, and more is free than it needs."""
        self.share = min(MOST, self.share * UP)
