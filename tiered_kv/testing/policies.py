"""Policies for tests of the runtime."""

from __future__ import annotations

from collections.abc import Mapping

from tiered_kv.policies.base import Costs, Decision, Tier, TurnEnd, TurnPolicy
from tiered_kv.policies.baselines.unpinned import StatelessPolicy
from tiered_kv.policies.jobs.identity import INFERRED_PREFIX


class FixedPin(StatelessPolicy):
    """Policy that pins every turn of a named job for ``ttl_s`` seconds. The KV of last turns is
    dropped. The KV of aborted turns, and of turns without a named job, is kept in CPU memory."""

    def __init__(self, ttl_s: float = 2.0) -> None:
        self.ttl_s = ttl_s

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        if turn.is_last_step:
            return Decision(Tier.DROP)
        if turn.job is None or turn.job.name.startswith(INFERRED_PREFIX) or turn.aborted:
            return Decision(Tier.CPU)
        return Decision(Tier.PIN, self.ttl_s)


class Always(StatelessPolicy):
    """Policy that makes the same decision for every turn."""

    def __init__(self, decision: Decision) -> None:
        self._decision = decision

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        return self._decision


class SwitchedPolicy(TurnPolicy):
    """A policy that a test can replace while the engine runs.

    Attributes:
        now: the current policy.
    """

    def __init__(self, now: TurnPolicy) -> None:
        self.now = now

    @property
    def reads_tools(self) -> bool:
        return self.now.reads_tools

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        return self.now.decide(turn, costs)

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        self.now.observe(turn, gap_s, ended=ended)

    def dump(self) -> dict[str, object]:
        return self.now.dump()

    def load(self, learned: Mapping[str, object]) -> None:
        self.now.load(learned)
