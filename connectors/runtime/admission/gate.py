"""Holds new jobs back while their contexts would not fit into any tier.

A new job waits until its working set, together with the working sets of the active jobs, fits into
VRAM, CPU memory or a lower tier. It does not wait while the engine is idle, nor for longer than the
admission limit. Nor does it wait if recomputing the contexts that it displaces costs the other
requests no more time than a turn and its gap take. A turn is *new* until a turn of its job has been
allocated blocks. A job that has started is never held back.
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
"""Interval after which a held-back job is reconsidered even if nothing changed, seconds, because
return probabilities change with time."""
SPARE_TIMES = 2.0
"""Number of free blocks, per block of a held-back job's first turn, above which the pool counts as
underused. With fewer free blocks, an admitted job would crowd out jobs that are about to grow."""


@dataclass(frozen=True, slots=True)
class Room:
    """Capacity for contexts, in blocks.

    Attributes:
        vram: blocks of VRAM.
        cpu: slots in CPU memory; 0 without that tier.
        below: blocks of the largest tier below CPU memory; 0 without lower tiers.
        share: fraction of VRAM and CPU memory that may be committed.
    """

    vram: int
    cpu: int
    below: float = 0.0
    share: float = 1.0


def may_wait(waited_s: float, longest_s: float, *, idle: bool) -> bool:
    """True if a turn may be held back. It may not if no other turn runs whose end would free space,
    or if it has already waited for ``longest_s``.

    Args:
        longest_s: maximum wait of a turn, seconds.
        idle: True if no other turn has blocks or was admitted.
    """
    return not (idle or waited_s >= longest_s)


def is_settled(refused_s: float, *, changed: bool) -> bool:
    """True if a turn stays held back without being reconsidered.

    Args:
        refused_s: time since a turn last found no space, seconds.
        changed: True if jobs arrived, started or finished since then.
    """
    return not changed and refused_s < LOOK_EVERY_S


def fits(room: Room, peak: float, peak_anywhere: float) -> bool:
    """True if a new job fits.

    It fits if CPU memory or a lower tier has space for the blocks of all jobs, because they can be
    restored from there. It also fits if VRAM has space for the blocks needed at the same time, and
    VRAM or CPU memory has space for the blocks of all jobs. Without CPU memory, only the blocks
    needed at the same time count.

    Args:
        peak: projected peak of VRAM blocks of all jobs, including the new one.
        peak_anywhere: projected peak in all tiers, including jobs between turns.
    """
    in_vram = peak <= room.share * room.vram
    if not room.cpu:
        return in_vram
    in_a_tier = peak_anywhere <= max(min(1.0, room.share) * room.cpu, room.below)
    return in_a_tier or (in_vram and peak_anywhere <= max(room.vram, room.cpu))


def overflow(room: Room, peak: float, peak_anywhere: float) -> float:
    """Return the number of context blocks that do not fit into CPU memory or, without CPU memory,
    into VRAM. Takes the same arguments as ``fits``."""
    if room.cpu:
        return max(0.0, peak_anywhere - min(1.0, room.share) * room.cpu)
    return max(0.0, peak - room.share * room.vram)


def gives_too_little(*, free: int, need: float, loose: float) -> bool:
    """True if so many unclaimed blocks are free that holding a new job back leaves VRAM underused.

    Args:
        free: number of free blocks.
        need: blocks of the job's first turn.
        loose: free blocks that jobs between turns are expected to need again.
    """
    return free > SPARE_TIMES * need + loose


class Admission:
    """Admission control of new jobs. Used on one thread.

    Args:
        max_wait_s: time after which a job is admitted even if it does not fit, seconds.
        room: capacity of each tier, including blocks in use.
        gap_forecast: returns the gap forecast of a job that is between turns; None without one.
        job_forecast: forecasts the remaining course of jobs.
        fit: estimates prefill times, seconds.
        counts: False if admission control is off: no job is counted or held back.

    Attributes:
        jobs: jobs that have started.
        overcommit: adapts the fraction of the pool that is committed.
        refused: number of new jobs that had to wait.
        held: ids of the requests that are held back.
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

    # -- job events ---------------------------------------------------------------------

    def on_arrived(self, turn: Turn) -> bool:
        """Register an arriving turn of a started job, or of a new job, which may be held back.

        Returns:
            True if the turn's job was dormant. The job is now the youngest. False if admission
            control is off.
        """
        if not self._counts:
            return False
        self._changed = True
        job = _job_of(turn)
        back = self.jobs.reactivate(job)
        turn.hold.was_dormant = back
        if job in self.jobs:
            self.jobs.on_arrived(job, turn)
        else:  # a parent that has started may wait for this child
            parent = turn.job.parent if turn.job is not None else None
            turn.hold.new = parent is None or parent not in self.jobs
        return back

    def on_started(self, turn: Turn) -> None:
        """Record that a turn was allocated its first blocks."""
        if not self._counts:
            return
        self._settled(turn)
        turn.hold.admitted_at = self._clock()
        job, unit = _job_of(turn), self._facts.hit_tokens
        if job not in self.jobs:
            self.jobs.on_started(job, turn)
            return
        self.jobs.on_turn_started(job)
        if turn.gap.kept and not turn.hold.was_dormant:  # space is not kept for dormant jobs
            found, whole = turn.found_tokens, turn.pages.shared_tokens
            lost = whole - found if found + unit < whole else 0  # the last block may be missing
            pool = self._facts.pool_tokens
            self.overcommit.returned((whole - lost) / pool, lost / pool)

    def on_joined(self, turn: Turn) -> None:
        """Record that the turn's job has started, because another of its turns was admitted."""
        self._changed = True
        turn.hold.new = False
        self.held.discard(turn.request_id)
        self.jobs.on_joined(_job_of(turn), turn)

    def on_ended(self, turn: Turn) -> None:
        """Record that a turn finished, and its job too if this was the job's last turn. If the
        request was not answered, its client has disconnected, perhaps for good."""
        if not self._counts:
            return
        self._settled(turn)
        over, gone = turn.hints.is_last_step, not turn.request.answered
        self.jobs.on_ended(_job_of(turn), turn, over=over, gone=gone)

    def on_over(self, job: JobKey) -> None:
        """Record that the job has no further turn, or is no longer expected."""
        if self.jobs.on_over(job):
            self._changed = True

    def _settled(self, turn: Turn) -> None:
        self._changed = True
        turn.hold.new = False
        self.held.discard(turn.request_id)
        self.jobs.on_entered(turn.request_id)

    # -- whether a new job may start -------------------------------------------------------

    def holds(self, turn: Turn, *, behind: bool = False) -> bool:
        """Return True if a turn of a new job must wait: for space or, with ``behind``, for jobs
        that arrived earlier. Otherwise admit the job. Always False for a job that has started."""
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
        if self._gives_too_little(need.blocks):
            self.overcommit.spare(now)
        return True

    def _gives_too_little(self, need: float) -> bool:
        free = self._pool.num_free()
        return gives_too_little(free=free, need=need, loose=0.0) and gives_too_little(
            free=free, need=need, loose=self.jobs.loose()
        )

    def lets_overdue_in(self, turn: Turn) -> bool:
        """Admit a turn that has been held back for the maximum time. Returns False if it has not
        been held back for that long."""
        overdue = self._clock() - turn.arrived_at >= self._max_wait_s
        if overdue and turn.hold.new:
            self.let_in(turn)
        return overdue

    def let_in(self, turn: Turn) -> None:
        """Admit a new job. The blocks of its first turn count as taken from now on."""
        self._enters(turn, self.jobs.demand_of_new(turn))

    def _enters(self, turn: Turn, need: JobDemand) -> None:
        self.held.discard(turn.request_id)
        turn.hold.let_in_at = self._clock()
        self.jobs.enters(turn.request_id, need)
        self._changed = True

    def _fits(self, need: JobDemand, salt: str) -> bool:
        """True if a new job fits, or if recomputing the contexts that it displaces costs the other
        requests no more time than a turn and its gap take."""
        if self._room.share != self.overcommit.share:
            self._room = replace(self._room, share=self.overcommit.share)
        room = self._room
        if fits(room, *self.jobs.most(need)):
            return True
        peak = self.jobs.peak(need, salt=salt)
        whole = self.jobs.peak(need, anywhere=True, salt=salt) if room.cpu else 0.0
        if fits(room, peak, whole):
            return True
        context = mean_context(need)
        displaced = min(context, overflow(room, peak, whole))
        return self._recompute_s(context, displaced) <= self.jobs.pace.cycle_s

    def _recompute_s(self, context: float, displaced: float) -> float:
        """Return the time that all running requests together lose while the displaced blocks of a
        context are recomputed, seconds; infinite while no prefill was measured."""
        per_token = self._facts.blocks_per_token
        tokens = int(context / per_token) if per_token else 0
        blocks = self._facts.blocks(tokens)
        share = min(1.0, displaced / blocks) if blocks else 0.0
        if not share:
            return 0.0
        return max(1, self._turns.running) * share * (self._fit.seconds(0, tokens) or math.inf)

    def refuse(self, turn: Turn) -> None:
        """Record that a turn has to wait. Each turn is counted once."""
        if not turn.hold.refused:
            turn.hold.refused = True
            self.refused += 1
            self.held.add(turn.request_id)


def _job_of(turn: Turn) -> JobKey:
    """Return the turn's job. A request without a job is treated as a job of its own."""
    return turn.job.key if turn.job is not None else JobKey("", f"(request) {turn.request_id}")
