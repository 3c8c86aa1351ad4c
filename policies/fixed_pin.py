"""Pin every turn that is not the last for the same time."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.policies.signals import Decision, Tier, TurnEnd


@dataclass(frozen=True, slots=True)
class FixedPin:
    """What Continuum's released code does: 2.0 s, whatever the tool (arXiv 2511.02230)."""

    ttl_s: float = 2.0

    def decide(self, turn: TurnEnd) -> Decision:
        if turn.is_last_step:
            return Decision(Tier.DROP)
        if turn.job is None or turn.aborted:
            return Decision(Tier.CPU)
        return Decision(Tier.PIN, self.ttl_s)
