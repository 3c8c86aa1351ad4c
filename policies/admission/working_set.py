"""The working set of jobs: a new one may begin if its own fits beside those already started.

vLLM admits whatever finds free blocks. With more jobs than fit, each job's KV is evicted before
its next turn, all of them compute their contexts again, and none ends. So a new job waits until
the highest demand that the others are heading for leaves room for it.

The forecast lets every job go on at the same pace, by so many blocks a turn, until it ends after
as many turns as jobs of its age had left. As some are slower than others, each is taken to stay
for a while after that: as much longer as turns differ in length. The highest total on the way is
reached just before some job goes, so only such moments are looked at.

Clients get equal shares: contexts that one leaves waiting must not keep the new jobs of others out
(``FairShare``), nor its requests and pins the requests of others (``EqualShare``). Pure but for
``TurnPace``, which learns.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered_kv.policies.base import JobKey
from tiered_kv.policies.jobs.silence import SOON_S

Array = NDArray[np.float64]

MOMENTS = 32
"""Looked at; of more, so many are taken evenly."""
CHUNK = 64
"""Jobs that are added up together."""
JOBS = 256
"""Ended jobs whose numbers of turns are remembered."""
GROWTH_DECAY = 0.98
"""Weight of a turn's growth after the next one."""
MOST, LEAST = 1.25, 0.5
"""Bounds of the share of the pool that may be given out. More than all of it where the forecast
has been seen to ask for more than jobs then take."""
UP = 1.001
"""Factor of that share for a second in which a job is held beside free blocks."""
LEARN_EVERY_S = 1.0
"""Time between two rises of it: a job is looked at more often while others come and go."""


class JobDemand(NamedTuple):
    """Expected demand of a job.

    Attributes:
        blocks: unshared blocks of its context at the end of its present turn, or of its next if
            none runs.
        grows: growth with every turn after that, blocks.
        left: number of turns after that.
        weight: share of the time that it needs them in VRAM, 0 to 1: a job that waits in CPU
            memory needs them only while a turn of it runs.
        chance: probability that it needs them at all.
        shared: blocks that it shares with others, counted with one of these.
    """

    blocks: float
    grows: float
    left: float
    weight: float = 1.0
    chance: float = 1.0
    shared: float = 0.0


