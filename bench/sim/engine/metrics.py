"""Measurements of a simulated run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

TIERS = ("vram", "cpu", "ssd", "recomputed")


@dataclass(slots=True)
class TurnRecord:
    """Record of a simulated turn. Times are in seconds on the run's clock; -1 before the event.

    Attributes:
        asked_s: when the turn arrived.
        shared: prompt tokens that are part of the previous turn's context.
        after_agents: True if sub-agents ran before the turn.
        admitted_s: when blocks were allocated to the turn.
        first_s: when the first token was produced.
        vram, cpu, ssd: prompt tokens found in each tier; all others were computed.
        preempted: number of preemptions.
    """

    asked_s: float
    prompt: int
    output: int
    shared: int = 0
    after_agents: bool = False
    admitted_s: float = -1.0
    first_s: float = -1.0
    ended_s: float = -1.0
    vram: int = 0
    cpu: int = 0
    ssd: int = 0
    preempted: int = 0

    @property
    def recomputed(self) -> int:
        return self.prompt - self.vram - self.cpu - self.ssd


@dataclass(slots=True)
class JobRecord:
    """Record of a simulated job.

    Attributes:
        began_s: when the job's first turn arrived.
        is_agent: True if another job started this job.
        ended_s: when the latest turn ended.
    """

    name: str
    began_s: float
    is_agent: bool
    turns: list[TurnRecord] = field(default_factory=list)

    @property
    def ended_s(self) -> float:
        return self.turns[-1].ended_s

    @property
    def took_s(self) -> float:
        """Time from the first request to the last answer, tools included, seconds."""
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        steps: number of scheduler steps. A leap (several decode steps together) counts as one step.
        seconds: duration in virtual time.
        moved: bytes over each link of the connector's worker.
        promoted_used, promoted_wasted: numbers of pages promoted from SSD that were restored to
            VRAM, and that were evicted before any use.
    """

    server: str
    jobs: tuple[JobRecord, ...]
    steps: int
    seconds: float
    moved: Mapping[str, int]
    promoted_used: int
    promoted_wasted: int

    def summary(self) -> dict[str, float]:
        """Return completion times of top-level jobs, times to first token, and fractions of prompt
        tokens by tier.

        ``parents_found``: fraction of jobs' previous contexts that were found after their
        sub-agents ended. ``promoted_wasted``: fraction of the pages promoted from SSD that were
        evicted before any use. ``makespan_s``: seconds from the first job's start until all jobs
        have finished.
        """
        took = [job.took_s for job in self.jobs if not job.is_agent]
        turns = [turn for job in self.jobs for turn in job.turns]
        prompt = sum(turn.prompt for turn in turns)
        first = [turn.first_s - turn.asked_s for turn in turns]
        promoted = self.promoted_used + self.promoted_wasted
        returns = [turn for turn in turns if turn.after_agents]
        found = sum(min(turn.shared, turn.vram + turn.cpu + turn.ssd) for turn in returns)
        ended_s, began_s = (job.ended_s for job in self.jobs), (job.began_s for job in self.jobs)
        return {
            "mean_s": float(np.mean(took)),
            **{f"p{q}_s": float(np.percentile(took, q)) for q in (50, 90, 95, 99)},
            "ttft_s": float(np.mean(first)),
            "ttft_p99_s": float(np.percentile(first, 99)),
            "makespan_s": max(ended_s) - min(began_s),
            "jobs_per_s": len(took) / self.seconds,
            "preempted": float(sum(turn.preempted for turn in turns)),
            "parents_found": found / max(1, sum(turn.shared for turn in returns)),
            "promoted_wasted": self.promoted_wasted / max(1, promoted),
            **{tier: sum(getattr(turn, tier) for turn in turns) / prompt for tier in TIERS},
        }
