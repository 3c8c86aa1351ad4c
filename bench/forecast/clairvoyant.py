"""The upper bound: a policy that knows the gap before it begins, for benchmarks."""

from __future__ import annotations

from tiered_kv.policies.base import Costs, Decision, Tier, TurnEnd
from tiered_kv.policies.baselines.unpinned import StatelessPolicy
from tiered_kv.policies.tier_choice import unpriced, without_pin


class Clairvoyant(StatelessPolicy):
    """Pins for exactly the gap unless that costs more than it saves: B >= λ X.

    Attributes:
        gap_s: gap after the turn that is decided next, seconds.
    """

    def __init__(self) -> None:
        self.gap_s = 0.0

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        decided = unpriced(turn)
        if decided is not None:
            return decided
        if costs.benefit_s >= costs.vram_price * self.gap_s:
            return Decision(Tier.PIN, self.gap_s)
        return Decision(without_pin(costs, self.gap_s))
