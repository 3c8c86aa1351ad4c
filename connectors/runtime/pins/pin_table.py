"""Pins: extra references on VRAM blocks, with a deadline and a budget.

A pinned block stays hashed, so vLLM's own prefix cache hits it. Pins are soft. They are released at
their deadline, when the job's next turn has taken over their blocks, and whenever another request
needs the blocks more. Only the scheduler thread may touch the block pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
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

_ID = attrgetter("block_id")
RELEASED_AT_ONCE = 2048
"""Maximum number of blocks of an expired pin that are released in one step. Releasing them takes
about a millisecond."""


class Lease(NamedTuple):
    """The time for which a hint keeps a job's pin, whatever the policy decides meanwhile.

    Attributes:
        until: end of the lease, seconds on the scheduler half's clock.
        value: value of the pin while only the lease keeps it.
    """

    until: float
    value: PinValue


@dataclass(slots=True)
class _Pin:
    blocks: list[Block]
    deadline: float
    view: PinView
    lease: Lease | None = None


class PinFacts(NamedTuple):
    """A pin's size and deadline.

    Attributes:
        blocks: number of blocks that the pin holds.
        deadline: seconds on the scheduler half's clock, lease included; infinite while the job's
            turn is queued.
    """

    blocks: int
    deadline: float


class PinTable:
    """The pin of each job that has one.

    Args:
        pool: the engine's blocks.
        budget: number of distinct blocks that all pins together may hold.

    Attributes:
        on_end: called with the job of every released pin, and the reason.
    """

    def __init__(self, pool: BlockPool, budget: int) -> None:
        self._pool = pool
        self.budget = budget
        self.on_end: Callable[[JobKey, PinEnd], None] = lambda job, why: None
        self._pins: dict[JobKey, _Pin] = {}
        self._held = set[int]()  # ids of the blocks that pins hold
        self._shared = Counter[int]()  # block id -> further pins that hold it
        self._next_deadline = float("inf")

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, job: JobKey) -> bool:
        return job in self._pins

    @property
    def held_blocks(self) -> int:
        """Number of pinned blocks; blocks shared by pins count once."""
        return len(self._held)

    def holds(self, block: Block) -> bool:
        """True if any pin holds the block."""
        return block.block_id in self._held

    def look(self, job: JobKey) -> PinFacts | None:
        """Return the size and deadline of a job's pin; None if the job has no pin."""
        pin = self._pins.get(job)
        if pin is None:
            return None
        until = pin.deadline if pin.lease is None else max(pin.deadline, pin.lease.until)
        return PinFacts(len(pin.blocks), until)

    def prefix(self, job: JobKey) -> Sequence[Block]:
        """Return the blocks of a job's pin, the start of its context; empty if the job has no pin,
        or if a hint added other blocks."""
        pin = self._pins.get(job)
        return pin.blocks if pin is not None and pin.lease is None else ()

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
        """Pin a job's blocks until ``deadline``. Replaces the job's previous pin.

        A context over budget is pinned from its start, because the tail alone would not be a hit.

        Args:
            blocks: full, hashed blocks in the order of the context.
            deadline: on the scheduler half's clock, seconds.
            started_at: start of the job, seconds.
            value: value of the pin.
            whole: True if pinning only a part of the blocks is useless.

        Returns:
            Number of blocks that are pinned.
        """
        self.release(job)
        kept = self._within_budget(blocks)
        if not kept or (whole and len(kept) < len(blocks)):
            return 0
        self._hold(kept)
        self._pins[job] = _Pin(kept, deadline, PinView(value, len(kept), started_at))
        self._next_deadline = min(self._next_deadline, deadline)
        return len(kept)

    def _hold(self, blocks: Sequence[Block]) -> None:
        self._pool.hold(blocks)
        ids = set(map(_ID, blocks))
        self._shared.update(self._held & ids)
        self._held |= ids

    def lease(self, job: JobKey, blocks: Sequence[Block], lease: Lease, started_at: float) -> int:
        """Pin a job's blocks until the end of the lease. If the job has a pin already, the blocks
        that it lacks are added, and the pin is kept at least until that time. ``pin`` describes the
        arguments and the result."""
        pin = self._pins.get(job)
        if pin is None:
            self.pin(job, blocks, lease.until, started_at, lease.value)
            pin = self._pins.get(job)
        else:
            mine = set(map(_ID, pin.blocks))
            more = self._within_budget([one for one in blocks if one.block_id not in mine])
            self._hold(more)
            pin.blocks += more
            pin.view = replace(pin.view, blocks=len(pin.blocks))
        if pin is None:
            return 0
        if pin.lease is None or pin.lease.until < lease.until:
            pin.lease = lease
        return len(pin.blocks)

    def leased_blocks(self, salt: str, *, besides: JobKey) -> int:
        """Return the number of blocks of the leased pins of the jobs with this salt, except the job
        ``besides``."""
        leased = (job for job, pin in self._pins.items() if pin.lease is not None)
        jobs = [job for job in leased if job.salt == salt and job != besides]
        return sum(len(self._pins[job].blocks) for job in jobs)

    def revoke(self, job: JobKey, now: float) -> None:
        """Release a job's pin because the decision for it has changed, unless a lease keeps it."""
        if not self._falls_back(job, now):
            self.release(job, PinEnd.REVISED)

    def _falls_back(self, job: JobKey, now: float) -> bool:
        """Keep the job's pin only for its lease from now on. Returns False if the pin has no lease
        that still lasts."""
        pin = self._pins.get(job)
        if pin is None or pin.lease is None or pin.lease.until <= now:
            return False
        self.revise(job, *pin.lease)
        return True

    def _within_budget(self, blocks: Sequence[Block]) -> list[Block]:
        room, held = self.budget - len(self._held), self._held
        if len(blocks) <= room:
            return list(blocks)
        return list(blocks[: within_budget((block.block_id in held for block in blocks), room)])

    def revise(self, job: JobKey, deadline: float, value: PinValue) -> None:
        """Change the deadline and the value of a job's pin. Ignored if the job has no pin."""
        pin = self._pins.get(job)
        if pin is not None:
            pin.deadline = deadline
            pin.view = replace(pin.view, value=value)
            self._next_deadline = min(self._next_deadline, deadline)

    def on_arrived(self, job: JobKey) -> None:
        """Keep a job's pin until the job's queued turn has been allocated blocks, because no other
        pin saves more time. Ignored if the job has no pin."""
        self.revise(job, float("inf"), PinValue(PinState.ARRIVED))

    def devalue(self, job: JobKey) -> None:
        """Make a job's pin the first to be released, for any request, because the pin is no longer
        expected to be useful. Ignored if the job has no pin."""
        pin = self._pins.get(job)
        if pin is not None:
            pin.view = replace(pin.view, value=PinValue(PinState.WORTHLESS))

    def release(self, job: JobKey, why: PinEnd = PinEnd.RETURNED) -> bool:
        """Release a job's pin. Returns False if the job has no pin."""
        pin = self._pins.pop(job, None)
        if pin is None:
            return False
        self._give_back(pin.blocks)
        self.on_end(job, why)
        return True

    def _give_back(self, blocks: Sequence[Block]) -> None:
        """Drop a pin's references to blocks."""
        ids = set(map(_ID, blocks))
        for one in self._shared.keys() & ids:
            ids.remove(one)
            self._shared[one] -= 1
            if not self._shared[one]:
                del self._shared[one]
        self._held -= ids
        self._pool.release(reversed(blocks))  # tails are evicted before heads

    def expire(self, now: float) -> int:
        """Release every pin whose deadline and lease have passed. A large pin is released over
        several calls, the end of the context first. Returns the number of pins whose deadline has
        passed."""
        if now < self._next_deadline:
            return 0
        late = [job for job, pin in self._pins.items() if pin.deadline <= now]
        for job in late:
            if self._falls_back(job, now):
                continue
            pin = self._pins[job]
            if len(pin.blocks) <= RELEASED_AT_ONCE:
                self.release(job, PinEnd.EXPIRED)
                continue
            self._give_back(pin.blocks[-RELEASED_AT_ONCE:])
            del pin.blocks[-RELEASED_AT_ONCE:]
            worthless = PinValue(PinState.WORTHLESS)  # until the job's next turn arrives
            pin.view = replace(pin.view, value=worthless, blocks=len(pin.blocks))
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
        """Release pins in ``release_order`` until ``enough()`` is true, or no further pin may be
        released. Returns the number of released pins.

        Args:
            enough: returns True once enough blocks are free.
            spare: job that needs the blocks; its own pin is released last.
            waiter_started_at: start of the job that waits for pins worth waiting for, seconds; None
                if every pin may be released.
            why: reason for the releases.
            greedy: salts whose pins may all be released.
        """
        if enough():  # the usual case; called for every waiting request in every step
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
        """Release every pin. Returns the number of released pins."""
        return self.make_room(lambda: False, why=PinEnd.RESET)
