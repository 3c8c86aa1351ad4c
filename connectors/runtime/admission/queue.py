"""The order of requests by their jobs: which request is admitted next, is held back, or is
preempted.

If the engine runs ``ContinuumScheduler``, the scheduler queries this order; otherwise
``SchedulerHalf.match`` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.fairness import Fairness
from tiered_kv.connectors.runtime.pins.pin_table import PinTable
from tiered_kv.connectors.runtime.turn import Turn, job_started_at
from tiered_kv.policies.admission.job_order import (
    QueuePosition,
    parked_rank,
    running_rank,
    waiting_rank,
)
from tiered_kv.policies.base import job_scope

from .gate import Admission

MOST_HELD_IN_QUEUE = 8
"""Maximum number of new jobs held back in the engine's own queue, because the engine looks up the
prefix of each such job in every step."""
MOST_LET_IN = 64
"""Maximum number of jobs that one step admits because ``MOST_HELD_IN_QUEUE`` newer ones are held
back. Beyond this number, that step holds back no further jobs, because the engine stops at the
first request that finds no blocks."""
TIGHT_TOKENS = 4096
"""Free space, in tokens, below which the order of preemption matters, because the prefills of one
step may need that much. One block per running request is needed in addition."""


class JobQueue:
    """Orders the live requests. Used on one thread.

    Args:
        fairness: bounds waits and divides VRAM equally among clients.

    Attributes:
        parks: True if the engine's scheduler parks requests that are held back, so that ``match``
            need not hold them back. Written by ``scheduler``.
        ranks_changed: True if the order of parked requests may have changed since they were sorted.
            Cleared by the engine's scheduler.
    """

    def __init__(
        self,
        engine: EngineState,
        admission: Admission,
        pins: PinTable,
        fairness: Fairness,
    ) -> None:
        self.parks = self.ranks_changed = False
        self._lets_all_in = False
        self._turns = engine.turns.by_id
        self._admission = admission
        self._pins = pins
        self._fairness = fairness
        self._pool = engine.pool
        self._prefill_blocks = TIGHT_TOKENS // engine.facts.block_size
        self._clock = engine.clock
        self._held: dict[str, None] = {}  # in the engine's queue, longest held first
        self._let_in, self._let_in_at = 0, -1  # jobs admitted from ``_held`` in that step
        self._salts: set[str] = set()  # salts of parked requests, and perhaps others
        self._order_until = math.inf  # when the next waiting request becomes overdue

    @property
    def held(self) -> Sequence[str]:
        """Ids of the requests held back in the engine's own queue; the request held back longest
        comes first."""
        return tuple(self._held)

    def holds(self, request_id: str, *, behind: bool = False) -> bool:
        """True if a request of a new job has to wait for space or, with ``behind``, for jobs that
        arrived earlier, so that a small job does not overtake a large one. False for an unknown
        request."""
        turn = self._turns.get(request_id)
        if turn is None or self._lets_all_in:
            return False
        return self._admission.holds(turn, behind=behind)

    def lets_overdue_in(self, request_id: str) -> bool:
        """Admit a held-back request that has waited for the maximum time, regardless of order.
        Returns False if the request has not waited for that long, and True for an unknown
        request."""
        turn = self._turns.get(request_id)
        return turn is None or self._lets_all_in or self._admission.lets_overdue_in(turn)

    def holds_in_queue(self, turn: Turn, step: int) -> bool:
        """True if the engine must ask again later whether to run a new job's turn. At most
        ``MOST_HELD_IN_QUEUE`` new jobs are held back in the engine's queue: beyond that, the job
        that was held back longest is admitted.

        Args:
            step: number of the engine's step.
        """
        if self.parks or self._lets_all_in or not turn.hold.new:
            return False
        if step != self._let_in_at:
            self._let_in, self._let_in_at = 0, step
        if self._let_in >= MOST_LET_IN or not self._admission.holds(turn):
            self.on_left(turn.request_id)
            return False
        self._held.setdefault(turn.request_id)
        if len(self._held) > MOST_HELD_IN_QUEUE:
            longest = next(iter(self._held))
            self._admission.let_in(self._turns[longest])
            self._let_in += 1
            self.on_left(longest)
        return True

    def let_all_in(self) -> None:
        """Admit every request, permanently. The gate is no longer consulted, because it may be at
        fault."""
        self._lets_all_in = True
        self._held.clear()

    def on_left(self, request_id: str) -> None:
        """Forget a request that was admitted, or has finished."""
        self._held.pop(request_id, None)
        self.ranks_changed |= len(self._salts) > 1  # the blocks of its client have changed

    def on_parked(self, request_id: str) -> None:
        """Record that the engine's scheduler has parked a new job. It becomes the last of its
        client's parked jobs."""
        self._salts.add(self._salt(request_id))
        self.ranks_changed |= len(self._salts) > 1

    def in_parked_order(self, parked: Iterable[str]) -> list[str]:
        """Sort held-back requests in the order in which they are admitted. Turns of started jobs
        come first, by the start of their jobs. New jobs follow: first the jobs of the client with
        the fewest blocks, then by arrival."""
        arrivals = {request_id: self._fairness.arrived_at(request_id) for request_id in parked}
        by_arrival = sorted(arrivals, key=arrivals.__getitem__)
        salts = {request_id: self._salt(request_id) for request_id in by_arrival}
        taken = self._blocks_by_salt(set(salts.values()))
        ranks = dict[str, tuple[bool, float, float]]()
        for request_id, salt in salts.items():
            turn, at = self._turns.get(request_id), arrivals[request_id]
            started_at = job_started_at(turn) if turn is not None else at
            new, blocks = turn is None or turn.hold.new, taken.get(salt, 0.0)
            ranks[request_id] = parked_rank(
                QueuePosition(started_at, at, new=new, client_blocks=blocks)
            )
            if turn is not None and salt in taken:
                taken[salt] += self._admission.jobs.need_of_new(turn)
        return sorted(ranks, key=ranks.__getitem__)

    def _blocks_by_salt(self, salts: set[str]) -> dict[str, float]:
        """Return the number of blocks that the jobs of each non-empty salt in ``salts`` have;
        empty for fewer than two salts, because then only the order of arrival matters."""
        self._salts = salts
        if len(salts) < 2:
            return {}
        taken = self._admission.jobs.blocks_by_salt()
        return {salt: taken.get(salt, 0.0) for salt in salts if salt}

    def _salt(self, request_id: str) -> str:
        turn = self._turns.get(request_id)
        return job_scope(turn.request.cache_salt) if turn is not None else ""

    def in_waiting_order(self, waiting: Iterable[Any]) -> list[Any]:
        """Sort the engine's waiting requests in the order in which they are admitted; see
        ``waiting_rank``. Requests that would take their client over its share come last."""
        fairness = self._fairness
        overdue_until = fairness.overdue_until()
        seniority_s = fairness.seniority_s if fairness.seats_short else math.inf
        ranked = sorted(
            waiting,
            key=lambda one: waiting_rank(self._waiting_position(one, overdue_until), seniority_s),
        )
        self._order_until = fairness.next_overdue_at()
        over = fairness.over_share(one.request_id for one in ranked)
        if not over:
            return ranked
        return sorted(ranked, key=lambda one: over.get(one.request_id, (0.0, 0.0)))

    @property
    def order_is_stale(self) -> bool:
        """True if the waiting requests must be sorted again although none arrived."""
        return self._fairness.shares_changed or self._clock() >= self._order_until

    def _waiting_position(self, request: Any, overdue_until: float) -> QueuePosition:
        turn, preempted = self._turns.get(request.request_id), request.num_preemptions > 0
        if turn is None:
            at = self._fairness.arrived_at(request.request_id)
            return QueuePosition(at, at, preempted=preempted, overdue=at <= overdue_until)
        job, at = turn.job, turn.arrived_at
        return QueuePosition(
            at if job is None else job.started_at,
            at,
            preempted=preempted,
            overdue=at <= overdue_until,
            has_kv=bool(turn.tiers.awaits) or (job is not None and job.key in self._pins),
        )

    def is_tight(self, running: int) -> bool:
        """True if one of ``running`` running requests may be preempted in this step."""
        return self._pool.num_free() < self._prefill_blocks + running

    def running_rank(self, request: Any) -> tuple[bool, float]:
        """Return the rank of a running request; see ``job_order.running_rank``."""
        turn = self._turns.get(request.request_id)
        at = self._fairness.arrived_at(request.request_id)
        started_at = job_started_at(turn) if turn is not None else at
        last = turn is not None and turn.hints.is_last_step
        return running_rank(QueuePosition(started_at, at, is_last_step=last))