class Demand:
    """Projected demand of all jobs together, the oldest first.

    A question costs the same however many there are; so does a job that changes, comes or goes.

    Args:
        jobs: demand of each job.
        spread: standard deviation of the time that a turn with its gap takes, over its mean.
    """

    def __init__(self, jobs: Sequence[JobDemand] = (), spread: float = 0.0) -> None:
        self._len = len(jobs)
        self._spread = spread
        given = np.array(jobs, dtype=np.float64).reshape(-1, 6)
        moments = np.append(np.unique(self._stays(given[:, 2])), 0.0)
        if len(moments) > MOMENTS:
            moments = moments[np.linspace(0, len(moments) - 1, MOMENTS).astype(int)]
        self._moments = moments
        # A row for each job: in VRAM at every moment, and the same anywhere.
        self._rows = np.zeros((self._len + CHUNK, 2 * len(moments)))
        self._rows[: self._len] = self._rows_of(given)
        self._sum_up()

    def __len__(self) -> int:
        return self._len

    def put(self, place: int, demand: JobDemand) -> None:
        """The job at that place, or a new one behind the last, is expected to take this."""
        if place == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows[:CHUNK])])
            self._sum_up()
        row = self._rows_of(np.array([demand], dtype=np.float64))[0]
        self._sums[place // CHUNK + 1 :] += row - self._rows[place]
        self._rows[place] = row
        self._len = max(self._len, place + 1)

    def peak(
        self, more: JobDemand | None = None, *, first: int | None = None, anywhere: bool = False
    ) -> float:
        """The most blocks that the jobs take at any time on their way, those that they share
        counted once.

        Args:
            more: another job beside them.
            first: of so many jobs only, the first ones.
            anywhere: in VRAM or outside it.
        """
        totals, count = self._until(first), len(self._moments)
        if more is not None:
            totals = totals + self._rows_of(np.array([more], dtype=np.float64))[0]
        return float(totals[count * anywhere : count * (anywhere + 1)].max())

    def _until(self, first: int | None) -> Array:
        if first is None:
            whole: Array = self._sums[-1]
            return whole
        chunk = first // CHUNK
        found: Array = self._sums[chunk] + self._rows[chunk * CHUNK : first].sum(axis=0)
        return found

    def _sum_up(self) -> None:
        """Sums of all chunks before each, and of all."""
        chunks = [
            self._rows[at : at + CHUNK].sum(axis=0) for at in range(0, len(self._rows), CHUNK)
        ]
        self._sums = np.cumsum([np.zeros_like(self._rows[0]), *chunks], axis=0)

    def _stays(self, left: Array) -> Array:
        stays: Array = left + self._spread * np.sqrt(left)
        return stays

    def _rows_of(self, given: Array) -> Array:
        blocks, grows, left, weight, chance, shared = given.T[:, :, None]
        there = self._stays(left) >= self._moments
        whole = (blocks + grows * np.minimum(left, self._moments)) * there
        return np.concatenate([weight * whole + shared, chance * whole + shared], axis=1)


class JobLengths:
    """Number of turns that a job still has, by the jobs that ended lately."""

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
        """Turns that follow the ``turns`` that have started: the mean of the jobs that had more;
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
        self._sum = GROWTH_DECAY * self._sum + max(0.0, blocks)
        self._weight = GROWTH_DECAY * self._weight + 1.0

    @property
    def mean(self) -> float:
        """0 before the first."""
        return self._sum / self._weight if self._weight else 0.0


class JobForecast:
    """Forecast of a job: it goes on for as many turns as jobs of its age had left. Each adds the
    mean of the turns it had, with the mean of all jobs counted as one of them.

    Attributes:
        lengths: lengths of jobs that ended, turns.
        growth: growth of all contexts, blocks a turn.
    """

    def __init__(self) -> None:
        self.lengths = JobLengths()
        self.growth = Growth()

    def ahead(self, job: JobKey, turns: int, grown: float) -> tuple[float, float]:
        """Forecast of one job.

        Args:
            turns: turns that it has started.
            grown: growth since the first, blocks.

        Returns:
            Growth with a turn in blocks, and number of turns after those that have started.
        """
        return (grown + self.growth.mean) / max(1, turns), self.lengths.left(turns)


class TurnCadence:
    """Regularity of turns: times from one turn's arrival to the job's next."""

    def __init__(self) -> None:
        self._mean = self._square = 0.0

    def observe(self, seconds: float) -> None:
        keeps = GROWTH_DECAY if self._mean else 0.0
        self._mean += (1 - keeps) * (seconds - self._mean)
        self._square += (1 - keeps) * (seconds * seconds - self._square)

    @property
    def spread(self) -> float:
        """Standard deviation over mean; 0 before the second."""
        if self._mean <= 0:
            return 0.0
        return math.sqrt(max(0.0, self._square - self._mean**2)) / self._mean


class Overcommit:
    """The share of the pool that jobs may be let in for.

    It begins at all of it and falls by what was evicted before its job returned. Contexts that are
    found whole bring it back: a pool of them by 1 - 1/e of what is missing, so that it settles
    where as much recovers as is lost. Jobs that are held although blocks stay free raise it slowly,
    beyond all of the pool if need be.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._raised_at = -math.inf

    def returned(self, found: float, lost: float) -> None:
        """A context that was to stay for its job: shares of the pool that were, and were not,
        still there."""
        if lost:
            self.share = max(LEAST, self.share - lost)
        elif self.share < 1.0:
            self.share += (1.0 - self.share) * min(1.0, found)

    def spare(self, now: float) -> None:
        """A job is held, and more is free than it needs.

        Args:
            now: monotonic seconds.
        """
        if now - self._raised_at >= LEARN_EVERY_S:
            self._raised_at = now
            self.share = min(MOST, self.share * UP)


class Blocks(NamedTuple):
    """Expected blocks.

    Attributes:
        vram: blocks of VRAM.
        anywhere: blocks of VRAM and CPU memory.
    """

    vram: float = 0.0
    anywhere: float = 0.0


NOTHING = Blocks()


@dataclass(frozen=True, slots=True)
class FairShare:
    """Blocks that clients leave waiting beyond an equal share of the room each.

    Attributes:
        over: those of each client.
        total: those of all clients.
    """

    over: Mapping[str, Blocks] = field(default_factory=dict)
    total: Blocks = NOTHING

    @classmethod
    def of(cls, waiting: Mapping[str, Blocks], room: Blocks) -> FairShare:
        """Compare clients with their shares. A client that is alone gets half of the room: the
        next one may come at any time.

        Args:
            waiting: expected demand of each client's jobs that are away and unpinned; a client
                without any counts as well if it has jobs.
            room: blocks of VRAM, and anywhere.
        """
        clients = max(2, len(waiting))
        vram, anywhere = (blocks / clients for blocks in room)
        over = {
            salt: Blocks(max(0.0, one.vram - vram), max(0.0, one.anywhere - anywhere))
            for salt, one in waiting.items()
        }
        total = Blocks(
            sum(one.vram for one in over.values()), sum(one.anywhere for one in over.values())
        )
        return cls(over, total)

    def of_others(self, client: str, *, anywhere: bool) -> float:
        """Blocks that do not count when that client asks for room: what the others leave waiting
        beyond their shares."""
        own = self.over.get(client, NOTHING)
        return self.total[anywhere] - own[anywhere]


@dataclass(frozen=True, slots=True)
class ClientUse:
    """Use that a client makes of the engine.

    Attributes:
        contexts: its running requests and pins.
        blocks: their blocks.
    """

    contexts: int = 0
    blocks: float = 0.0

    def plus(self, blocks: float) -> ClientUse:
        """Return the use with one context more, of that many blocks."""
        return ClientUse(self.contexts + 1, self.blocks + blocks)


@dataclass(frozen=True, slots=True)
class EqualShare:
    """Share of each client while others wait. A single context is always within it.

    Attributes:
        seats: requests that may run.
        blocks: blocks of the pool.
    """

    seats: float
    blocks: float

    @classmethod
    def of(cls, seats: float, blocks: int, clients: int) -> EqualShare:
        """Divide an engine among its clients.

        Args:
            seats: most requests that the engine runs at the same time.
            blocks: blocks of its pool.
            clients: number of clients that have requests or pins.
        """
        return cls(seats / clients, blocks / clients)

    def excess(self, use: ClientUse) -> float:
        """Return how many times its share a client has, of the seats or of the pool; 0 if it is
        within its share."""
        times = max(use.contexts / self.seats, use.blocks / self.blocks)
        return times if times > 1 and use.contexts > 1 else 0.0

    def fills_pool(self, use: ClientUse) -> bool:
        """True if a client has more than its share of the pool."""
        return use.contexts > 1 and use.blocks > self.blocks


PACE_DECAY = 0.9
"""Weight of the old mean when a new time is averaged in."""


class TurnPace:
    """Mean time of a turn, and of the gap between two, over all jobs.

    Attributes:
        turn_s: seconds; 0 before the first.
        served_s: the same without the wait for the first blocks.
        gap_s: the same of gaps, of which none counts for more than ``SOON_S``.
    """

    def __init__(self) -> None:
        self.turn_s = self.served_s = self.gap_s = 0.0

    @property
    def cycle_s(self) -> float:
        """Mean time from a turn's first blocks to the job's next turn, seconds."""
        return self.served_s + self.gap_s

    def on_turn(self, seconds: float, served_s: float) -> None:
        """Add a turn that ended, of which it had blocks for ``served_s``."""
        self.turn_s = _mean(self.turn_s, seconds)
        self.served_s = _mean(self.served_s, served_s)

    def on_gap(self, seconds: float) -> None:
        """Add a gap that ended with the job's return."""
        self.gap_s = _mean(self.gap_s, min(seconds, SOON_S))

    def vram_share(self, away_s: float) -> float:
        """Share of the time until its next turn has ended in which a job needs VRAM. It needs it
        while a turn runs.

        Args:
            away_s: time since its last turn ended, seconds; 0 for a whole gap to come.
        """
        cycle_s = self.turn_s + max(self.gap_s, away_s)
        return self.turn_s / cycle_s if self.turn_s else 1.0


def running_demand(blocks: float, grows: float, left: float, shared: float) -> JobDemand:
    """Demand of a job of which a turn runs: its whole context.

    Args:
        blocks: unshared blocks of its context at the end of the turn.
        grows: growth with every turn after that, blocks.
        left: number of turns after that.
        shared: blocks that it counts for its family.
    """
    return JobDemand(blocks, grows, left, 1.0, 1.0, shared)


def away_demand(
    blocks: float,
    grows: float,
    left: float,
    shared: float,
    chance: float,
    weight: float,
) -> JobDemand:
    """Demand of a job between two turns, of which the next one counts as the present.

    Args:
        blocks: unshared blocks of its context.
        grows: growth with every turn, blocks.
        left: number of turns after the last.
        shared: blocks that it counts for its family.
        chance: that it returns soon.
        weight: share of its blocks that VRAM must have on average: the chance to return, times
            the share of the time in which it then needs them (all of it under a pin).
    """
    return JobDemand(blocks + grows, grows, max(0.0, left - 1), weight, chance, shared)


def mean_context(demand: JobDemand) -> float:
    """Blocks of a job's context in the mean of the turns that it still has."""
    return demand.blocks + demand.grows * demand.left / 2


def _mean(old: float, new: float) -> float:
    return PACE_DECAY * old + (1 - PACE_DECAY) * new if old else new
