"""New jobs are held back while those that have started will need the room.

A job is held until its working set fits, beside those of the active jobs, into VRAM, or with all
the others into CPU memory, the engine is idle, or it has waited for as long as a client may be left
waiting. It is let in as well where what has to go for it comes back sooner than the job's own turn
would. A turn is *new* until one of its job has had blocks. The rules are in
``policies.admission.holding``.

A job that has started is never held.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tiered_kv.connectors.runtime.base import BlockPool, EngineFacts
from tiered_kv.connectors.runtime.pins.pin_table import PinTable
from tiered_kv.connectors.runtime.turn import LiveTurns, Turn
from tiered_kv.policies.admission.holding import (
    Room,
    fits,
    gives_too_little,
    had_better_wait,
    is_settled,
    may_wait,
    overflow,
)
from tiered_kv.policies.admission.job_demand import mean_context
from tiered_kv.policies.admission.working_set import JobDemand, JobForecast, Overcommit
from tiered_kv.policies.base import JobKey
from tiered_kv.policies.distribution import Forecast

from .active_jobs import ActiveJobs
from .restore_price import RestorePrice


class Admission:
    """Admission of new jobs. One thread.

    Args:
        max_wait_s: time after which a job is let in, whatever it needs, seconds.
        pool: the engine's block pool.
        slots: pages that CPU memory holds, those of running jobs too.
        turns: the live requests.
        gap_forecast: gives the forecast of the gap of a job that is away; None if there is none.
        job_forecast: forecast of how jobs go on.
        restore_price: tells what requests lose while contexts come back.
        clock: monotonic seconds.

    Attributes:
        jobs: jobs that have started.
        overcommit: share of the pool that is given out.
        refused: number of new jobs that had to wait.
        held: requests of jobs that wait for room.
    """

    def __init__(
        self,
        facts: EngineFacts,
        max_wait_s: float,
        pins: PinTable,
        pool: BlockPool,
        slots: int,
        turns: LiveTurns,
        gap_forecast: Callable[[JobKey], Forecast | None],
        job_forecast: JobForecast,
        restore_price: RestorePrice,
        clock: Callable[[], float],
    ) -> None:
        self.jobs = ActiveJobs(facts, pins, slots, gap_forecast, job_forecast, clock)
        self.overcommit = Overcommit()
        self.refused = 0
        self.held: set[str] = set()
        self._facts = facts
        self._max_wait_s = max_wait_s
        self._restore_price = restore_price
        self._pool = pool
        self._slots = slots
        self._turns = turns
        self._clock = clock
        self._refused_at = -math.inf
        self._changed = True

    @property
    def num_active(self) -> int:
        """Number of active jobs."""
        return len(self.jobs)

    @property
    def share(self) -> float:
        """Share of the pool that is given out."""
        return self.overcommit.share

    # -- what happens to jobs -----------------------------------------------------------

    def on_arrived(self, turn: Turn) -> bool:
        """Take in a turn: of a job that has started, or of one that may be held.

        Returns:
            True if its job was dormant. It is the youngest now.
        """
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
        self._settled(turn)
        turn.hold.ended_at = self._clock()
        job, unit = _job_of(turn), self._facts.hit_tokens
        if job not in self.jobs:
            self.jobs.on_started(job, turn)
            return
        self.jobs.on_turn_started(job)
        if turn.gap.kept and not turn.hold.was_dormant:  # then no room was kept for it
            source = turn.source
            found, whole = source.vram_tokens + source.cpu_tokens, turn.pages.shared_tokens
            lost = whole - found if found + unit < whole else 0  # its last block may lack
            pool = self._facts.pool_tokens
            self.overcommit.returned((whole - lost) / pool, lost / pool)

    def on_joined(self, turn: Turn) -> None:
        """Take in that another turn of the job has started, and with it the job."""
        self._changed = True
        turn.hold.new = False
        self.held.discard(turn.request_id)
        self.jobs.on_joined(_job_of(turn), turn)

    def on_ended(self, turn: Turn, *, over: bool, gone: bool) -> None:
        """Take in the end of a turn.

        Args:
            over: True if its job ended as well.
            gone: True if the client went away, perhaps for good.
        """
        self._settled(turn)
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
        """True if a new job has room, or makes it at a price that is lower than its own wait."""
        room = Room(self._facts.usable_blocks, self._slots, self.overcommit.share)
        peak = self.jobs.peak(need, salt=salt)
        whole = self.jobs.peak(need, anywhere=True, salt=salt) if self._slots else 0.0
        if fits(room, peak, whole):
            return True
        context = mean_context(need)
        displaced = min(context, overflow(room, peak, whole))
        per_token = self._facts.blocks_per_token
        tokens = int(context / per_token) if per_token else 0
        lost_s = self._restore_price.lost_s(tokens, displaced)
        return not had_better_wait(lost_s, self.jobs.pace.cycle_s)

    def refuse(self, turn: Turn) -> None:
        """The turn has to wait: each counts once."""
        if not turn.hold.refused:
            turn.hold.refused = True
            self.refused += 1
            self.held.add(turn.request_id)

    def blocks_by_salt(self) -> dict[str, float]:
        """Blocks of the contexts of each salt's active jobs."""
        return self.jobs.blocks_by_salt()

    def first_blocks(self, turn: Turn) -> float:
        """Blocks that a new job needs for its first turn."""
        return self.jobs.demand_of_new(turn).blocks

    def demand(self) -> float:
        """The most blocks that the jobs that have started, and those let in, are heading for."""
        return self.jobs.peak()

    def demand_with_pin(self, blocks: int, job: JobKey | None) -> float:
        """:meth:`demand` if a job whose turn has just ended keeps so many blocks while it is away;
        those that started after it are left out."""
        return self.jobs.peak_with_pin(blocks, job)


def _job_of(turn: Turn) -> JobKey:
    """A request without a job is one of its own."""
    return turn.job.key if turn.job is not None else JobKey("", f"(request) {turn.request_id}")
