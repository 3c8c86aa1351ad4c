"""The order of requests by their jobs: the one that goes first, is held, or is preempted.

The engine's scheduler asks for it if it is ours; else the question ``match`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tiered_kv.connectors.runtime.base import BlockPool
from tiered_kv.connectors.runtime.live_turns import LiveTurns
from tiered_kv.connectors.runtime.pins.pin_table import PinTable
from tiered_kv.connectors.runtime.turn import Turn, job_started_at
from tiered_kv.policies.admission.job_order import (
    Place,
    is_tight,
    one_too_many,
    parked_rank,
    running_rank,
    waiting_rank,
)

from .gate import Admission
from .no_admission import NoAdmission


class JobQueue:
    """Answers about the live requests. One thread.

    Args:
        turns: the live requests.
        pool: the engine's block pool.
        prefill_blocks: blocks that a step's prefills may take.
        clock: monotonic seconds.

    Attributes:
        parks: True if the scheduler parks the requests that are held, so that ``match`` need not
            hold them.
        ranks_changed: True if ranks of parked requests have changed since somebody looked.
    """

    def __init__(
        self,
        turns: LiveTurns,
        admission: Admission | NoAdmission,
        pins: PinTable,
        pool: BlockPool,
        prefill_blocks: int,
        clock: Callable[[], float],
    ) -> None:
        self.parks = self.ranks_changed = False
        self._turns = turns.by_id
        self._admission = admission
        self._pins = pins
        self._pool = pool
        self._prefill_blocks = prefill_blocks
        self._clock = clock
        self._held: dict[str, None] = {}  # in the engine's queue, the longest held first

    @property
    def held(self) -> Sequence[str]:
        """Requests held in the engine's own queue, the longest held first."""
        return tuple(self._held)

    def holds(self, request_id: str, *, behind: bool = False) -> bool:
        """True if a request of a new job has to wait for room, or ``behind`` others that came
        before: a small one does not overtake."""
        turn = self._turns.get(request_id)
        return turn is not None and self._admission.holds(turn, behind=behind)

    def lets_overdue_in(self, request_id: str) -> bool:
        """Let a held request in that has waited for as long as it may, whoever is to go before it;
        False if it has not."""
        turn = self._turns.get(request_id)
        return turn is None or self._admission.lets_overdue_in(turn)

    def holds_in_queue(self, turn: Turn) -> bool:
        """True if the engine shall ask again for a new job, of which its queue can hold a few."""
        if self.parks or not turn.hold.new:
            return False
        if not self._admission.holds(turn):
            self.on_left(turn.request_id)
            return False
        self._held.setdefault(turn.request_id)
        if (longest := one_too_many(self._held)) is not None:
            self._admission.let_in(self._turns[longest])
            self.on_left(longest)
        return True

    def let_all_in(self) -> None:
        """Let everybody in, for good."""
        self._admission = NoAdmission()
        self._held.clear()

    def on_left(self, request_id: str) -> None:
        """Forget a request that was admitted, or is over."""
        self._held.pop(request_id, None)

    def parked_rank(self, request_id: str) -> tuple[bool, float]:
        """Rank of a held request: turns of started jobs by the start of their jobs, then new
        jobs as they came."""
        turn = self._turns.get(request_id)
        if turn is None:
            return parked_rank(Place(self._clock(), self._clock(), new=True))
        return parked_rank(Place(job_started_at(turn), turn.arrived_at, new=turn.hold.new))

    def waiting_rank(self, request: Any) -> tuple[int, float, float]:
        """Rank of a waiting request: those that were preempted, those whose KV is held or on its
        way, the others; each by when their jobs started."""
        turn = self._turns.get(request.request_id)
        if turn is None:
            return waiting_rank(Place(self._clock(), request.arrival_time))
        has_kv = bool(turn.tiers.awaits) or (turn.job is not None and turn.job.key in self._pins)
        preempted = request.num_preemptions > 0
        started_at = job_started_at(turn)
        return waiting_rank(
            Place(started_at, request.arrival_time, preempted=preempted, has_kv=has_kv)
        )

    def is_tight(self, running: int) -> bool:
        """True if one of this many running requests may be preempted in this step."""
        return is_tight(self._pool.num_free(), running, self._prefill_blocks)

    def running_rank(self, request: Any) -> tuple[bool, float]:
        """Rank of a running request by its loss if preempted: a last turn, then the oldest job."""
        turn = self._turns.get(request.request_id)
        if turn is None:
            return running_rank(Place(self._clock(), self._clock()))
        last = turn.hints.is_last_step
        return running_rank(Place(job_started_at(turn), turn.arrived_at, is_last_step=last))
