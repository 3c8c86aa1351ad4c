"""Policies that know a workload in advance, and variants of the default policy that lack one of its
parts. The former show how much a better forecast would gain, the latter how much each part
contributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from tiered_kv.bench.sim.workloads.workload import SimJob
from tiered_kv.policies.admission.working_set import JobForecast
from tiered_kv.policies.base import Costs, Decision, JobKey, Tier, TurnEnd
from tiered_kv.policies.baselines.unpinned import StatelessPolicy
from tiered_kv.policies.tier_choice import Occupancy, unpriced, without_pin


class Clairvoyant(StatelessPolicy):
    """The upper bound of all policies: knows the gap X, and pins for exactly that time if the pin's
    benefit B is at least its cost, B >= λ X, where λ is the price of VRAM.

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


class KnownGaps(Clairvoyant):
    """Clairvoyant policy that knows all gaps of a workload, by job name and turn number.

    Args:
        jobs: jobs of the workload, sub-agents included.
    """

    def __init__(self, jobs: Sequence[SimJob]) -> None:
        super().__init__()
        self._gaps_s = {
            (one.name, number): turn.gap_s
            for one in jobs
            for number, turn in enumerate(one.turns, 1)
        }

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        job = turn.job.name if turn.job is not None else ""
        self.gap_s = self._gaps_s.get((job, turn.turn), float("inf"))
        return super().decide(turn, costs)


class KnownJobs(JobForecast):
    """Forecast that knows how many turns every job of a workload takes, and how long its longest
    context will be. The context is assumed to grow evenly.

    Args:
        jobs: jobs of the workload, sub-agents included.
        block: tokens per block.
    """

    def __init__(self, jobs: Sequence[SimJob], block: int) -> None:
        super().__init__()
        self._contexts = {job.name: [one.prompt + one.output for one in job.turns] for job in jobs}
        self._block = block
        self._asked: dict[str, int] = {}

    def asked(self, job: str, turns: int) -> None:
        """Record how many of the job's turns have arrived. The scheduler has started fewer turns if
        one is waiting.
        """
        self._asked[job] = turns

    def ahead(self, job: JobKey, turns: int, grown: float) -> tuple[float, float]:
        contexts = self._contexts.get(job.name)
        if contexts is None:  # a job that was inferred because the client gave no hints
            return super().ahead(job, turns, grown)
        asked = self._asked.get(job.name, 1)
        left = len(contexts) - asked
        if left <= 0:
            return 0.0, 0.0
        more = (
            max(contexts[asked:]) - contexts[asked - 1]
        )  # the context may be truncated in between
        return max(0, more) / self._block / left, float(left)


class Unpinned(Occupancy):
    """Variant of the default policy that pins nothing. Contexts that the default policy would pin
    go to another tier."""

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        found = super().decide(turn, costs)
        if found.tier is not Tier.PIN or found.forecast is None:
            return found
        tier = without_pin(costs, found.forecast.quantile(0.5))
        return replace(found, tier=tier, ttl_s=0.0)


class Late(Occupancy):
    """Variant of the default policy that never promotes pages before their job returns."""

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        return replace(super().decide(turn, costs), back_s=None)


class Blind(Occupancy):
    """Variant of the default policy that knows nothing about gaps: neither the tool nor earlier
    gaps."""

    reads_tools: ClassVar[bool] = False

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        return super().decide(replace(turn, tool=None), costs)

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        pass
