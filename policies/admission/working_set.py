"""Projection of the blocks that jobs need at the same time, their working set. A new job may start
if its blocks fit next to the blocks of the jobs that have already started.

vLLM admits every request that finds free blocks. With more jobs than fit, each job's KV is evicted
before its next turn, all jobs recompute their contexts, and none finishes. So a new job waits until
the projected peak demand of the others leaves space for it.

The forecast assumes that all jobs take turns at the same pace. Each job gains a fixed number of
blocks per turn, and ends after as many further turns as earlier jobs took from the same turn on.
Because some jobs are slower than others, each job is assumed to stay longer, by a margin that grows
with the spread of turn times. The total is highest just before a job ends, so only these moments
are evaluated.

Clients get equal shares. A client's contexts between turns must not keep out other clients' new
jobs (``FairShare``), and its requests and pins must not keep out other clients' requests
(``EqualShare``). The module uses no I/O and no clock. Some classes learn from observations.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered_kv.policies.base import JobKey
from tiered_kv.policies.jobs.silence import SOON_S

Array = NDArray[np.float64]

MOMENTS = 32
"""Maximum number of moments at which the demand is evaluated. If more jobs end at different
moments, ``MOMENTS`` of these are sampled evenly."""
CHUNK = 64
"""Number of jobs in a chunk. The sums of the demands of all preceding chunks are cached."""
JOBS = 256
"""Number of finished jobs whose lengths are kept."""
GROWTH_DECAY = 0.98
"""Factor by which the weight of an observed growth, or of an observed time between turns, decays
with each later observation."""
MOST, LEAST = 1.25, 0.5
"""Upper and lower bound of the fraction of the pool that may be committed to jobs. The fraction
exceeds 1 if jobs used fewer blocks than forecast."""
UP = 1.001
"""Factor applied to the fraction of the pool that may be committed, for each second in which a job
is held back despite free blocks."""
LEARN_EVERY_S = 1.0
"""Minimum time between two increases of that fraction, seconds. A job that is held back may be
reconsidered more often than that, because each start or end of another job triggers it."""


class JobDemand(NamedTuple):
    """Expected demand of a job.

    Attributes:
        blocks: unshared blocks of its context at the end of its current turn, or of its next turn
            if none runs.
        grows: growth with every later turn, blocks.
        left: number of turns after that turn.
        weight: fraction of the time in which VRAM must hold these blocks, 0 to 1. A job whose KV
            waits in CPU memory needs VRAM only while a turn runs.
        chance: probability that the job needs its blocks at all.
        shared: blocks that the job shares with other jobs, if they are counted for this job.
    """

    blocks: float
    grows: float
    left: float
    weight: float = 1.0
    chance: float = 1.0
    shared: float = 0.0


NO_DEMAND = JobDemand(0.0, 0.0, 0.0)


class Blocks(NamedTuple):
    """Expected numbers of blocks.

    Attributes:
        vram: blocks of VRAM.
        anywhere: blocks of VRAM and CPU memory together.
    """

    vram: float = 0.0
    anywhere: float = 0.0


NOTHING = Blocks()


def most_of(demand: JobDemand) -> Blocks:
    """Return upper bounds of the blocks that a job takes at any time."""
    blocks, grows, left, weight, chance, shared = demand
    whole = max(0.0, blocks + grows * left)
    return Blocks(weight * whole + shared, chance * whole + shared)


class Demand:
    """Projected demand of all jobs together, oldest first.

    The cost of a query, and of adding or changing a job, does not depend on the number of jobs. The
    effect of a change on the peak is computed only when the peak is queried, because the upper
    bounds ``most`` often suffice.

    Args:
        jobs: demand of each job.
        spread: standard deviation of the time of a turn with its gap, divided by its mean.

    Attributes:
        most: upper bounds of the peak, in VRAM and anywhere.
    """

    def __init__(self, jobs: Sequence[JobDemand] = (), spread: float = 0.0) -> None:
        self._jobs = list(jobs)
        self._changed: dict[int, None] = {}  # positions whose rows are not up to date
        self._spread = spread
        flat = chain.from_iterable(jobs)
        given = np.fromiter(flat, np.float64, 6 * len(jobs)).reshape(-1, 6)
        blocks, grows, left, weight, chance, shared = given.T
        whole = np.maximum(0.0, blocks + grows * left)
        sums = (weight @ whole + shared.sum(), chance @ whole + shared.sum())
        self.most = Blocks(*map(float, sums))
        moments = np.append(np.unique(self._stays(given[:, 2])), 0.0)
        if len(moments) > MOMENTS:
            moments = moments[np.linspace(0, len(moments) - 1, MOMENTS).astype(int)]
        self._moments = moments
        # One row per job: its demand of VRAM at every moment, then its demand anywhere.
        self._rows = np.zeros((len(jobs) + CHUNK, 2 * len(moments)))
        for at in range(0, len(jobs), CHUNK):  # small arrays stay in the processor's cache
            chunk = slice(at, min(at + CHUNK, len(jobs)))
            self._fill(self._rows[chunk], given[chunk].T[:, :, None])
        self._latest = NO_DEMAND, np.zeros(2 * len(moments))
        self._sum_up()

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, place: int, demand: JobDemand) -> None:
        """Set the demand of the job at position ``place``, counted from 0. If ``place`` is the
        number of jobs, append a job."""
        before = NO_DEMAND
        if place == len(self._jobs):
            self._jobs.append(demand)
        else:
            before, self._jobs[place] = self._jobs[place], demand
        (vram, anywhere), less, more = self.most, most_of(before), most_of(demand)
        self.most = Blocks(vram - less.vram + more.vram, anywhere - less.anywhere + more.anywhere)
        self._changed[place] = None

    def _update_rows(self) -> None:
        """Compute the rows of the jobs that changed."""
        places = list(self._changed)
        self._changed.clear()
        if len(self._jobs) > len(self._rows):
            more = np.zeros((len(self._jobs) - len(self._rows) + CHUNK, self._rows.shape[1]))
            self._rows = np.concatenate([self._rows, more])
            self._sum_up()
        given = np.array([self._jobs[place] for place in places])
        rows = np.empty((len(places), self._rows.shape[1]))
        self._fill(rows, given.T[:, :, None])
        for place, change in zip(places, rows - self._rows[places], strict=True):
            self._sums[place // CHUNK + 1 :] += change
        self._rows[places] = rows

    def peak(
        self, more: JobDemand | None = None, *, first: int | None = None, anywhere: bool = False
    ) -> float:
        """Return the highest number of blocks that the jobs take at any time. Shared blocks count
        once.

        Args:
            more: an additional job.
            first: number of jobs to include, oldest first; None for all.
            anywhere: True to count blocks in VRAM and CPU memory; False for VRAM only.
        """
        if self._changed:
            self._update_rows()
        totals, count = self._until(first), len(self._moments)
        if more is not None:
            totals = totals + self._row_of(more)
        return float(totals[count * anywhere : count * (anywhere + 1)].max())

    def _until(self, first: int | None) -> Array:
        if first is None:
            whole: Array = self._sums[-1]
            return whole
        chunk = first // CHUNK
        found: Array = self._sums[chunk] + self._rows[chunk * CHUNK : first].sum(axis=0)
        return found

    def _sum_up(self) -> None:
        """Compute the sums of all preceding chunks for each chunk, and the total."""
        chunks = [
            self._rows[at : at + CHUNK].sum(axis=0) for at in range(0, len(self._rows), CHUNK)
        ]
        self._sums = np.cumsum([np.zeros_like(self._rows[0]), *chunks], axis=0)

    def _stays(self, left: Any) -> Any:
        return left + self._spread * np.sqrt(left)

    def _row_of(self, demand: JobDemand) -> Array:
        """Return the row of one job. The last row is cached, because the peaks in VRAM and in all
        memory are queried with the same demand."""
        tested, row = self._latest
        if demand is not tested:
            row = np.empty(2 * len(self._moments))
            self._fill(row, demand)
            self._latest = demand, row
        return row

    def _fill(self, rows: Array, demands: JobDemand | Array) -> None:
        """Compute the rows of ``demands``, and write them to ``rows``."""
        blocks, grows, left, weight, chance, shared = demands
        there = self._stays(left) >= self._moments
        whole = (blocks + grows * np.minimum(left, self._moments)) * there
        count = len(self._moments)
        for part, fraction in ((rows[..., :count], weight), (rows[..., count:], chance)):
            np.multiply(fraction, whole, out=part)
            part += shared


class JobLengths:
    """Estimator of the number of turns that a job has left, from the lengths of recently finished
    jobs."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] | None = None  # sums from each position on

    def ended(self, turns: int) -> None:
        """Record that a job ended after ``turns`` turns. Numbers below 1 are ignored."""
        if turns < 1:
            return
        if len(self._latest) >= JOBS:
            self._sorted.remove(self._latest.popleft())
        self._latest.append(turns)
        insort(self._sorted, turns)
        self._sums = None

    def left(self, turns: int) -> float:
        """Return the expected number of further turns of a job that has started ``turns`` turns:
        the mean over finished jobs with at least ``turns`` turns; ``turns`` if there are none."""
        if self._sums is None:
            total, sums = 0, [0]
            for one in reversed(self._sorted):
                total += one
                sums.append(total)
            self._sums = sums[::-1]
        # Jobs with exactly this many turns count too, with no turns left.
        at = bisect_right(self._sorted, turns - 1)
        count = len(self._sorted) - at
        if not count:
            return float(turns)
        return self._sums[at] / count - turns


