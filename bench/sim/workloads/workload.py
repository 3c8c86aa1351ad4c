"""Jobs of a simulation, fixed before the first run and the same for every policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from tiered_kv.bench.agents.left_out import LeftOut

TOO_LONG = "too_long"


class Hints(Enum):
    """Hints that clients send about their jobs."""

    RIGHT = "right"
    """The job's name, and a mark on its last turn."""
    WRONG = "wrong"
    """The job's name, but every turn is marked as the last, and tools are named wrongly."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class SimTurn:
    """A request, and the pause after it.

    Attributes:
        shared: number of leading context tokens that the prompt keeps.
        added: number of prompt tokens after the shared ones.
        output: answer length, tokens.
        gap_s: seconds from the end of the answer and of the sub-agents that it started to the job's
            next turn; 0 after the last turn.
        tool: command that runs in the gap; may be empty. tool_name: name of the tool; empty for a
            shell.
        agents: sub-agents that it starts, each ``arrives_s`` after its end.
    """

    shared: int
    added: int
    output: int
    gap_s: float
    tool: str = ""
    agents: tuple[SimJob, ...] = ()
    tool_name: str = ""

    @property
    def prompt(self) -> int:
        return self.shared + self.added


@dataclass(frozen=True, slots=True)
class SimJob:
    """An agent's work.

    Attributes:
        name: name, unique in the workload.
        arrives_s: arrival time of its first turn, seconds.
        prefix: jobs with the same value share their first ``prefix_tokens``; empty for none.
        says_last: True if its client marks its last turn.
    """

    name: str
    arrives_s: float
    turns: tuple[SimTurn, ...]
    prefix: str = ""
    prefix_tokens: int = 0
    says_last: bool = True

    @property
    def longest(self) -> int:
        """Length of its longest context, sub-agents included, tokens."""
        own = max(turn.prompt + turn.output for turn in self.turns)
        return max([own, *(agent.longest for turn in self.turns for agent in turn.agents)])

    def everyone(self) -> Iterator[SimJob]:
        """Yield the job and its sub-agents."""
        yield self
        for turn in self.turns:
            for agent in turn.agents:
                yield from agent.everyone()


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs to play, the same for every server.

    Attributes:
        block: tokens per block that suits its contexts.
        burst: number of jobs that arrive together.
        left_out: counts by reason. ``too_long`` counts jobs that no server could hold.
    """

    name: str
    jobs: tuple[SimJob, ...]
    hints: Hints
    block: int = 16
    burst: int = 1
    left_out: Mapping[str, LeftOut] = field(default_factory=dict)

    @property
    def dropped(self) -> int:
        """Number of jobs left out because no server could hold them."""
        return self.left_out.get(TOO_LONG, LeftOut()).sessions

    def at(self, jobs_per_s: float, seed: int) -> Workload:
        """Return the jobs with Poisson arrivals. With the same seed, the arrivals at different
        rates differ only by a time factor."""
        count = len(self.jobs)
        unit = np.random.default_rng([seed, 1]).exponential(1.0, -(-count // self.burst))
        starts = (np.cumsum(unit) - unit[:1]) * self.burst / jobs_per_s
        times = np.repeat(starts, self.burst)[:count]
        order = np.random.default_rng([seed, 2]).permutation(count)
        jobs = tuple(
            replace(self.jobs[at], arrives_s=float(s)) for at, s in zip(order, times, strict=True)
        )
        return replace(self, jobs=jobs)

    def that_fit(self, pool_tokens: int, max_len: int) -> Workload:
        """Leave out jobs that would take more than half of the pool, or more than the model's
        limit."""
        most = min(pool_tokens // 2, max_len - 1)
        jobs = tuple(job for job in self.jobs if job.longest <= most)
        left = [job for job in self.jobs if job.longest > most]
        turns = sum(len(one.turns) for job in left for one in job.everyone())
        too_long = self.left_out.get(TOO_LONG, LeftOut()) + LeftOut(len(left), turns)
        return replace(self, jobs=jobs, left_out={**self.left_out, TOO_LONG: too_long})
