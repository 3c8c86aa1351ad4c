"""Policies for tests of what carries decisions out."""

from __future__ import annotations

from tiered_kv.policies.base import Costs, Decision, Tier, TurnEnd
from tiered_kv.policies.baselines.unpinned import LearnsNothing
from tiered_kv.policies.jobs.hints import INFERRED_PREFIX


class FixedPin(LearnsNothing):
    """Pins every turn of a job that the client named, but for its last, for the same time."""

    def __init__(self, ttl_s: float = 2.0) -> None:
        self.ttl_s = ttl_s

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        if turn.is_last_step:
            return Decision(Tier.DROP)
        if turn.job is None or turn.job.name.startswith(INFERRED_PREFIX) or turn.aborted:
            return Decision(Tier.CPU)
        return Decision(Tier.PIN, self.ttl_s)