class Growth:
    """Moving average of the number of blocks that contexts gain per turn."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def observe(self, blocks: float) -> None:
        self._sum = GROWTH_DECAY * self._sum + max(0.0, blocks)
        self._weight = GROWTH_DECAY * self._weight + 1.0

    @property
    def mean(self) -> float:
        """Mean growth, blocks per turn; 0 before the first observation."""
        return self._sum / self._weight if self._weight else 0.0


class JobForecast:
    """Forecast of a job's length and growth. A job is expected to take as many further turns as
    finished jobs took from the same turn on. Each turn is expected to add the job's mean growth, in
    which the mean growth of all jobs counts as one more turn.

    Attributes:
        lengths: lengths of finished jobs, turns.
        growth: growth of all contexts, blocks per turn.
    """

    def __init__(self) -> None:
        self.lengths = JobLengths()
        self.growth = Growth()

    def ahead(self, job: JobKey, turns: int, grown: float) -> tuple[float, float]:
        """Forecast one job.

        Args:
            turns: number of turns that the job has started.
            grown: growth of its context since the first turn, blocks.

        Returns:
            Growth per turn in blocks, and number of further turns.
        """
        return (grown + self.growth.mean) / max(1, turns), self.lengths.left(turns)


class TurnCadence:
    """Mean and spread of the time between the arrivals of a job's consecutive turns."""

    def __init__(self) -> None:
        self._mean = self._square = 0.0

    def observe(self, seconds: float) -> None:
        keeps = GROWTH_DECAY if self._mean else 0.0
        self._mean += (1 - keeps) * (seconds - self._mean)
        self._square += (1 - keeps) * (seconds * seconds - self._square)

    @property
    def spread(self) -> float:
        """Standard deviation divided by the mean; 0 before the second observation."""
        if self._mean <= 0:
            return 0.0
        return math.sqrt(max(0.0, self._square - self._mean**2)) / self._mean


