"""InferCept (arXiv 2402.01869): preserve, swap or discard, whatever wastes the least memory."""

from __future__ import annotations

from tiered_kv.policies.base import Costs, Decision, Tier, TurnEnd
from tiered_kv.policies.tier_choice import unpriced, without_pin

from .unpinned import StatelessPolicy


class InferCept(StatelessPolicy):
    """The least waste, for one turn of C tokens of size M.

    Wasted are, divided by the C M that all have in common: T_fwd(C) to discard, the gap to
    preserve, and 2 T_swap to swap. The gap is estimated as the time since the call. That is 0 as
    the turn ends and grows, so the turn is preserved until its wait has cost as much as the
    cheaper of the others, and then discarded or swapped. What the others of the batch waste
    while they are stalled weighs on both of these, and is left out.
    """

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        decided = unpriced(turn)
        if decided is not None:
            return decided
        swap_s = costs.recompute_s if costs.cpu_s is None else 2 * costs.cpu_s
        wait_s = min(costs.recompute_s, swap_s)
        return Decision(Tier.PIN, wait_s) if wait_s > 0 else Decision(without_pin(costs, 0.0))
