"""Measurements of a simulated run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

TIERS = ("vram", "cpu", "ssd", "recomputed")


@dataclass(slots=True)
class TurnRecord:
    """A turn. Times are in seconds on the run's clock.

    Attributes:
        shared: prompt tokens that the job's previous turn had.
        after_agents: True if sub-agents ran before it.
        admitted_s: when blocks were allocated to it.
        first_s: when its first token was produced.
        vram, cpu, ssd: prompt tokens found in each tier; the rest was computed.
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
    """A job.

    Attributes:
        is_agent: True if another job started it.
        ended_s: when its latest turn ended.
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
        """Time from its first request to its last answer, tools included."""
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        steps: number of scheduler steps, counting each leap once.
        seconds: duration in virtual time. moved: bytes over each link of the connector's worker.
        promoted_used, promoted_wasted: pages promoted from SSD that reached VRAM, and pages that
            were evicted first.
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
        tokens by origin. ``parents_found`` is the fraction of their contexts that jobs found again
        when their sub-agents had ended, ``promoted_wasted`` a fraction of the pages promoted from
        SSD, ``makespan_s`` the time until all jobs have finished.
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
