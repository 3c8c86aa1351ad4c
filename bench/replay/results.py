"""Results of a replay: turns, jobs and runs, as they are kept in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TurnDone:
    """A turn that was answered. Times in seconds; ``sent_s`` since the run began.

    Attributes:
        turn: 1 for the job's first.
        ttft_s: from sending to the first token.
        latency_s: from sending to the last.
        cached_tokens: of the prompt, as vLLM reports them; from VRAM or from a connector.
        sources: prompt tokens by tier (vram, cpu, ssd, recomputed) if the server says.
        tokens: ids of the answer.
        logprobs: raw, of those tokens; empty if they were not asked for.
    """

    turn: int
    sent_s: float
    ttft_s: float
    latency_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    sources: Mapping[str, int] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class JobDone:
    """A job, finished or not.

    Attributes:
        began_s, ended_s: since the run began; completion time is the difference.
        error: why it did not finish; None if it did.
    """

    name: str
    began_s: float
    ended_s: float
    turns: tuple[TurnDone, ...]
    error: str | None = None

    @property
    def completion_s(self) -> float:
        return self.ended_s - self.began_s

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> JobDone:
        """A job out of its fields.

        Raises:
            KeyError, TypeError: it is none.
        """
        turns = tuple(
            TurnDone(
                **{**turn, "tokens": tuple(turn["tokens"]), "logprobs": tuple(turn["logprobs"])}
            )
            for turn in said["turns"]
        )
        return cls(**{**said, "turns": turns})


@dataclass(frozen=True, slots=True)
class Run:
    """One workload on one server.

    Attributes:
        server: name of its kind.
        load: name of the load; ``jobs_per_s`` is its arrival rate.
        round: which alternation.
        flags: of the server. versions: of what it ran.
        cpu_s: processor time of the server during the run. rss_bytes: its memory at the end.
    """

    server: str
    load: str
    round: int
    seed: int
    jobs_per_s: float
    jobs: tuple[JobDone, ...]
    flags: tuple[str, ...]
    versions: Mapping[str, str]
    cpu_s: float
    rss_bytes: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Run:
        """The inverse of ``as_json``.

        Raises:
            KeyError, TypeError: it is no run.
        """
        jobs = tuple(JobDone.from_json(job) for job in said["jobs"])
        return cls(**{**said, "jobs": jobs, "flags": tuple(said["flags"])})
