"""The jobs that have started, and the projected peak of the blocks that they need.

A job has *started* once one of its turns was allocated blocks. From then on each of its turns
*runs* from its arrival to its end. A job that started earlier is *older*. A job that may have ended
(its client disconnected, or has been silent for long) is *dormant*, and takes no space. When it
returns, it counts as started, and as the youngest job. Blocks that jobs share are counted once.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.connectors.runtime.pins.pin_table import PinTable
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.policies.admission.working_set import (
    NO_DEMAND,
    NOTHING,
    Blocks,
    Demand,
    FairShare,
    Growth,
    JobDemand,
    JobForecast,
    TurnCadence,
    TurnPace,
    away_demand,
    most_of,
    running_demand,
)
from tiered_kv.policies.base import JobKey
from tiered_kv.policies.distribution import Forecast
from tiered_kv.policies.jobs.silence import ReturnRate, soon_chance

LEAST_CHANCE, LEAST_SILENCE_S = 0.05, 30.0
"""A job is presumed to have ended, until it returns, if it has been silent for ``LEAST_SILENCE_S``
seconds and the chance that it needs its blocks soon is below ``LEAST_CHANCE``."""
SILENT_TIMES = 8.0
"""A job without a gap forecast and without a pin is presumed to have ended after a silence of this
many mean gaps (``TurnPace.gap_s``), but not before ``LEAST_SILENCE_S``."""

MOST_SILENT = 1024
"""Maximum number of dormant jobs kept per client, and maximum number of clients. The job that has
been away longest, or the client that has been inactive longest, is forgotten first."""
SILENT_OF_ALL = 8192
"""Maximum number of dormant jobs in total, divided equally among the clients, because one client
can invent any number of salts."""


@dataclass(slots=True)
class ActiveJob:
    """A job that has started.

    Attributes:
        turns: number of turns started.
        running: number of turns running now.
        blocks: unshared blocks of its context at the end of the current or last turn.
        shared: number of blocks that it found in VRAM when it started.
        start: hash of its first block, which is the same for all jobs that share blocks with it;
            empty if ``shared`` is 0.
        asked: when its last turn arrived, seconds.
        since: when its last finished turn ended, seconds; until then, when the job started.
        ended: unshared blocks of its context when its last turn ended; 0 until then.
        grown: number of blocks that its turns after the first have added.
    """

    turns: int
    running: int
    blocks: float
    shared: int
    start: bytes
    asked: float
    since: float
    ended: float = 0.0
    grown: float = 0.0


@dataclass(slots=True)
class Scope:
    """A client: the jobs of one ``cache_salt``.

    Attributes:
        silent: the client's dormant jobs.
        returns: record of how often the client's jobs return after a turn.
    """

    silent: dict[JobKey, ActiveJob] = field(default_factory=dict)
    returns: ReturnRate = field(default_factory=ReturnRate)


class Scopes:
    """The most recently active clients."""

    def __init__(self) -> None:
        self._by_salt: OrderedDict[str, Scope] = OrderedDict()

    def __getitem__(self, salt: str) -> Scope:
        return self._by_salt[salt]

    def of(self, job: JobKey) -> Scope:
        """Return the job's client, and mark it as active now."""
        scope = self._by_salt.setdefault(job.salt, Scope())
        self._by_salt.move_to_end(job.salt)
        if len(self._by_salt) > MOST_SILENT:
            self._by_salt.popitem(last=False)
        return scope

    def add_silent(self, job: JobKey, member: ActiveJob) -> None:
        """Store a dormant job. If the client then has more dormant jobs than ``MOST_SILENT`` or
        than its share of ``SILENT_OF_ALL``, the jobs that have been away longest are dropped."""
        silent = self.of(job).silent
        silent[job] = member
        most = max(1, min(MOST_SILENT, SILENT_OF_ALL // len(self._by_salt)))
        while len(silent) > most:
            del silent[next(iter(silent))]


class SharedStarts:
    """Jobs that begin with the same blocks, which are their *start*. Each block of a start is
    counted for only one of its jobs. Used on one thread."""

    def __init__(self) -> None:
        self._sizes: dict[bytes, int] = {}
        self._counts: dict[JobKey, tuple[bytes, float]] = {}

    def count_all(
        self, members: Mapping[JobKey, ActiveJob], demands: Mapping[JobKey, JobDemand]
    ) -> None:
        """Count all shared blocks again. The blocks of a start are weighted by the highest chance,
        among its jobs, that a job needs its blocks soon."""
        self._sizes, self._counts = {}, {}
        needed: dict[bytes, float] = {}
        for key, member in members.items():
            needed[member.start] = max(demands[key].chance, needed.get(member.start, 0.0))
        largest: dict[bytes, int] = {}
        for key, member in members.items():
            more = max(0, member.shared - largest.get(member.start, 0))
            self._enter(key, member.start, more * needed[member.start])
            largest[member.start] = more + largest.get(member.start, 0)

    def counted_with(self, key: JobKey, member: ActiveJob) -> float:
        """Return the number of shared blocks that are counted for a job. Adds the job to the jobs
        of its start if necessary."""
        if not member.shared:
            return 0.0
        if key not in self._counts:
            known = member.start in self._sizes
            self._enter(key, member.start, 0.0 if known else member.shared)
        return self._counts[key][1]

    def leave(self, key: JobKey) -> float:
        """Remove a job. Returns the number of blocks that were counted for it and that other jobs
        still share."""
        start, blocks = self._counts.pop(key, (b"", 0.0))
        if not start:
            return 0.0
        self._sizes[start] -= 1
        if self._sizes[start]:
            return blocks
        del self._sizes[start]
        return 0.0

    def _enter(self, key: JobKey, start: bytes, blocks: float) -> None:
        self._sizes[start] = self._sizes.get(start, 0) + 1
        self._counts[key] = start, blocks


COUNTED_S = 2e-4
"""Interval between two full counts, in seconds per job. Counting a job takes microseconds. Changed
jobs are counted again on every query."""
BOUND_SLACK = 1 + 1e-9
"""Factor by which upper bounds are increased, because they are sums of many changes and thus
inexact."""
TOGETHER, PART = 256, 64
"""``TOGETHER``: maximum number of jobs that one query counts again. With more jobs, a full count
takes several queries of ``PART`` jobs each, so that no step waits for a whole count."""


class ActiveJobs:
    """Projects how many blocks each job needs, from its admission to its end, and how many all jobs
    need together. Used on one thread.

    Args:
        slots: number of pages that CPU memory holds.
        gap_forecast: returns the gap forecast of a job that is between turns; None without one.
        clock: monotonic seconds.

    Attributes:
        job_forecast: forecasts the remaining course of jobs.
        cadence: mean and spread of the time between the arrivals of a job's turns.
        pace: durations of the jobs' turns and gaps.
    """

    def __init__(
        self,
        facts: EngineFacts,
        pins: PinTable,
        slots: int,
        gap_forecast: Callable[[JobKey], Forecast | None],
        job_forecast: JobForecast,
        clock: Callable[[], float],
    ) -> None:
        self.job_forecast = job_forecast
        self.cadence = TurnCadence()
        self._facts = facts
        self._pins = pins
        self._gap_forecast = gap_forecast
        pool = facts.usable_blocks
        self._room = Blocks(pool, max(pool, slots))
        self._fair = FairShare()
        self._loose = 0.0
        self._clock = clock
        self._members: dict[JobKey, ActiveJob] = {}
        self._scopes = Scopes()
        self._output = Growth()
        self._shared = Growth()
        self.pace = TurnPace()
        self._entering: dict[str, JobDemand] = {}  # admitted, without blocks yet; by request
        self._demand = Demand()
        self._places: dict[JobKey | str, int] = {}  # position in ``_demand``
        self._starts = SharedStarts()
        self._changed: dict[JobKey | str, None] = {}  # changed since they were counted
        self._counted: dict[JobKey, JobDemand] = {}  # as last counted
        self._uncounted: list[JobKey] = []  # jobs that the current full count has not reached
        self._counted_until = -math.inf

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, job: JobKey) -> bool:
        return job in self._members

    def items(self) -> Iterator[tuple[JobKey, ActiveJob]]:
        """Jobs and their state, oldest first; read only."""
        return iter(self._members.items())

    def goes_on(self, job: JobKey) -> float:
        """Return the chance that a job returns after a turn that the client did not declare to be
        the job's last."""
        return self._scopes.of(job).returns.share

    # -- job events ---------------------------------------------------------------------

    def reactivate(self, job: JobKey) -> bool:
        """Reactivate a job whose turn arrives. Returns True if the job was dormant; it is then the
        youngest."""
        back = self._scopes.of(job).silent.pop(job, None)
        if back is None:
            return False
        self._members[job] = back
        self._changed[job] = None
        return True

    def on_arrived(self, job: JobKey, turn: Turn) -> None:
        """Record the arrival of a further turn of an active job. Raises KeyError if the job is not
        active; ``reactivate`` makes a dormant job active."""
        member, now = self._members[job], self._clock()
        if not member.running:
            self.pace.on_gap(now - member.since)
            self._scopes.of(job).returns.observe(returned=True)
        self.cadence.observe(now - member.asked)
        member.asked = now
        self._changed[job] = None
        self._runs(member, turn)

    def on_started(self, job: JobKey, turn: Turn) -> None:
        """Record that the first turn of a job was allocated its first blocks."""
        shared = self._facts.blocks(turn.vram_tokens)
        hashes = turn.request.block_hashes
        start = bytes(hashes[0]) if shared and hashes else b""
        blocks = self._blocks_of(turn) - shared
        now = self._clock()
        self._members[job] = ActiveJob(1, 1, blocks, shared, start, now, now)
        self._changed[job] = None
        self._shared.observe(shared)

    def on_turn_started(self, job: JobKey) -> None:
        """Record that a further turn of an active job was allocated its first blocks."""
        self._members[job].turns += 1
        self._changed[job] = None

    def on_joined(self, job: JobKey, turn: Turn) -> None:
        """Record a turn that arrived before its job started. Call once the job has started."""
        self._changed[job] = None
        self._runs(self._members[job], turn)

    def _runs(self, member: ActiveJob, turn: Turn) -> None:
        member.running += 1
        member.blocks = max(member.blocks, self._blocks_of(turn) - member.shared)

    def on_ended(self, job: JobKey, turn: Turn, *, over: bool, gone: bool) -> None:
        """Record that a turn finished. Does nothing if the job is not active.

        Args:
            over: True if the turn's job has finished too.
            gone: True if the client disconnected, perhaps for good.
        """
        member = self._members.get(job)
        if member is None:
            return
        now = self._clock()
        self._changed[job] = None
        member.running = max(0, member.running - 1)
        member.since = now
        blocks = self._facts.mean_blocks(turn.request.num_tokens) - member.shared
        if member.ended:
            grown = max(0.0, blocks - member.ended)
            member.grown += grown
            self.job_forecast.growth.observe(grown)
        member.ended = blocks
        if not member.running:
            member.blocks = blocks
        self._output.observe(turn.request.num_output_tokens * self._facts.blocks_per_token)
        self.pace.on_turn(now - turn.arrived_at, now - turn.hold.admitted_at)
        if turn.job is None or (over and not member.running):
            self.on_over(job)
        elif gone and not member.running:
            self._set_dormant(job)

    def on_over(self, job: JobKey) -> bool:
        """Record that the job has no further turn, or is no longer expected. Returns True if the
        job was active, and thus took space."""
        self._scopes.of(job).silent.pop(job, None)
        member = self._members.pop(job, None)
        if member is None:
            return False
        self._changed[job] = None
        self.job_forecast.lengths.ended(member.turns)
        return True

    def _chances(self, jobs: Iterable[JobKey], now: float) -> dict[JobKey, float]:
        """Return the chance that each of these active jobs needs its blocks soon. If the chance is
        below ``LEAST_CHANCE``, the job's pin becomes one of the first to be released. If the job
        has also been silent for ``LEAST_SILENCE_S``, it becomes dormant and is left out of the
        result, because clients may leave without notice."""
        chances = {key: self._chance(key, self._members[key], now) for key in jobs}
        for key in [key for key, chance in chances.items() if chance < LEAST_CHANCE]:
            self._pins.devalue(key)
            if now - self._members[key].since >= LEAST_SILENCE_S:
                self._scopes.of(key).returns.observe(returned=False)
                self._set_dormant(key)
                del chances[key]
        return chances

    def _set_dormant(self, key: JobKey) -> None:
        """Make a job dormant: it takes no space until it returns as a started job."""
        member = self._members.pop(key)
        self._scopes.add_silent(key, member)
        self._changed[key] = None
        self.job_forecast.lengths.ended(member.turns)

    def _chance(self, key: JobKey, member: ActiveJob, now: float) -> float:
        """Return the chance that the job needs its blocks soon: 1 if a turn runs; otherwise, the
        chance that the job returns, given how long it has been silent and how often its client's
        jobs return at all."""
        if member.running:
            return 1.0
        away_s = now - member.since
        forecast = self._gap_forecast(key)
        if forecast is None:
            silent = away_s >= max(SILENT_TIMES * self.pace.gap_s, LEAST_SILENCE_S)
            return float(key in self._pins or not silent)
        return soon_chance(forecast, away_s, self.goes_on(key))

    # -- demand ---------------------------------------------------------------------------

    def _blocks_of(self, turn: Turn) -> float:
        """Return the expected number of blocks of a turn's context at the end of the turn."""
        tokens: int = turn.request.num_prompt_tokens
        return self._facts.mean_blocks(tokens) + self._output.mean

    def demand_of_new(self, turn: Turn) -> JobDemand:
        """Return the expected demand of a new job: its unshared blocks in its first turn, and the
        blocks that later turns add."""
        job = turn.job.key if turn.job is not None else JobKey("", f"(request) {turn.request_id}")
        return JobDemand(self.need_of_new(turn), *self.job_forecast.ahead(job, 1, 0.0))

    def need_of_new(self, turn: Turn) -> float:
        """Return the expected number of unshared blocks of a new job in its first turn, at least
        1."""
        return max(1.0, self._blocks_of(turn) - self._shared.mean)

    def enters(self, request_id: str, demand: JobDemand) -> None:
        """Admit a new job. From now on, its demand is included in the peak."""
        self._entering[request_id] = demand
        self._changed[request_id] = None

    def on_entered(self, request_id: str) -> None:
        """Remove an admitted request, because its job has started or will never start. Unknown
        requests are ignored."""
        if self._entering.pop(request_id, None) is not None:
            self._changed[request_id] = None

    @property
    def entering(self) -> Collection[str]:
        """Ids of the requests of new jobs that were admitted and have no blocks yet."""
        return self._entering.keys()

    def peak(
        self, more: JobDemand | None = None, *, anywhere: bool = False, salt: str | None = None
    ) -> float:
        """Return the projected peak of the VRAM blocks of all jobs, including admitted jobs and the
        demand ``more``. With ``anywhere``, returns the peak of VRAM and CPU memory together,
        including jobs between turns.

        Args:
            salt: client whose job would be admitted. Contexts of other clients between turns count
                only up to an equal share of the space per client. None counts them in full.
        """
        self._count()
        peak = self._demand.peak(more, anywhere=anywhere)
        if salt is None:
            return peak
        return peak - self._fair.of_others(salt, anywhere=anywhere)

    def most(self, more: JobDemand = NO_DEMAND) -> Blocks:
        """Return upper bounds of :meth:`peak` with the demand ``more``, both in VRAM and in VRAM
        and CPU memory together. The bounds are much cheaper to compute than the peak, and suffice
        while the jobs fit."""
        self._count()
        own = most_of(more)
        return Blocks(
            BOUND_SLACK * (self._demand.most.vram + own.vram),
            BOUND_SLACK * (self._demand.most.anywhere + own.anywhere),
        )

    def peak_with_pin(self, blocks: int, job: JobKey | None, *, enough: float) -> float:
        """Return :meth:`peak` under the assumption that ``job``, whose turn has just ended, keeps
        ``blocks`` pinned during its gap, or an upper bound that is not above ``enough``.

        Jobs that started after ``job`` are excluded, because older jobs have precedence.
        """
        away = 1 - self.pace.vram_share(0.0)
        most = self.most().vram + away * blocks
        if most <= enough:
            return most
        place = self._places.get(job) if job in self._members else None
        first = place + 1 if place is not None else None
        return self._demand.peak(first=first) + away * blocks

    def blocks_by_salt(self) -> dict[str, float]:
        """Return the number of blocks of the contexts of each salt's active jobs."""
        blocks = dict[str, float]()
        for key, member in self._members.items():
            blocks[key.salt] = blocks.get(key.salt, 0.0) + member.blocks
        return blocks

    def loose(self) -> float:
        """Return the expected number of blocks that unpinned jobs between turns will need again.
        These blocks are free now. With more than ``TOGETHER`` jobs, the number is from the last
        count, and includes the growth of the next turn."""
        if len(self._members) > TOGETHER:
            return self._loose
        now = self._clock()
        return sum(
            member.blocks
            * self._chance(key, member, now)
            * self.pace.vram_share(now - member.since)
            for key, member in self._members.items()
            if not (member.running or key in self._pins)
        )

    # -- counting ---------------------------------------------------------------------------

    def _count(self) -> None:
        """Update the demand and the peak. At intervals, all jobs are counted again; otherwise only
        those that changed."""
        now = self._clock()
        if now >= self._counted_until:
            self._count_more(now)
        for key in self._changed:
            self._count_one(key, now)
        self._changed.clear()

    def _count_more(self, now: float) -> None:
        """Count the next ``PART`` jobs again. Once every job was counted, add up the demands."""
        ahead = self._uncounted or list(self._members)
        count = len(ahead) if len(self._members) <= TOGETHER else PART
        batch, self._uncounted = ahead[:count], ahead[count:]
        chances = self._chances((key for key in batch if key in self._members), now)
        for key, chance in chances.items():
            self._counted[key] = self._demand_of(key, self._members[key], chance, 0.0, now)
        self._counted_until = now + COUNTED_S * (len(chances) + len(self._entering))
        if not self._uncounted:
            self._add_up()

    def _add_up(self) -> None:
        """Add up the demands of all jobs as of their last count."""
        counted = self._counted = {key: self._counted.get(key, NO_DEMAND) for key in self._members}
        sharing = {key: member for key, member in self._members.items() if member.shared}
        self._starts.count_all(sharing, counted)
        for key, member in sharing.items():
            shared = self._starts.counted_with(key, member)
            counted[key] = counted[key]._replace(shared=shared)
        demands = list(counted.values())
        self._demand = Demand([*demands, *self._entering.values()], self.cadence.spread)
        keys: list[JobKey | str] = [*self._members, *self._entering]
        self._places = {key: place for place, key in enumerate(keys)}
        self._share_room(demands)

    def _share_room(self, demands: Sequence[JobDemand]) -> None:
        """Find the clients whose jobs between turns take more than an equal share of the space."""
        waiting = dict.fromkeys([key.salt for key in self._members], NOTHING)
        for (key, member), demand in zip(self._members.items(), demands, strict=True):
            if not member.running and key not in self._pins:
                vram, anywhere = waiting[key.salt]
                vram += demand.weight * demand.blocks
                anywhere += demand.chance * demand.blocks
                waiting[key.salt] = Blocks(vram, anywhere)
        self._fair = FairShare.of(waiting, self._room)
        self._loose = sum(one.vram for one in waiting.values())

    def _count_one(self, key: JobKey | str, now: float) -> None:
        """Update the demand of a job that changed, started or ended."""
        place = self._places.get(key)
        if isinstance(key, str):
            demand = self._entering.get(key, NO_DEMAND)
        elif (member := self._members.get(key)) is None:
            left = self._starts.leave(key)
            demand = JobDemand(0.0, 0.0, 0.0, shared=left) if left else NO_DEMAND
        else:
            chance = self._chance(key, member, now)
            shared = self._starts.counted_with(key, member)
            demand = self._counted[key] = self._demand_of(key, member, chance, shared, now)
        if place is None and demand is not NO_DEMAND:
            place = self._places[key] = len(self._demand)
        if place is not None:
            self._demand.put(place, demand)

    def _demand_of(
        self, key: JobKey, member: ActiveJob, chance: float, shared: float, now: float
    ) -> JobDemand:
        grows, left = self.job_forecast.ahead(key, member.turns, member.grown)
        if member.running:
            return running_demand(member.blocks, grows, left, shared)
        away_s = now - member.since
        vram_share = 1.0 if key in self._pins else self.pace.vram_share(away_s)
        return away_demand(member.blocks, grows, left, shared, chance, chance * vram_share)
