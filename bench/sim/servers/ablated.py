"""A policy without one of its parts, to see what the part is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum

from tiered_kv.policies.base import Costs, Decision, Tier, TurnEnd, TurnPolicy
from tiered_kv.policies.tier_choice import without_pin


class Part(Enum):
    """A part that can be switched off."""

    PINS = "pins"
    PROMOTION = "promotion"
    """Pages that come up from below CPU memory before their job is back."""
    FORECAST = "forecast"
    """All that is known of a gap: what its tool is, and how long others were."""


class Ablated:
    """A policy that decides without a part of it.

    Args:
        policy: the whole one.
    """

    def __init__(self, policy: TurnPolicy, lacks: Part) -> None:
        self._policy = policy
        self._lacks = lacks

    @property
    def reads_tools(self) -> bool:
        return self._policy.reads_tools and self._lacks is not Part.FORECAST

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        if self._lacks is Part.FORECAST:
            turn = replace(turn, tool=None)
        found = self._policy.decide(turn, costs)
        if self._lacks is Part.PROMOTION:
            return replace(found, back_s=None)
        if self._lacks is Part.PINS and found.tier is Tier.PIN:
            median_s = found.ttl_s if found.forecast is None else found.forecast.quantile(0.5)
            return replace(found, tier=without_pin(costs, median_s), ttl_s=0.0)
        return found

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        if self._lacks is not Part.FORECAST:
            self._policy.observe(turn, gap_s, ended=ended)

    def dump(self) -> dict[str, object]:
        return self._policy.dump()

    def load(self, learned: Mapping[str, object]) -> None:
        self._policy.load(learned)
