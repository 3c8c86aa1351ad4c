"""Pins: extra references on VRAM blocks, with a deadline and a budget.

A pinned block stays hashed, so vLLM's own prefix cache hits it. Pins are soft: they go
when their time is up, when the job's next turn has taken its blocks over, and whenever
somebody needs the blocks more. Only the scheduler thread may touch the block pool.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tiered_kv.connectors.runtime.base import Block, BlockPool
from tiered_kv.policies.base import JobKey
from tiered_kv.policies.pins.release_order import (
    PinState,
    PinValue,
    PinView,
    release_order,
    within_budget,
)
from tiered_kv.trace.turn_record import PinEnd


@dataclass(slots=True)
class _Pin:
    blocks: list[Block]
    deadline: float
    view: PinView


class PinFacts(NamedTuple):
    """A pin as others see it.

    Attributes:
        blocks: blocks that it holds.
        deadline: on the scheduler half's clock, seconds; infinite while its job's turn waits.
    """

    blocks: int
    deadline: float


class PinTable:
    """Pins by job, at most one each.

    Args:
        pool: the engine's blocks.
        budget: number of distinct blocks that all pins together may hold.

    Attributes:
        on_end: told of every pin that ends, and why.
    """

    def __init__(self, pool: BlockPool, budget: int) -> None:
        self._pool = pool
        self.budget = budget
        self.on_end: Callable[[JobKey, PinEnd], None] = lambda job, why: None
        self._pins: dict[JobKey, _Pin] = {}
        self._held: dict[int, int] = {}  # block id -> pins that hold it
        self._next_deadline = float("inf")

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, job: JobKey) -> bool:
        return job in self._pins

    @property
    def held_blocks(self) -> int:
        """Distinct blocks under a pin; blocks shared by pins count once."""
        return len(self._held)

    def look(self, job: JobKey) -> PinFacts | None:
        """A job's pin; None if it has none."""
        pin = self._pins.get(job)
        return PinFacts(len(pin.blocks), pin.deadline) if pin is not None else None

    def blocks(self) -> dict[JobKey, int]:
        """Number of blocks of each pin."""
        return {job: len(pin.blocks) for job, pin in self._pins.items()}

    def pin(
        self,
        job: JobKey,
        blocks: Sequence[Block],
        deadline: float,
        started_at: float,
        value: PinValue,
        *,
        whole: bool = False,
    ) -> int:
        """Hold a job's blocks until ``deadline``, in place of what it held before.

        A context over budget is pinned from its start: the tail alone would be no hit.

        Args:
            blocks: full, hashed blocks in the order of the context.
            deadline: on the scheduler half's clock, seconds.
            started_at: start of the job, seconds.
            value: value of the pin.
            whole: True if a part of the blocks is of no use.

        Returns:
            Number of the blocks that are pinned.
        """
        self.release(job)
        kept = self._within_budget(blocks)
        if not kept or (whole and len(kept) < len(blocks)):
            return 0
        self._pool.hold(kept)
        held = self._held
        ids = dict.fromkeys([block.block_id for block in kept], 1)
        others = [(one, held[one] + 1) for one in ids.keys() & held.keys()]
        held.update(ids)
        held.update(others)
        self._pins[job] = _Pin(kept, deadline, PinView(value, len(kept), started_at))
        self._next_deadline = min(self._next_deadline, deadline)
        return len(kept)

    def _within_budget(self, blocks: Sequence[Block]) -> list[Block]:
        room, held = self.budget - len(self._held), self._held
        if len(blocks) <= room:
            return list(blocks)
        return list(blocks[: within_budget((block.block_id in held for block in blocks), room)])

    def revise(self, job: JobKey, deadline: float, value: PinValue) -> None:
        """Change a pin's deadline and value. Ignored if the job has none."""
        pin = self._pins.get(job)
        if pin is not None:
            pin.deadline = deadline
            pin.view = replace(pin.view, value=value)
            self._next_deadline = min(self._next_deadline, deadline)

    def on_arrived(self, job: JobKey) -> None:
        """Keep a pin until its job's turn, which is in the queue, has its blocks: nothing saves
        more. Ignored if the job has none."""
        self.revise(job, float("inf"), PinValue(PinState.ARRIVED))

    def devalue(self, job: JobKey) -> None:
        """Have a pin go first, and for anybody: nothing is expected of it any more. Ignored if
        the job has none."""
        pin = self._pins.get(job)
        if pin is not None:
            pin.view = replace(pin.view, value=PinValue(PinState.WORTHLESS))

    def release(self, job: JobKey, why: PinEnd = PinEnd.RETURNED) -> bool:
        """Give a job's references back; False if it has none."""
        pin = self._pins.pop(job, None)
        if pin is None:
            return False
        for block in pin.blocks:
            count = self._held.pop(block.block_id) - 1
            if count:
                self._held[block.block_id] = count
        self._pool.release(reversed(pin.blocks))  # tails are evicted before heads
        self.on_end(job, why)
        return True

    def expire(self, now: float) -> int:
        """Release every pin whose deadline has passed; their number."""
        if now < self._next_deadline:
            return 0
        late = [job for job, pin in self._pins.items() if pin.deadline <= now]
        for job in late:
            self.release(job, PinEnd.EXPIRED)
        self._next_deadline = min(
            (pin.deadline for pin in self._pins.values()), default=float("inf")
        )
        return len(late)

    def make_room(
        self,
        enough: Callable[[], bool],
        spare: JobKey | None = None,
        waiter_started_at: float | None = None,
        why: PinEnd = PinEnd.PRESSURE,
        *,
        greedy: Collection[str] = (),
    ) -> int:
        """Release pins in ``release_order`` until ``enough()``, or no more may go; their number.

        Args:
            spare: the job that the room is for; its pin goes last.
            waiter_started_at: start of the job that waits for pins that are worth it, seconds;
                None if all may go.
            greedy: salts whose pins may all go.
        """
        if enough():  # as nearly always: it is asked for every waiting request in every step
            return 0
        views = {job: pin.view for job, pin in self._pins.items()}
        order = release_order(views, spare, waiter_started_at, greedy)
        released = 0
        for job in order:
            self.release(job, why)
            released += 1
            if enough():
                break
        return released

    def release_all(self) -> int:
        """Release every pin; their number."""
        return self.make_room(lambda: False, why=PinEnd.RESET)
