"""New jobs are held back while contexts have nowhere to go.

A new job waits until its working set, with those of the active jobs, fits into VRAM, CPU memory or
a tier below it. It does not wait while the engine is idle, nor beyond the admission limit, nor
where recomputing the contexts that it displaces costs the other requests less time than a turn with
its gap takes. A turn is *new* until one of its job has had blocks. A job that has started is never
held.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.pins.pin_table import PinTable
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.policies.admission.working_set import (
    JobDemand,
    JobForecast,
    Overcommit,
    mean_context,
)
from tiered_kv.policies.base import JobKey
from tiered_kv.policies.distribution import Forecast
from tiered_kv.policies.pricing.estimators import PrefillFit

from .active_jobs import ActiveJobs

LOOK_EVERY_S = 0.1
"""A job that is held is looked at again when something changed, or after so long: chances to
return change with time alone."""
SPARE_TIMES = 2.0
"""Blocks that are free beside a held job, over those of its first turn, from which on too little
of the pool is given out. With less, one that is let in would crowd those that are about to grow."""


@dataclass(frozen=True, slots=True)
class Room:
    """Blocks for contexts.

    Attributes:
        vram: blocks of VRAM.
        cpu: slots in CPU memory; 0 without that tier.
        below: blocks of the largest tier below CPU memory; 0 without one.
        share: fraction of VRAM and CPU memory that may be given out.
    """

    vram: int
    cpu: int
    below: float = 0.0
    share: float = 1.0


def may_wait(waited_s: float, longest_s: float, *, idle: bool) -> bool:
    """True if a turn may have to wait: not while nothing else runs that would give room back, and
    no longer than a client may be left waiting.

    Args:
        longest_s: that time, seconds.
        idle: True if no other turn has blocks or was let in.
    """
    return not (idle or waited_s >= longest_s)


def is_settled(refused_s: float, *, changed: bool) -> bool:
    """True if a turn is held as before, without another look.

    Args:
        refused_s: time since a turn was last found without room, seconds.
        changed: True if jobs came, started, ended or went since then.
    """
    return not changed and refused_s < LOOK_EVERY_S


def fits(room: Room, peak: float, peak_anywhere: float) -> bool:
    """True if a new job has room.

    It needs VRAM for what is needed at the same time, and a place for all of it in VRAM or CPU
    memory; or all of it in CPU memory or the tier below, from where what VRAM lacks comes back.

    Args:
        peak: blocks of VRAM that all jobs are heading for, the new one included.
        peak_anywhere: blocks in all tiers, those of jobs that are away included.
    """
    in_vram = peak <= room.share * room.vram
    if not room.cpu:
        return in_vram
    in_a_tier = peak_anywhere <= max(min(1.0, room.share) * room.cpu, room.below)
    return in_a_tier or (in_vram and peak_anywhere <= max(room.vram, room.cpu))


def overflow(room: Room, peak: float, peak_anywhere: float) -> float:
    """Blocks of contexts that have no place: in VRAM, or in CPU memory if there is any. For the
    arguments see ``fits``."""
    if room.cpu:
        return max(0.0, peak_anywhere - min(1.0, room.share) * room.cpu)
    return max(0.0, peak - room.share * room.vram)


def gives_too_little(*, free: int, need: float, loose: float) -> bool:
    """True if a new job is held beside blocks that nobody will want.

    Args:
        free: free blocks.
        need: blocks of its first turn.
        loose: free blocks that jobs which are away are expected to want back.
    """
    return free > SPARE_TIMES * need + loose


class Admission:
    """Admission of new jobs. One thread.

    Args:
        max_wait_s: time after which a job is let in, whatever it needs, seconds.
        room: blocks of each tier, those of running jobs too.
        gap_forecast: gives the forecast of the gap of a job that is away; None if there is none.
        job_forecast: forecast of how jobs go on.
        fit: seconds of prefills.
        counts: False if admission is off: no job is counted, and none is held back.

    Attributes:
        jobs: jobs that have started.
        overcommit: share of the pool that is given out.
        refused: number of new jobs that had to wait.
        held: requests of jobs that wait for room.
    """

    def __init__(
        self,
        engine: EngineState,
        max_wait_s: float,
        pins: PinTable,
        room: Room,
        gap_forecast: Callable[[JobKey], Forecast | None],
        job_forecast: JobForecast,
        fit: PrefillFit,
        *,
        counts: bool,
    ) -> None:
        facts, clock = engine.facts, engine.clock
        self.jobs = ActiveJobs(facts, pins, room.cpu, gap_forecast, job_forecast, clock)
        self.overcommit = Overcommit()
        self.refused = 0
        self.held: set[str] = set()
        self._facts = facts
        self._max_wait_s = max_wait_s
        self._fit = fit
        self._pool = engine.pool
        self._room = room
        self._turns = engine.turns
        self._clock = clock
        self._refused_at = -math.inf
        self._changed = True
        self._counts = counts

    # -- what happens to jobs -----------------------------------------------------------

    def on_arrived(self, turn: Turn) -> bool:
        """Take in a turn: of a job that has started, or of one that may be held.

        Returns:
            True if its job was dormant. It is the youngest now.
        """
        if not self._counts:
            return False
        self._changed = True
        job = _job_of(turn)
        back = self.jobs.reactivate(job)
        turn.hold.was_dormant = back
        if job in self.jobs:
            self.jobs.on_arrived(job, turn)
        else:
            turn.hold.new = True
        return back

    def on_started(self, turn: Turn) -> None:
        """Take in that a turn has its first blocks."""
        if not self._counts:
            return
        self._settled(turn)
        turn.hold.admitted_at = self._clock()
        job, unit = _job_of(turn), self._facts.hit_tokens
        if job not in self.jobs:
            self.jobs.on_started(job, turn)
            return
        self.jobs.on_turn_started(job)
        if turn.gap.kept and not turn.hold.was_dormant:  # then no room was kept for it
            found, whole = turn.found_tokens, turn.pages.shared_tokens
            lost = whole - found if found + unit < whole else 0  # its last block may lack
            pool = self._facts.pool_tokens
            self.overcommit.returned((whole - lost) / pool, lost / pool)

    def on_joined(self, turn: Turn) -> None:
        """Take in that another turn of the job has started, and with it the job."""
        self._changed = True
        turn.hold.new = False
        self.held.discard(turn.request_id)
        self.jobs.on_joined(_job_of(turn), turn)

    def on_ended(self, turn: Turn) -> None:
        """Record that a turn ended, and its job too if this was its last turn. A client that got no
        answer has disconnected, perhaps for good."""
        if not self._counts:
            return
        self._settled(turn)
        over, gone = turn.hints.is_last_step, not turn.request.answered
        self.jobs.on_ended(_job_of(turn), turn, over=over, gone=gone)

    def on_over(self, job: JobKey) -> None:
        """Take in that the job has no further turn, or is not waited for any longer."""
        if self.jobs.on_over(job):
            self._changed = True

    def _settled(self, turn: Turn) -> None:
        self._changed = True
        turn.hold.new = False
        self.held.discard(turn.request_id)
        self.jobs.on_entered(turn.request_id)

    # -- whether a new one may begin ------------------------------------------------------

    def holds(self, turn: Turn, *, behind: bool = False) -> bool:
        """True if a turn of a new job must wait for room, or ``behind`` others that came before.
        Always False once let in."""
        if not turn.hold.new:
            return False
        if behind:
            self.refuse(turn)
            return True
        if turn.request_id in self.jobs.entering:
            return False
        now = self._clock()
        idle = not (self._turns.running or self.jobs.entering)
        patient = may_wait(now - turn.arrived_at, self._max_wait_s, idle=idle)
        if patient and is_settled(now - self._refused_at, changed=self._changed):
            self.held.add(turn.request_id)
            return True
        self._changed = False
        need = self.jobs.demand_of_new(turn)
        if not patient or self._fits(need, _job_of(turn).salt):
            self._enters(turn, need)
            return False
        self._refused_at = now
        self.refuse(turn)
        free = self._pool.num_free()
        if gives_too_little(free=free, need=need.blocks, loose=self.jobs.loose()):
            self.overcommit.spare(now)
        return True

    def lets_overdue_in(self, turn: Turn) -> bool:
        """Let a turn in that was held for as long as it may be; whether it was."""
        overdue = self._clock() - turn.arrived_at >= self._max_wait_s
        if overdue and turn.hold.new:
            self.let_in(turn)
        return overdue

    def let_in(self, turn: Turn) -> None:
        """A new job may begin: what its first turn needs is taken from now on."""
        self._enters(turn, self.jobs.demand_of_new(turn))

    def _enters(self, turn: Turn, need: JobDemand) -> None:
        self.held.discard(turn.request_id)
        turn.hold.let_in_at = self._clock()
        self.jobs.enters(turn.request_id, need)
        self._changed = True

    def _fits(self, need: JobDemand, salt: str) -> bool:
        """True if a new job has room, or may displace contexts since that costs others less than
        the job's own wait."""
        room = replace(self._room, share=self.overcommit.share)
        peak = self.jobs.peak(need, salt=salt)
        whole = self.jobs.peak(need, anywhere=True, salt=salt) if room.cpu else 0.0
        if fits(room, peak, whole):
            return True
        context = mean_context(need)
        displaced = min(context, overflow(room, peak, whole))
        return self._recompute_s(context, displaced) <= self.jobs.pace.cycle_s

    def _recompute_s(self, context: float, displaced: float) -> float:
        """Seconds that all running requests together lose while the displaced blocks of a context
        are recomputed, which holds up each of them. Infinite while no prefill was measured."""
        per_token = self._facts.blocks_per_token
        tokens = int(context / per_token) if per_token else 0
        blocks = self._facts.blocks(tokens)
        share = min(1.0, displaced / blocks) if blocks else 0.0
        if not share:
            return 0.0
        return max(1, self._turns.running) * share * (self._fit.seconds(0, tokens) or math.inf)

    def refuse(self, turn: Turn) -> None:
        """The turn has to wait: each counts once."""
        if not turn.hold.refused:
            turn.hold.refused = True
            self.refused += 1
            self.held.add(turn.request_id)


def _job_of(turn: Turn) -> JobKey:
    """A request without a job is one of its own."""
    return turn.job.key if turn.job is not None else JobKey("", f"(request) {turn.request_id}")
