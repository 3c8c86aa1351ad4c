"""The jobs that have begun, and what they are heading for together (``policies.admission``).

A job has *begun* once a turn of it had blocks; then each of its turns *runs* from its arrival to
its end. Who began first is *older*. A job that may have ended (its client hung up, or has been
silent for long) is *passed over*: it takes no room. If it returns it has begun, and is the
youngest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tiered_kv.connectors.vllm.engine import EngineFacts
from tiered_kv.connectors.vllm.pins import PinTable
from tiered_kv.connectors.vllm.turn import Turn
from tiered_kv.policies.admission import Course, Demand, Growth, Pace, Share
from tiered_kv.policies.signals import JobKey

SILENT_TIMES = 8.0
"""A job that is away for so many times the mean gap is taken to have ended, until it returns."""
LEAST_SILENCE_S = 30.0
COUNTED_S, MANY = 1e-4, 200
"""Of that many jobs, what they take is not counted again for so long, times the jobs, unless one
begins or goes: to count a job takes some microseconds, and every turn's end asks. Of few, each turn
that ends makes a difference."""
MOST_SILENT = 8192
"""Jobs remembered that may have ended. The one longest away is forgotten first."""
PACE = 0.9
"""What the mean of times keeps of itself with each new one."""


@dataclass(slots=True)
class Member:
    """A job that has begun.

    Attributes:
        turns: begun. running: of them, now.
        blocks: of its context when its present turn ends, or when its last did; those shared
            with others left out.
        ended: of its context when its last turn ended.
        grown: blocks that its turns have added, the first left out.
        shared: blocks that it found in VRAM when it began.
        family: the first block of what it shares; jobs of one share the same.
        asked, since: when its last turn arrived, and when one last ended.
    """

    turns: int
    running: int
    blocks: float
    shared: int
    family: bytes
    asked: float
    since: float
    ended: float = 0.0
    grown: float = 0.0


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A new job that asks for room, or has been let in and has no blocks yet.

    Attributes:
        blocks: of its first turn, those shared with others left out.
    """

    job: JobKey
    blocks: float


