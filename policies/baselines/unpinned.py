"""Serving without pins: plain offloading, and no offloading at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from tiered_kv.policies.base import Costs, Decision, Tier, TurnEnd


class StatelessPolicy:
    """Base of policies that learn nothing and only need ``decide``."""

    reads_tools: ClassVar[bool] = False

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        pass

    def dump(self) -> dict[str, object]:
        return {}

    def load(self, learned: Mapping[str, object]) -> None:
        pass


class Lru(StatelessPolicy):
    """Keeps every turn's KV in CPU memory, except after a job's last turn, and pins nothing."""

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        return Decision(Tier.DROP if turn.is_last_step else Tier.CPU)


class NoOffload(StatelessPolicy):
    """Keeps nothing outside the engine's own prefix cache."""

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        return Decision(Tier.DROP)
