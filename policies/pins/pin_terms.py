"""Terms of a pin: its time, its blocks and its value. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.policies.base import Costs, Decision, Tier
from tiered_kv.policies.distribution import Forecast
from tiered_kv.policies.pricing.pin_value import saved_per_second, saved_s

from .release_order import PinState, PinValue

PROVISIONAL_S = 2.0
"""Seconds that a turn is pinned at most while its tool call is being read: its blocks are gone
right after the turn's end if they are not pinned."""


def provisional_s(decided_s: float) -> float:
    """Time of the pin of a turn whose tool call is being read, seconds.

    Args:
        decided_s: what was decided without the tool; 0 without a pin.
    """
    return min(PROVISIONAL_S, decided_s or PROVISIONAL_S)


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


def was_to_stay(decision: Decision, gap_s: float, *, pinned: bool, saved: bool) -> bool:
    """True if some tier was to hold the context still, ``gap_s`` after its turn's end.

    Args:
        pinned: True if blocks of it were pinned.
        saved: True if it has pages outside VRAM.
    """
    if decision.tier is Tier.PIN and pinned and gap_s < decision.ttl_s:
        return True
    return saved and decision.tier is not Tier.DROP