class Overcommit:
    """Fraction of the pool that may be committed to jobs.

    The fraction starts at 1. When a job returns and part of its context was evicted, the fraction
    falls by the size of that part relative to the pool. Contexts that are found complete raise the
    fraction towards 1: together, contexts with as many blocks as the pool close about 1 - 1/e of
    the distance to 1. So the fraction settles where gains and losses are equal. Jobs that are held
    back despite free blocks raise it slowly, above 1 if necessary.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._raised_at = -math.inf

    def returned(self, found: float, lost: float) -> None:
        """Record a returning job whose context was meant to be kept.

        Args:
            found: the part of the context that still existed, as a fraction of the pool.
            lost: the part that did not exist any more, as a fraction of the pool.
        """
        if lost:
            self.share = max(LEAST, self.share - lost)
        elif self.share < 1.0:
            self.share += (1.0 - self.share) * min(1.0, found)

    def spare(self, now: float) -> None:
        """Record that a job is held back at time ``now`` (monotonic seconds) although more blocks
        are free than it needs."""
        if now - self._raised_at >= LEARN_EVERY_S:
            self._raised_at = now
            self.share = min(MOST, self.share * UP)


@dataclass(frozen=True, slots=True)
class FairShare:
    """Excess of clients: the blocks of their jobs between turns, beyond an equal share of the
    space for each client.

    Attributes:
        over: excess of each client.
        total: excess of all clients.
    """

    over: Mapping[str, Blocks] = field(default_factory=dict)
    total: Blocks = NOTHING

    @classmethod
    def of(cls, waiting: Mapping[str, Blocks], room: Blocks) -> FairShare:
        """Compute the excess of each client. The share of a single client is half of the space,
        because another client may arrive at any time.

        Args:
            waiting: expected demand of each client's unpinned jobs between turns. Clients that only
                have other jobs are included with no demand.
            room: size of VRAM, and of VRAM and CPU memory together, blocks.
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
        """Return the excess of all clients except ``client``, blocks. These blocks do not count
        when ``client`` needs space.

        Args:
            anywhere: True for VRAM and CPU memory; False for VRAM only.
        """
        own = self.over.get(client, NOTHING)
        return self.total[anywhere] - own[anywhere]


