"""InferCept (arXiv 2402.01869): preserve, swap or discard, whichever wastes the least memory."""

from __future__ import annotations

from tiered_kv.policies.base import Costs, Decision, Tier, TurnEnd
from tiered_kv.policies.tier_choice import unpriced, without_pin

from .unpinned import StatelessPolicy


class InferCept(StatelessPolicy):
    """Chooses the option that wastes the least memory for a turn of C tokens of M bytes each.

    The waste is memory multiplied by time. Divided by the common factor C M, it is:

    - discard: T_fwd(C), the time to recompute the context;
    - preserve: the gap;
    - swap: 2 T_swap, the time of both copies.

    The gap is estimated as the time since the tool was called, which grows from 0. So the turn's KV
    is preserved until that time equals the waste of the cheaper alternative, and is then discarded
    or swapped. The waste of other requests, which are stalled in the meantime, is omitted, because
    both alternatives cause it.
    """

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        decided = unpriced(turn)
        if decided is not None:
            return decided
        swap_s = costs.recompute_s if costs.cpu_s is None else 2 * costs.cpu_s
        wait_s = min(costs.recompute_s, swap_s)
        return Decision(Tier.PIN, wait_s) if wait_s > 0 else Decision(without_pin(costs, 0.0))
