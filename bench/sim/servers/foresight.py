"""Foresight and its lack: parts of servers that know a workload in advance, and policies without
one of their parts. They show what a better forecast could gain, and what each part is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum

from tiered_kv.policies.admission.working_set import JobForecast
from tiered_kv.policies.base import Costs, Decision, JobKey, Tier, TurnEnd, TurnPolicy
from tiered_kv.policies.baselines.unpinned import StatelessPolicy
from tiered_kv.policies.tier_choice import unpriced, without_pin


class Clairvoyant(StatelessPolicy):
    """The upper bound of all policies: pins for exactly the gap unless that costs more than it
    saves, B >= λ X.

    Attributes:
        gap_s: gap after the next turn to decide on, seconds.
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


class KnownGaps(Clairvoyant):
    """Knows every gap of a workload, by the job's name and the number of the turn."""

    def __init__(self, gaps_s: Mapping[tuple[str, int], float]) -> None:
        super().__init__()
        self._gaps_s = gaps_s

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        job = turn.job.name if turn.job is not None else ""
        self.gap_s = self._gaps_s.get((job, turn.turn), float("inf"))
        return super().decide(turn, costs)


class KnownJobs(JobForecast):
    """Knows how many turns every job of a workload takes, and what its longest context will be. The
    context is assumed to grow evenly.

    Args:
        contexts: tokens at the end of each of its turns, by the job's name.
        block: tokens of a block.
    """

    def __init__(self, contexts: Mapping[str, Sequence[int]], block: int) -> None:
        super().__init__()
        self._contexts = contexts
        self._block = block
        self._asked: dict[str, int] = {}

    def asked(self, job: str, turns: int) -> None:
        """Record how many of the job's turns have arrived. Fewer have started while one waits."""
        self._asked[job] = turns

    def ahead(self, job: JobKey, turns: int, grown: float) -> tuple[float, float]:
        contexts = self._contexts.get(job.name)
        if contexts is None:  # inferred, where clients give no hints
            return super().ahead(job, turns, grown)
        asked = self._asked.get(job.name, 1)
        left = len(contexts) - asked
        if left <= 0:
            return 0.0, 0.0
        more = max(contexts[asked:]) - contexts[asked - 1]  # it may be cut short on the way
        return max(0, more) / self._block / left, float(left)


class Part(Enum):
    """Part of a policy that can be switched off."""

    PINS = "pins"
    PROMOTION = "promotion"
    """Pages promoted to CPU memory before their job returns."""
    FORECAST = "forecast"
    """All that is known of a gap: its tool, and how long others were."""


class Ablated:
    """A policy without one of its parts.

    Args:
        policy: the whole policy.
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
