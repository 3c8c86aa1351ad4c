"""What serving without a policy does: plain offload, and nothing at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from tiered_kv.policies.base import Costs, Decision, Tier, TurnEnd


class StatelessPolicy:
    """Decides without a past."""

    reads_tools: ClassVar[bool] = False

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        pass

    def refit(self) -> None:
        pass

    def dump(self) -> dict[str, object]:
        return {}

    def load(self, learned: Mapping[str, object]) -> None:
        pass


class Lru(StatelessPolicy):
    """Everything is copied to CPU memory, nothing is pinned; the least recently used goes."""

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        return Decision(Tier.DROP if turn.is_last_step else Tier.CPU)


class NoOffload(StatelessPolicy):
    """Nothing is kept but what vLLM's own prefix cache still has."""

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        return Decision(Tier.DROP)
