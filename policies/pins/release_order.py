"""Pins: what one is worth, how much of a context it holds, and the order in which pins give way to
requests that find no blocks. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from tiered_kv.policies.base import Costs, JobKey
from tiered_kv.policies.distribution import Forecast
from tiered_kv.policies.pricing.pin_ttl import saved_per_second, saved_s

WORTH_A_WAIT = 0.5
"""Seconds of requests that a pin saves in each second, below which no other job's turn waits for
it. Found in simulations: at 0.75 contexts of large models go too soon, at 0.35 small ones too
late."""
WORTH_MAKING_OLDER_WAIT = 1.0
"""The same for turns of older jobs. They would not be the next to lose their KV, so that a second
of their waiting counts whole."""


class PinState(Enum):
    """Reason for which a pin is held."""

    UNPRICED = "unpriced"
    """Its job's return, by a policy that forecasts nothing."""
    HELD = "held"
    """Its job's return, as long as that pays."""
    ARRIVED = "arrived"
    """Blocks for its job's turn, which is in the queue."""
    WORTHLESS = "worthless"
    """Nobody in particular: its job has probably ended."""


@dataclass(frozen=True, slots=True)
class PinValue:
    """Value of a pin.

    Attributes:
        state: reason for which the pin is held.
        saves_s: time that it is expected to save, seconds; 0 unless it is HELD.
        saved_per_second: seconds of requests that it saves in each second; 0 unless it is HELD.
    """

    state: PinState
    saves_s: float = 0.0
    saved_per_second: float = 0.0

    @property
    def worth_a_wait(self) -> bool:
        """True if a younger job's turn waits for the pin rather than take its blocks."""
        if self.state is PinState.HELD:
            return self.saved_per_second >= WORTH_A_WAIT
        return self.state is not PinState.WORTHLESS

    @property
    def worth_making_older_wait(self) -> bool:
        """True if an older job's turn does."""
        if self.state is PinState.HELD:
            return self.saved_per_second >= WORTH_MAKING_OLDER_WAIT
        return self.state is PinState.ARRIVED


@dataclass(frozen=True, slots=True)
class PinView:
    """A pin, as the order of release sees it.

    Attributes:
        value: value of the pin.
        blocks: number of its blocks.
        started_at: start of its job, seconds.
    """

    value: PinValue
    blocks: int
    started_at: float

    @property
    def saved_per_block_s(self) -> float:
        """Time that each block saves, seconds: nothing saves more than blocks for a turn that is
        in the queue."""
        arrived = self.value.state is PinState.ARRIVED
        return math.inf if arrived else self.value.saves_s / self.blocks


def release_order(
    pins: Mapping[JobKey, PinView],
    spare: JobKey | None,
    waiter_started_at: float | None,
    greedy: Collection[str] = (),
) -> list[JobKey]:
    """The pins that may go, the first to go first.

    The pin that saves the least with a block goes first; of equal ones, as those of a policy that
    forecasts nothing, the youngest job's.

    Args:
        pins: all pins.
        spare: the job that the room is for; its pin goes last.
        waiter_started_at: start of the job whose turn waits for pins that are worth it, seconds;
            None if it does not wait, so that all may go.
        greedy: salts of clients that have more than their share, whose pins may all go.
    """

    def goes(job: JobKey, pin: PinView) -> bool:
        if waiter_started_at is None or job.salt in greedy or not pin.value.worth_a_wait:
            return True
        return pin.started_at > waiter_started_at and not pin.value.worth_making_older_wait

    found = {job: pin for job, pin in pins.items() if goes(job, pin)}

    def rank(job: JobKey) -> tuple[bool, float, float]:
        return job == spare, found[job].saved_per_block_s, -found[job].started_at

    return sorted(found, key=rank)


def pin_value(forecast: Forecast | None, costs: Costs, ttl_s: float) -> PinValue:
    """Value of a pin of ``ttl_s``.

    Args:
        forecast: forecast of the gap; None from policies that make none.
    """
    if forecast is None:
        return PinValue(PinState.UNPRICED)
    return PinValue(
        PinState.HELD,
        saved_s(forecast, costs.benefit_s, ttl_s),
        saved_per_second(forecast, costs, ttl_s),
    )


def within_budget(held: Iterable[bool], room: int) -> int:
    """Number of blocks that are pinned of a context over budget, its first ones: the tail alone
    would be no hit.

    Args:
        held: of each block, True if another pin holds it, so that it costs nothing.
        room: further blocks that pins may hold.
    """
    count = 0
    for is_held in held:
        if not is_held:
            if room <= 0:
                break
            room -= 1
        count += 1
    return count