@dataclass(frozen=True, slots=True)
class ClientUse:
    """A client's use of the engine.

    Attributes:
        contexts: number of its running requests and pins.
        blocks: number of their blocks.
    """

    contexts: int = 0
    blocks: float = 0.0

    def plus(self, blocks: float) -> ClientUse:
        """Return the use with one more context, which has ``blocks`` blocks."""
        return ClientUse(self.contexts + 1, self.blocks + blocks)


@dataclass(frozen=True, slots=True)
class EqualShare:
    """The part of an engine that each client may use while other clients' requests wait. A client
    with a single context is always within its share.

    Attributes:
        seats: number of running requests and pins per client; may be fractional.
        blocks: number of blocks per client.
    """

    seats: float
    blocks: float

    @classmethod
    def of(cls, seats: float, blocks: int, clients: int) -> EqualShare:
        """Divide an engine among its clients.

        Args:
            seats: maximum number of running requests.
            blocks: size of the pool, blocks.
            clients: number of clients that have requests or pins.
        """
        return cls(seats / clients, blocks / clients)

    def excess(self, use: ClientUse) -> float:
        """Return the ratio of a client's use to its share, for seats or for blocks, whichever ratio
        is larger; 0 if the client is within its share."""
        times = max(use.contexts / self.seats, use.blocks / self.blocks)
        return times if times > 1 and use.contexts > 1 else 0.0

    def fills_pool(self, use: ClientUse) -> bool:
        """True if a client has more than its share of the pool's blocks."""
        return use.contexts > 1 and use.blocks > self.blocks


PACE_DECAY = 0.9
"""Weight of the old mean when a new time is averaged in."""


class TurnPace:
    """Moving averages of the duration of a turn and of a gap, over all jobs.

    Attributes:
        turn_s: mean time of a turn, seconds; 0 before the first turn.
        served_s: mean time of a turn without its wait for the first blocks, seconds.
        gap_s: mean gap, seconds; each gap counts as at most ``SOON_S``.
    """

    def __init__(self) -> None:
        self.turn_s = self.served_s = self.gap_s = 0.0

    @property
    def cycle_s(self) -> float:
        """Mean time from a turn's first blocks to the job's next turn, seconds."""
        return self.served_s + self.gap_s

    def on_turn(self, seconds: float, served_s: float) -> None:
        """Add a finished turn that took ``seconds``. It had blocks for ``served_s`` seconds."""
        self.turn_s = _mean(self.turn_s, seconds)
        self.served_s = _mean(self.served_s, served_s)

    def on_gap(self, seconds: float) -> None:
        """Add a gap of ``seconds`` that ended with the job's next turn."""
        self.gap_s = _mean(self.gap_s, min(seconds, SOON_S))

    def vram_share(self, away_s: float) -> float:
        """Return the fraction of a cycle in which a job needs VRAM. The cycle lasts from the end of
        the job's last turn to the end of its next turn, and only the turn needs VRAM. Returns 1
        before the first turn was observed.

        Args:
            away_s: time since its last turn ended, seconds; 0 at the start of a gap.
        """
        cycle_s = self.turn_s + max(self.gap_s, away_s)
        return self.turn_s / cycle_s if self.turn_s else 1.0


def running_demand(blocks: float, grows: float, left: float, shared: float) -> JobDemand:
    """Return the demand of a job with a running turn, which needs its whole context in VRAM.

    Args:
        blocks: unshared blocks of its context at the end of the turn.
        grows: growth with every later turn, blocks.
        left: number of later turns.
        shared: blocks that the job shares with other jobs, if they are counted for this job.
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
    """Return the demand of a job between two turns. The next turn counts as its current turn.

    Args:
        blocks: unshared blocks of its context.
        grows: growth with every turn, blocks.
        left: number of further turns, including the next turn.
        shared: blocks that the job shares with other jobs, if they are counted for this job.
        chance: probability that it returns soon.
        weight: fraction of its blocks that VRAM must hold on average: ``chance`` times the fraction
            of the time in which the job needs VRAM, which is 1 if its KV is pinned.
    """
    return JobDemand(blocks + grows, grows, max(0.0, left - 1), weight, chance, shared)


def mean_context(demand: JobDemand) -> float:
    """Return the mean number of blocks of a job's context over its remaining turns."""
    return demand.blocks + demand.grows * demand.left / 2


def _mean(old: float, new: float) -> float:
    return PACE_DECAY * old + (1 - PACE_DECAY) * new if old else new
