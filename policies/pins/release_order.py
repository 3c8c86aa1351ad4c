"""Pins: the value of a pin, how much of a context it covers, and the order in which pins are
released for requests that find no free blocks. Pure.
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
"""``PinValue.saved_per_second`` of a pin, below which no other job's turn waits for the pin. Found
in simulations: at 0.75, contexts of large models are released too early; at 0.35, contexts of small
models are released too late."""
WORTH_MAKING_OLDER_WAIT = 1.0
"""``PinValue.saved_per_second`` of a pin, below which no older job's turn waits for the pin. An
older job is not the next to lose its KV, so it gains nothing from waiting, and each second costs it
a whole second."""


class PinState(Enum):
    """Reason why a pin is held."""

    UNPRICED = "unpriced"
    """The job is expected to return. The policy has no forecasts, so the pin has no value."""
    HELD = "held"
    """The job is expected to return, and the pin has a value from the forecast."""
    ARRIVED = "arrived"
    """The job's next turn is queued."""
    WORTHLESS = "worthless"
    """The job has probably ended."""


@dataclass(frozen=True, slots=True)
class PinValue:
    """Value of a pin.

    Attributes:
        state: reason why the pin is held.
        saves_s: time that the pin is expected to save, seconds; 0 unless HELD.
        saved_per_second: seconds that the pin is expected to save, summed over all requests, per
            second for which it is held; 0 unless HELD.
    """

    state: PinState
    saves_s: float = 0.0
    saved_per_second: float = 0.0

    @property
    def worth_a_wait(self) -> bool:
        """True if a younger job's turn should wait for the pin rather than take its blocks."""
        if self.state is PinState.HELD:
            return self.saved_per_second >= WORTH_A_WAIT
        return self.state is not PinState.WORTHLESS

    @property
    def worth_making_older_wait(self) -> bool:
        """True if even an older job's turn should wait for the pin."""
        if self.state is PinState.HELD:
            return self.saved_per_second >= WORTH_MAKING_OLDER_WAIT
        return self.state is PinState.ARRIVED


@dataclass(frozen=True, slots=True)
class PinView:
    """A pin as seen by the release order.

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
        """Time that each block saves, seconds. Infinite for a queued turn's blocks, because no
        other pin saves more."""
        arrived = self.value.state is PinState.ARRIVED
        return math.inf if arrived else self.value.saves_s / self.blocks


def release_order(
    pins: Mapping[JobKey, PinView],
    spare: JobKey | None,
    waiter_started_at: float | None,
    greedy: Collection[str] = (),
) -> list[JobKey]:
    """Return the jobs whose pins may be released, in the order in which to release them.

    The pin that saves the least per block is released first. Among pins that save equally, as with
    a policy without forecasts, the youngest job's pin is first.

    Args:
        pins: all pins.
        spare: job that needs the blocks; its own pin is released last.
        waiter_started_at: start of the job whose turn waits for valuable pins, seconds; None if it
            does not wait, so that every pin may be released.
        greedy: salts of clients that exceed their share; all their pins may be released.
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
    """Return the value of a pin that is held for at most ``ttl_s`` seconds.

    Args:
        forecast: forecast of the gap; None from policies without forecasts.
    """
    if forecast is None:
        return PinValue(PinState.UNPRICED)
    return PinValue(
        PinState.HELD,
        saved_s(forecast, costs.benefit_s, ttl_s),
        saved_per_second(forecast, costs, ttl_s),
    )


def within_budget(held: Iterable[bool], room: int) -> int:
    """Return how many blocks of a context to pin, counted from the start of the context, if the pin
    budget does not suffice for all. The tail of a context alone would not be a cache hit.

    Args:
        held: for each block of the context, True if another pin holds it, so that the block costs
            nothing.
        room: number of further blocks that pins may hold.
    """
    count = 0
    for is_held in held:
        if not is_held:
            if room <= 0:
                break
            room -= 1
        count += 1
    return count