class BegunJobs:
    """What every job takes, from its first blocks to its end, and what all of them will. One
    thread.

    Args:
        anywhere: whether it will be asked what they take anywhere.
        clock: monotonic seconds.

    Attributes:
        course: how jobs go on. pace: how evenly their turns follow one another.
    """

    def __init__(
        self, facts: EngineFacts, pins: PinTable, anywhere: bool, clock: Callable[[], float]
    ) -> None:
        self.course = Course()
        self.pace = Pace()
        self._facts = facts
        self._pins = pins
        self._anywhere = anywhere
        self._clock = clock
        self._members: dict[JobKey, Member] = {}
        self._silent: dict[JobKey, Member] = {}  # away for so long, or so, that they may be over
        self._output = Growth()
        self._shared = Growth()
        self._turn_s = self._gap_s = 0.0
        self._demand, self._whole, self._shared_blocks = Demand(()), Demand(()), 0
        self._until: dict[JobKey, tuple[int, int]] = {}  # jobs up to it, and blocks they share
        self._counted_until = -math.inf

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, job: JobKey) -> bool:
        return job in self._members

    def items(self) -> Iterator[tuple[JobKey, Member]]:
        """The oldest first; read only."""
        return iter(self._members.items())

    # -- what happens to jobs -----------------------------------------------------------

    def welcome_back(self, job: JobKey) -> bool:
        """A turn of the job arrives: whether that was taken to have ended. It comes after those
        that are there, now."""
        back = self._silent.pop(job, None)
        if back is None:
            return False
        self._members[job] = back
        self._counted_until = -math.inf
        return True

    def arrived(self, job: JobKey, turn: Turn) -> None:
        """Another turn of a job that has begun."""
        member, now = self._members[job], self._clock()
        if not member.running:
            self._gap_s = _mean(self._gap_s, now - member.since)
        self.pace.observe(now - member.asked)
        member.asked = now
        self._runs(member, turn)

    def began(self, job: JobKey, turn: Turn) -> None:
        """The first turn of a job has its first blocks."""
        shared = turn.vram_tokens // self._facts.block_size
        hashes = turn.request.block_hashes
        family = bytes(hashes[0]) if shared and hashes else b""
        blocks = self._blocks_of(turn) - shared
        now = self._clock()
        self._members[job] = Member(1, 1, blocks, shared, family, now, now)
        self._counted_until = -math.inf
        self._shared.observe(shared)

    def went_on(self, job: JobKey) -> None:
        """A further turn has its first blocks."""
        self._members[job].turns += 1

    def joined(self, job: JobKey, turn: Turn) -> None:
        """A turn arrived before the job had begun, and now it has."""
        self._runs(self._members[job], turn)

    def _runs(self, member: Member, turn: Turn) -> None:
        member.running += 1
        member.blocks = max(member.blocks, self._blocks_of(turn) - member.shared)

    def ended(self, job: JobKey, turn: Turn, *, over: bool, gone: bool) -> None:
        """A turn ended; ``over`` if its job did as well, ``gone`` if the client went away, perhaps
        for good."""
        member = self._members.get(job)
        if member is None:
            return
        now = self._clock()
        member.running = max(0, member.running - 1)
        member.since = now
        blocks = turn.request.num_tokens / self._facts.block_size - member.shared
        if member.ended:
            grown = max(0.0, blocks - member.ended)
            member.grown += grown
            self.course.growth.observe(grown)
        member.ended = blocks
        if not member.running:
            member.blocks = blocks
        self._output.observe(turn.request.num_output_tokens / self._facts.block_size)
        self._turn_s = _mean(self._turn_s, now - turn.arrived_at)
        if turn.job is None or (over and not member.running):
            self.over(job)
        elif gone and not member.running:
            self._pass_over(job)

    def over(self, job: JobKey) -> bool:
        """The job has no further turn, or is not waited for any longer; whether it took room."""
        self._silent.pop(job, None)
        member = self._members.pop(job, None)
        if member is None:
            return False
        self._counted_until = -math.inf
        self.course.lengths.ended(member.turns)
        return True

    def _pass_over_silent(self, now: float) -> None:
        """Clients may have gone without a word."""
        late_s = max(SILENT_TIMES * self._gap_s, LEAST_SILENCE_S)
        late = [
            key
            for key, member in self._members.items()
            if not member.running and now - member.since >= late_s and key not in self._pins
        ]
        for key in late:
            self._pass_over(key)

    def _pass_over(self, key: JobKey) -> None:
        """The job may have ended: it takes no room until it returns, as one that has begun."""
        member = self._silent[key] = self._members.pop(key)
        self._counted_until = -math.inf
        self.course.lengths.ended(member.turns)
        if len(self._silent) > MOST_SILENT:
            del self._silent[next(iter(self._silent))]

    # -- what they take -------------------------------------------------------------------

    def _blocks_of(self, turn: Turn) -> float:
        """Of a turn's context when it ends."""
        tokens: int = turn.request.num_prompt_tokens
        return tokens / self._facts.block_size + self._output.mean

    def need(self, turn: Turn) -> float:
        """Blocks of a new job's first turn that it will share with nobody."""
        return max(1.0, self._blocks_of(turn) - self._shared.mean)

    def peak(self, newcomers: Iterable[Newcomer] = (), *, anywhere: bool = False) -> float:
        """The most blocks of VRAM that they are heading for, as last counted, with newcomers;
        ``anywhere``: of VRAM and CPU memory, also while they are away."""
        more = [Share(one.blocks, *self.course.ahead(one.job, 1, 0.0)) for one in newcomers]
        demand = self._whole if anywhere else self._demand
        return self._shared_blocks + demand.peak(self.pace.spread, more)

    def peak_with_pin(
        self, blocks: int, job: JobKey | None, newcomers: Iterable[Newcomer]
    ) -> float:
        """:meth:`peak` if a job whose turn has just ended keeps so many blocks while it is away.

        Those that began after it are left out: room is first theirs who began first.
        """
        away = 1 - self._turn_s / (self._turn_s + self._gap_s) if self._turn_s else 0.0
        until = self._until.get(job) if job is not None else None
        if until is None:
            return self.peak(newcomers) + away * blocks
        jobs, shared = until
        return shared + self._demand.of_first(jobs).peak(self.pace.spread) + away * blocks

    @property
    def shared_blocks(self) -> int:
        """Blocks that several of them share, each counted once, as last counted."""
        return self._shared_blocks

    def loose(self) -> float:
        """Blocks of waiting jobs that nobody holds: they are free, and wanted."""
        now = self._clock()
        return sum(
            member.blocks * self._weight(key, member, now)
            for key, member in self._members.items()
            if not (member.running or key in self._pins)
        )

    def count(self) -> None:
        """See what they take and are heading for, unless there are many and it was done lately."""
        now = self._clock()
        if now < self._counted_until:
            return
        self._pass_over_silent(now)
        families: dict[bytes, int] = {}
        self._until, shared = {}, 0
        shares: list[Share] = []
        for key, member in self._members.items():
            more = member.shared - families.get(member.family, 0)
            if more > 0:
                families[member.family] = member.shared
                shared += more
            grows, left = self.course.ahead(key, member.turns, member.grown)
            blocks = member.blocks
            if not member.running:
                left, blocks = max(0.0, left - 1), blocks + grows
            shares.append(Share(blocks, grows, left, self._weight(key, member, now)))
            self._until[key] = len(shares), shared
        self._demand, self._shared_blocks = Demand(shares), shared
        if self._anywhere:
            self._whole = Demand(shares, whole=True)
        if len(shares) >= MANY:
            self._counted_until = now + COUNTED_S * len(shares)

    def _weight(self, key: JobKey, member: Member, now: float) -> float:
        """Of the time until its next turn has ended, the share in which the job needs VRAM."""
        if member.running or key in self._pins:
            return 1.0
        away_s = max(self._gap_s, now - member.since)
        return self._turn_s / (self._turn_s + away_s) if self._turn_s else 1.0


def _mean(old: float, new: float) -> float:
    return PACE * old + (1 - PACE) * new if old else new
