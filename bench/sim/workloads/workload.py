"""Jobs of a simulation. They are fixed before the first run, and the same for every policy."""

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
    """The job's name, tools, and a mark on the last turn."""
    WRONG = "wrong"
    """The job's name is right, but every turn is marked as the last, and commands are wrong."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class SimTurn:
    """A request, and the gap after it.

    Attributes:
        shared: number of leading context tokens that the prompt keeps.
        added: number of prompt tokens after the shared ones.
        output: answer length, tokens.
        gap_s: seconds from the end of the answer, or of the turn's sub-agents, to the job's next
            turn; 0 after the last turn.
        tool: command that runs in the gap; may be empty.
        tool_name: name of the tool; empty for a shell.
        agents: sub-agents that the turn starts, each ``arrives_s`` after the turn's end.
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
        """Prompt length, tokens."""
        return self.shared + self.added


@dataclass(frozen=True, slots=True)
class SimJob:
    """A job of an agent.

    Attributes:
        name: name, unique in the workload.
        arrives_s: arrival time of the first turn, seconds. For a sub-agent, it counts from the end
            of its parent's turn.
        prefix: jobs with the same value share their first ``prefix_tokens``; empty for none.
        says_last: True if the client marks the job's last turn.
    """

    name: str
    arrives_s: float
    turns: tuple[SimTurn, ...]
    prefix: str = ""
    prefix_tokens: int = 0
    says_last: bool = True

    @property
    def longest(self) -> int:
        """Length of the job's longest context, sub-agents included, tokens."""
        own = max(turn.prompt + turn.output for turn in self.turns)
        return max([own, *(agent.longest for turn in self.turns for agent in turn.agents)])

    def everyone(self) -> Iterator[SimJob]:
        """Yield the job and, recursively, its sub-agents."""
        yield self
        for turn in self.turns:
            for agent in turn.agents:
                yield from agent.everyone()


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs to play, the same for every server.

    Attributes:
        hints: hints that the clients send.
        block: block size that suits the jobs' contexts, tokens.
        burst: number of jobs that arrive together.
        left_out: counts of sessions and turns that are not played, by reason. ``too_long`` counts
            jobs that are too long for the machine.
    """

    name: str
    jobs: tuple[SimJob, ...]
    hints: Hints
    block: int = 16
    burst: int = 1
    left_out: Mapping[str, LeftOut] = field(default_factory=dict)

    @property
    def dropped(self) -> int:
        """Number of jobs left out because they are too long for the machine."""
        return self.left_out.get(TOO_LONG, LeftOut()).sessions

    def at(self, jobs_per_s: float, seed: int) -> Workload:
        """Return the jobs with Poisson arrivals, in a random order. With the same seed, the
        arrivals at different rates differ only by a time factor.
        """
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
        """Return the workload without jobs that would occupy more than half of the pool, or exceed
        the model's limit ``max_len``. The jobs left out are counted.
        """
        most = min(pool_tokens // 2, max_len - 1)
        jobs = tuple(job for job in self.jobs if job.longest <= most)
        left = [job for job in self.jobs if job.longest > most]
        turns = sum(len(one.turns) for job in left for one in job.everyone())
        too_long = self.left_out.get(TOO_LONG, LeftOut()) + LeftOut(len(left), turns)
        return replace(self, jobs=jobs, left_out={**self.left_out, TOO_LONG: too_long})
