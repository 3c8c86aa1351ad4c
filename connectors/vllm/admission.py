"""New jobs are held back while those already begun will need the room.

Counts what every job takes and is heading for (``policies.admission``), from its first blocks to
its end. A job is held until its working set fits into VRAM, or with all the others into CPU memory,
the engine is idle, or it has waited for as long as a client may be left waiting.

Words: a turn is *new* until one of its job has had blocks; then the job has *begun*, and each of
its turns *runs* from its arrival to its end. Who began first is *older*. A job that may have ended
(its client hung up, or has been silent for long) is *passed over*: it takes no room. If it returns
it has begun, and is the youngest.

A job in mid-course is never held behind new ones. But jobs grow, and some were let in because they
had waited for too long: where the contexts of those that began before it leave it no room, its turn
waits as well, since each of them would lose its KV to the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiered_kv.connectors.vllm.engine import EngineFacts
from tiered_kv.connectors.vllm.pins import PinTable
from tiered_kv.connectors.vllm.turn import Turn
from tiered_kv.policies.admission import (
    Allowance,
    Demand,
    Growth,
    JobLengths,
    Pace,
    Share,
)
from tiered_kv.policies.signals import JobKey

LOOK_EVERY_S = 0.1
"""A job that was held is looked at again when something changed, or after so long."""
SILENT_TIMES = 8.0
"""A job that is away for so many times the mean gap is taken to have ended, until it returns."""
LEAST_SILENCE_S = 30.0
LEARN_EVERY_S = 1.0
"""Between two signs that too much was given out, and between two that it was too little."""
COUNTED_S, MANY = 1e-4, 200
"""Of that many jobs, what they take is not counted again for so long, times the jobs, unless one
begins or goes: to count a job takes some microseconds, and every turn's end asks. Of few, each turn
that ends makes a difference."""
MOST_SILENT = 8192
"""Jobs remembered that may have ended. The one longest away is forgotten first."""
AWAY_S = 10.0
"""A job that is away for longer keeps no younger one waiting, unless its pin is worth that: its
tool is one of the slow ones."""
PACE = 0.9
"""What the mean of times keeps of itself with each new one."""


@dataclass(slots=True)
class _Member:
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


class Admission:
    """The jobs that have begun, and whether another may. One thread.

    Args:
        max_wait_s: after that long a job is let in, whatever it needs.
        pool: vLLM's block pool.
        slots: pages that CPU memory holds, those of running jobs too.
        running: requests that have blocks, now.
        clock: monotonic seconds.

    Attributes:
        refused: new jobs that had to wait so far. delayed: turns of others that had to.
    """

    def __init__(
        self,
        facts: EngineFacts,
        max_wait_s: float,
        pins: PinTable,
        pool: Any,
        slots: int,
        running: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self.lengths = JobLengths()
        self.growth = Growth()
        self.pace = Pace()
        self.allowance = Allowance()
        self.refused = self.delayed = 0
        self._facts = facts
        self._max_wait_s = max_wait_s
        self._pins = pins
        self._pool = pool
        self._slots = slots
        self._running = running
        self._clock = clock
        self._members: dict[JobKey, _Member] = {}
        self._silent: dict[JobKey, _Member] = {}  # away for so long, or so, that they may be over
        self._entering: dict[str, float] = {}  # requests let in, until they have blocks
        self._output = Growth()
        self._shared = Growth()
        self._turn_s = self._gap_s = 0.0
        self._demand, self._whole, self._shared_blocks = Demand(()), Demand(()), 0
        self._until: dict[JobKey, tuple[int, int]] = {}  # jobs up to it, and blocks they share
        self._counted_until = -math.inf
        self._refused_at = -math.inf
        self._changed = True
        self._lost_at = self._spared_at = -math.inf

    def __len__(self) -> int:
        return len(self._members)

    # -- what happens to jobs -----------------------------------------------------------

    def arrived(self, turn: Turn) -> bool:
        """A turn arrives: of a job that has begun, or of one that may be held.

        Returns:
            Whether it was taken to have ended. It comes after those that are there, now.
        """
        self._changed = True
        key = _key(turn)
        back = self._silent.pop(key, None)
        if back is not None:
            self._members[key] = back
            turn.kept = False  # no room was kept for it
            self._counted_until = -math.inf
        member = self._members.get(key)
        if member is None:
            turn.new = True
            return False
        now = self._clock()
        if not member.running:
            self._gap_s = _mean(self._gap_s, now - member.since)
        self.pace.observe(now - member.asked)
        member.asked = now
        member.running += 1
        member.blocks = max(member.blocks, self._blocks_of(turn) - member.shared)
        return back is not None

    def began(self, turn: Turn) -> None:
        """A turn has its first blocks."""
        self._changed = True
        turn.new = False
        self._entering.pop(turn.request_id, None)
        key, size = _key(turn), self._facts.block_size
        member = self._members.get(key)
        if member is not None:
            member.turns += 1
            if turn.kept and turn.vram_tokens + turn.cpu_tokens + size < turn.shared:
                self._lost()
            return
        shared = turn.vram_tokens // size
        hashes = turn.request.block_hashes
        family = bytes(hashes[0]) if shared and hashes else b""
        blocks = self._blocks_of(turn) - shared
        now = self._clock()
        self._members[key] = _Member(1, 1, blocks, shared, family, now, now)
        self._counted_until = -math.inf
        self._shared.observe(shared)

    def joined(self, turn: Turn) -> None:
        """Another turn of a new one's job has begun, and so has the job."""
        member = self._members[_key(turn)]
        self._changed = True
        turn.new = False
        member.running += 1
        member.blocks = max(member.blocks, self._blocks_of(turn) - member.shared)

    def ended(self, turn: Turn, *, over: bool, gone: bool) -> None:
        """A turn ended; ``over`` if its job did as well, ``gone`` if the client went away, perhaps
        for good."""
        self._changed = True
        turn.new = False
        self._entering.pop(turn.request_id, None)
        key = _key(turn)
        member = self._members.get(key)
        if member is None:
            return
        now = self._clock()
        member.running = max(0, member.running - 1)
        member.since = now
        blocks = turn.request.num_tokens / self._facts.block_size - member.shared
        if member.ended:
            grown = max(0.0, blocks - member.ended)
            member.grown += grown
            self.growth.observe(grown)
        member.ended = blocks
        if not member.running:
            member.blocks = blocks
        self._output.observe(turn.request.num_output_tokens / self._facts.block_size)
        self._turn_s = _mean(self._turn_s, now - turn.arrived_at)
        if turn.job is None or (over and not member.running):
            self.over(key)
        elif gone and not member.running:
            self._pass_over(key)

    def over(self, job: JobKey) -> None:
        """The job has no further turn, or is not waited for any longer."""
        self._silent.pop(job, None)
        member = self._members.pop(job, None)
        if member is not None:
            self._changed = True
            self._counted_until = -math.inf
            self.lengths.ended(member.turns)

    # -- whether a new one may begin ------------------------------------------------------

    def holds(self, turn: Turn) -> bool:
        """Whether a turn must wait for room. Always False once let in."""
        if turn.request_id in self._entering:
            return False
        now = self._clock()
        idle = not (self._running() or self._entering)
        patient = not (idle or self._waited(turn, now))
        if patient and not self._changed and now - self._refused_at < LOOK_EVERY_S:
            return True
        self._changed = False
        if not turn.new:
            if not (patient and self._behind_older(turn, now)):
                return False
            self._refused_at = now
            self.refuse(turn)
            return True
        need = self._need(turn)
        if not patient or self._fits(need):
            self.let_in(turn)
            return False
        self._refused_at = now
        self.refuse(turn)
        if self._pool.get_num_free_blocks() > 2 * need + self._loose():
            self._spare()
        return True

    def lets_overdue_in(self, turn: Turn) -> bool:
        """Let a turn in that was held for as long as it may be; whether it was."""
        if not self._waited(turn, self._clock()):
            return False
        if turn.new:
            self.let_in(turn)
        return True

    def _waited(self, turn: Turn, now: float) -> bool:
        return now - turn.arrived_at >= self._max_wait_s

    def let_in(self, turn: Turn) -> None:
        """A new job may begin: what its first turn needs is taken from now on."""
        self._entering[turn.request_id] = self._need(turn)
        self._changed = True

    def _fits(self, need: float) -> bool:
        """Whether a new job has room: VRAM for what is needed at the same time, and somewhere for
        all of it, VRAM or CPU memory; or all of it in CPU memory, from where what VRAM lacks comes
        back."""
        share, pool = self.allowance.share, self._facts.num_blocks - 1
        fits = self.demand(need) <= share * pool
        if not self._slots:
            return fits
        whole = self._peak(self._whole, need)
        return whole <= min(1.0, share) * self._slots or (fits and whole <= max(pool, self._slots))

    def _behind_older(self, turn: Turn, now: float) -> bool:
        """Whether the jobs that began before a turn's leave its context no room, neither in VRAM
        nor in CPU memory."""
        key, taken = _key(turn), float(self._shared_blocks)
        for other, member in self._members.items():
            if other == key:
                room = max(self._facts.num_blocks - 1, self._slots)
                return taken > self._shared_blocks and taken + member.blocks > room
            away = not member.running and now - member.since >= AWAY_S
            if not away or self._pins.worth_a_wait(other):
                taken += member.blocks
        return False

    def refuse(self, turn: Turn) -> None:
        """The turn has to wait: each counts once."""
        if not turn.refused:
            turn.refused = True
            self.refused += turn.new
            self.delayed += not turn.new

    def _lost(self) -> None:
        """What is lost at once has one cause."""
        if self._clock() - self._lost_at >= LEARN_EVERY_S:
            self._lost_at = self._clock()
            self.allowance.lost()

    def _spare(self) -> None:
        if self._clock() - self._spared_at >= LEARN_EVERY_S:
            self._spared_at = self._clock()
            self.allowance.spare()

    def demand(self, new_blocks: float = 0.0) -> float:
        """The most blocks that the jobs that have begun are heading for, beside a new one if that
        takes some."""
        self._count()
        return self._peak(self._demand, new_blocks)

    def _peak(self, demand: Demand, new_blocks: float) -> float:
        new = [*self._entering.values(), new_blocks] if new_blocks else self._entering.values()
        grows, left = self.growth.mean, self.lengths.left(1)
        more = [Share(blocks, grows, left) for blocks in new]
        return self._shared_blocks + demand.peak(self.pace.spread, more)

    def _count(self) -> None:
        """What the jobs that have begun are heading for."""
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
            own = (member.grown + self.growth.mean) / max(1, member.turns)
            left, blocks = self.lengths.left(member.turns), member.blocks
            if not member.running:
                left, blocks = max(0.0, left - 1), blocks + own
            shares.append(Share(blocks, own, left, self._weight(key, member, now)))
            self._until[key] = len(shares), shared
        self._demand, self._shared_blocks = Demand(shares), shared
        if self._slots:
            self._whole = Demand(shares, whole=True)
        if len(shares) >= MANY:
            self._counted_until = now + COUNTED_S * len(shares)

    def demand_with_pin(self, blocks: int, job: JobKey | None) -> float:
        """:meth:`demand` if a job whose turn has just ended keeps so many blocks while it is away.

        Those that began after it are left out: room is first theirs who began first.
        """
        away = 1 - self._turn_s / (self._turn_s + self._gap_s) if self._turn_s else 0.0
        self._count()
        until = self._until.get(job) if job is not None else None
        if until is None:
            return self._peak(self._demand, 0.0) + away * blocks
        jobs, shared = until
        return shared + self._demand.of_first(jobs).peak(self.pace.spread) + away * blocks

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
        self.lengths.ended(member.turns)
        if len(self._silent) > MOST_SILENT:
            del self._silent[next(iter(self._silent))]

    def _weight(self, key: JobKey, member: _Member, now: float) -> float:
        """Of the time until its next turn has ended, the share in which the job needs VRAM."""
        if member.running or key in self._pins:
            return 1.0
        away_s = max(self._gap_s, now - member.since)
        return self._turn_s / (self._turn_s + away_s) if self._turn_s else 1.0

    def _loose(self) -> float:
        """Blocks of waiting jobs that nobody holds: they are free, and wanted."""
        now = self._clock()
        return sum(
            member.blocks * self._weight(key, member, now)
            for key, member in self._members.items()
            if not (member.running or key in self._pins)
        )

    def _need(self, turn: Turn) -> float:
        """Blocks of a new job's first turn that it will share with nobody."""
        return max(1.0, self._blocks_of(turn) - self._shared.mean)

    def _blocks_of(self, turn: Turn) -> float:
        tokens: int = turn.request.num_prompt_tokens
        return tokens / self._facts.block_size + self._output.mean


def _key(turn: Turn) -> JobKey:
    """The job's; a request without a job is one of its own."""
    return turn.job.key if turn.job is not None else JobKey("", f"(request) {turn.request_id}")


def _mean(old: float, new: float) -> float:
    return PACE * old + (1 - PACE) * new if old else new
