"""The default policy: chooses the tier that keeps a turn's KV, from a forecast of the gap and the
cost of each tier. VRAM is charged for the time that it is occupied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from tiered_kv.policies.forecast.gap_model import GapModel
from tiered_kv.policies.pricing.pin_ttl import best_wait, gap_class

from .base import Costs, Decision, GapClass, Tier, TurnEnd
from .distribution import Forecast

BACK_BEFORE = 0.25
"""Probability of the quantile q̂ of the gap. KV below CPU memory is promoted by q̂. Gaps have long
tails. Waiting for the median would be too late for half of the returns, while being early only
costs space in CPU memory."""


def unpriced(turn: TurnEnd) -> Decision | None:
    """Return the decision for a turn's KV if the decision does not depend on costs; None if it
    depends on costs.

    After the last step the KV is not needed. If the job is unknown, or its client disconnected, no
    turn would use a pin.
    """
    if turn.is_last_step:
        return Decision(Tier.DROP)
    if turn.job is None or turn.aborted:
        return Decision(Tier.CPU)
    return None


def choose(turn: TurnEnd, forecast: Forecast, costs: Costs) -> Decision:
    """Choose the tier of a turn's KV, if ``unpriced`` does not decide it. If a pin pays off, choose
    PIN for the time at which its value U is highest. Otherwise choose CPU memory, or a lower tier
    if CPU memory would evict the KV before it is needed, or DROP if prefilling again is cheapest.
    """
    decided = unpriced(turn)
    if decided is not None:
        return decided
    benefit_s = costs.benefit_s
    wait_s = best_wait(forecast, benefit_s, costs.vram_price)
    kind = gap_class(wait_s, benefit_s)
    if kind is not GapClass.SLOW:
        return Decision(Tier.PIN, wait_s, kind, forecast)
    tier = without_pin(costs, forecast.quantile(0.5))
    back_s = _back_s(forecast, costs) if tier is Tier.STORE else None
    return Decision(tier, 0.0, kind, forecast, back_s)


def without_pin(costs: Costs, median_s: float) -> Tier:
    """Return the best tier other than VRAM for a gap of about ``median_s`` seconds."""
    if costs.cpu_s is not None and costs.recompute_s < costs.cpu_s:
        return Tier.DROP
    store_pays = costs.store_s is not None and costs.store_s < costs.recompute_s
    if costs.cpu_s is not None:
        return Tier.STORE if store_pays and median_s > costs.cpu_stay_s else Tier.CPU
    return Tier.STORE if store_pays else Tier.DROP


def _back_s(forecast: Forecast, costs: Costs) -> float | None:
    """Return the time after the turn's end at which the promotion starts, seconds: q̂ minus the
    restore time from the fastest lower tier, at least 0. None if the job returns with a probability
    below ``BACK_BEFORE``."""
    back_s = forecast.quantile(BACK_BEFORE)
    if math.isinf(back_s):
        return None
    return max(0.0, back_s - (costs.store_s or 0.0))


class Occupancy:
    """The default policy. See ``forecast.gap_model`` for the forecast, ``pricing.pin_ttl`` for the
    value of a pin, and this module for the choice of the tier."""

    reads_tools: ClassVar[bool] = True

    def __init__(self) -> None:
        self.model = GapModel()

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        return unpriced(turn) or choose(turn, self.model.forecast(turn), costs)

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        self.model.observe(turn, gap_s, ended=ended)

    def dump(self) -> dict[str, object]:
        return self.model.dump()

    def load(self, learned: Mapping[str, object]) -> None:
        self.model.load(learned)
