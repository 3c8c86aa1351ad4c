"""Pins: extra references on VRAM blocks, with a deadline and a budget.

A pinned block stays hashed, so vLLM's own prefix cache hits it. Pins are soft: they go
when their time is up, when the job's next turn has taken its blocks over, and whenever
somebody needs the blocks more. Only the scheduler thread may touch the block pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiered_kv.connectors.runtime.base import Block, BlockPool
from tiered_kv.policies.base import JobKey

WORTH_A_WAIT = 0.5
"""A pin that earns less in a second is no reason for another job's turn to wait for that second.
Found in simulations: at 0.75 contexts of large models go too soon, at 0.35 small ones too late."""
WORTH_MAKING_OLDER_WAIT = 1.0
"""The same for turns of older jobs. They would not be the next to lose their KV, so that a second
of their waiting counts whole."""


@dataclass(slots=True)
class _Pin:
    blocks: list[Block]
    deadline: float
    born: float
    worth: float  # seconds that a block of it is expected to save
    earns: float


class PinTable:
    """At most one pin for each job.

    Args:
        pool: where references are taken and given back.
        budget: distinct blocks that all pins together may hold.
    """

    def __init__(self, pool: BlockPool, budget: int) -> None:
        self._pool = pool
        self.budget = budget
        self._pins: dict[JobKey, _Pin] = {}
        self._held: dict[int, int] = {}  # block id -> pins that hold it
        self._next_deadline = float("inf")

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, job: JobKey) -> bool:
        return job in self._pins

    def worth_a_wait(self, job: JobKey) -> bool:
        """Whether the job has a pin for which a younger one's turn may have to wait."""
        return job in self._pins and self._pins[job].earns >= WORTH_A_WAIT

    @property
    def held_blocks(self) -> int:
        """Distinct blocks under a pin; blocks shared by pins count once."""
        return len(self._held)

    def pin(
        self,
        job: JobKey,
        blocks: Sequence[Block],
        deadline: float,
        born: float,
        saves_s: float,
        earns: float,
    ) -> int:
        """Hold a job's blocks until ``deadline``, in place of what it held before.

        A context over budget is pinned from its start: the tail alone would be no hit.

        Args:
            blocks: full, hashed blocks in the order of the context.
            deadline: on the scheduler half's clock, seconds.
            born: when the job's first turn arrived.
            saves_s: seconds that the pin is expected to save. The pin that saves the least with
                a block gives way first; of equal ones, as those of a policy that forecasts
                nothing, the youngest job's.
            earns: seconds of requests that it saves in each second.

        Returns:
            How many of the blocks are pinned.
        """
        self.release(job)
        kept = self._within_budget(blocks)
        if not kept:
            return 0
        self._pool.hold(kept)
        held = self._held
        ids = dict.fromkeys([block.block_id for block in kept], 1)
        others = [(one, held[one] + 1) for one in ids.keys() & held.keys()]
        held.update(ids)
        held.update(others)
        self._pins[job] = _Pin(kept, deadline, born, saves_s / len(kept), earns)
        self._next_deadline = min(self._next_deadline, deadline)
        return len(kept)

    def _within_budget(self, blocks: Sequence[Block]) -> list[Block]:
        room, held = self.budget - len(self._held), self._held
        if len(blocks) <= room:
            return list(blocks)
        kept: list[Block] = []
        for block in blocks:
            if block.block_id not in held:
                if room <= 0:
                    break
                room -= 1
            kept.append(block)
        return kept

    def until(self, job: JobKey, deadline: float, saves_s: float, earns: float) -> None:
        """Hold what the job has pinned until then instead, to save so much. Ignored if it has
        nothing."""
        pin = self._pins.get(job)
        if pin is not None:
            pin.deadline = deadline
            pin.worth = saves_s / len(pin.blocks)
            pin.earns = earns
            self._next_deadline = min(self._next_deadline, deadline)

    def devalue(self, job: JobKey) -> None:
        """Have the job's pin go first, and for anybody: nothing is expected of it any more.
        Ignored if it has none."""
        pin = self._pins.get(job)
        if pin is not None:
            pin.worth = pin.earns = 0.0

    def release(self, job: JobKey) -> bool:
        """Give a job's references back; False if it has none."""
        pin = self._pins.pop(job, None)
        if pin is None:
            return False
        for block in pin.blocks:
            count = self._held.pop(block.block_id) - 1
            if count:
                self._held[block.block_id] = count
        self._pool.release(reversed(pin.blocks))  # tails are evicted before heads
        return True

    def expire(self, now: float) -> int:
        """Release every pin whose deadline has passed; returns how many."""
        if now < self._next_deadline:
            return 0
        late = [job for job, pin in self._pins.items() if pin.deadline <= now]
        for job in late:
            self.release(job)
        self._next_deadline = min(
            (pin.deadline for pin in self._pins.values()), default=float("inf")
        )
        return len(late)

    def make_room(
        self,
        enough: Callable[[], bool],
        spare: JobKey | None = None,
        waiter_born: float | None = None,
    ) -> int:
        """Release pins, the one that saves least first, until ``enough()`` or there are no more;
        returns how many went.

        Args:
            spare: goes last; it is the pin of the job that the room is for.
            waiter_born: when the job was that waits for pins that are worth it; None: all may go.
        """
        if enough():  # as nearly always: it is asked for every waiting request in every step
            return 0

        def goes(pin: _Pin) -> bool:
            if waiter_born is None or pin.earns < WORTH_A_WAIT:
                return True
            forecast = pin.earns < math.inf or pin.deadline == math.inf  # of a turn that queues
            keeps = forecast and pin.earns >= WORTH_MAKING_OLDER_WAIT
            return pin.born > waiter_born and not keeps

        found = {job: pin for job, pin in self._pins.items() if goes(pin)}
        order = sorted(found, key=lambda job: (job == spare, found[job].worth, -found[job].born))
        released = 0
        for job in order:
            self.release(job)
            released += 1
            if enough():
                break
        return released

    def release_all(self) -> int:
        """Release every pin; returns how many there were."""
        return self.make_room(lambda: False)
