"""Which request goes first, which job is held, and who is preempted: by jobs.

Asked by ``ContinuumScheduler``, or by the match hook where vLLM's own scheduler runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tiered_kv.connectors.runtime.base import BlockPool
from tiered_kv.connectors.runtime.pins.pin_table import PinTable
from tiered_kv.connectors.runtime.turn import Turn, born

from .gate import Admission

MOST_HELD_IN_QUEUE = 8
"""New jobs held at once by vLLM's own scheduler: it looks each one's prefix up in every step."""

TIGHT_TOKENS = 4096
"""Room in free blocks, beside one for each running request, below which the order of victims
matters: a step's prefills may take as much."""


class JobQueue:
    """Answers about the live requests. One thread.

    Args:
        turns: live requests by id.
        admission: None holds nobody.
        pool: vLLM's block pool.
        tight_blocks: that many free ones may go to a step's prefills.
        clock: monotonic seconds.

    Attributes:
        parks: the scheduler parks those that are held, so that the match hook need not.
        ranks_changed: of parked requests, since somebody looked.
    """

    def __init__(
        self,
        turns: Mapping[str, Turn],
        admission: Admission | None,
        pins: PinTable,
        pool: BlockPool,
        tight_blocks: int,
        clock: Callable[[], float],
    ) -> None:
        self.parks = self.ranks_changed = False
        self._turns = turns
        self._admission = admission
        self._pins = pins
        self._pool = pool
        self._tight_blocks = tight_blocks
        self._clock = clock
        self._held: dict[str, None] = {}  # in vLLM's queue, the longest held first

    def holds(self, request_id: str, *, behind: bool = False) -> bool:
        """Whether a request has to wait for room; one of a new job also ``behind`` others that came
        before: a small one does not overtake."""
        turn = self._turns.get(request_id)
        if turn is None or self._admission is None:
            return False
        if behind and turn.new:
            self._admission.refuse(turn)
            return True
        return self._admission.holds(turn)

    def lets_overdue_in(self, request_id: str) -> bool:
        """Let a held request in that has waited for as long as it may, whoever is to go before it;
        whether it was."""
        turn = self._turns.get(request_id)
        return turn is None or self._admission is None or self._admission.lets_overdue_in(turn)

    def holds_in_queue(self, turn: Turn) -> bool:
        """Whether vLLM shall ask again for a new job, of which its queue can hold a few."""
        if self.parks or self._admission is None or not turn.new:
            return False
        if not self._admission.holds(turn):
            self.left(turn.request_id)
            return False
        self._held.setdefault(turn.request_id)
        if len(self._held) > MOST_HELD_IN_QUEUE:
            longest = next(iter(self._held))
            self._admission.let_in(self._turns[longest])
            self.left(longest)
        return True

    def let_all_in(self) -> None:
        """Nobody is held any more, for good."""
        self._admission = None
        self._held.clear()

    def left(self, request_id: str) -> None:
        """A request was admitted, or is over."""
        self._held.pop(request_id, None)

    def parked_rank(self, request_id: str) -> tuple[bool, float]:
        """In which order held requests are let in: those in mid-course, by when their jobs began,
        then new jobs as they came."""
        turn = self._turns.get(request_id)
        if turn is None:
            return True, self._clock()
        return turn.new, turn.arrived_at if turn.new else born(turn)

    def waiting_rank(self, request: Any) -> tuple[int, float, float]:
        """In which order waiting requests are taken: those that were preempted, those whose KV
        is held or on its way, the others; by when their jobs began."""
        turn = self._turns.get(request.request_id)
        if turn is None:
            return 2, self._clock(), request.arrival_time
        ready = bool(turn.awaits) or (turn.job is not None and turn.job.key in self._pins)
        group = 0 if request.num_preemptions else 1 if ready else 2
        return group, born(turn), request.arrival_time

    def is_tight(self, running: int) -> bool:
        """Whether one of so many running requests may be preempted in this step."""
        return self._pool.num_free() < self._tight_blocks + running

    def running_rank(self, request: Any) -> tuple[bool, float]:
        """Who loses most by being preempted: a last turn, then the oldest job."""
        turn = self._turns.get(request.request_id)
        if turn is None:
            return True, self._clock()
        return not turn.hints.is_last_step, born(turn)
