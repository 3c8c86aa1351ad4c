"""Results of a load: turns, jobs and runs, in the form that ``run_files`` stores as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class TurnDone:
    """An answered turn. Times are in seconds; ``sent_s`` counts from the start of the run.

    Attributes:
        turn: number of the turn, from 1.
        ttft_s: time from sending to the first token.
        latency_s: time from sending to the last token.
        cached_tokens: prompt tokens that vLLM reports as cached in VRAM or by a connector.
        sources: prompt tokens by tier (vram, cpu, ssd, recomputed), from the connector's trace;
            empty without a trace.
        tokens: token ids of the answer.
        logprobs: raw logprobs of those tokens; empty unless requested.
        text: text of the answer.
    """

    signed: ClassVar[bool] = True
    """Makes ``json_fields.read`` accept negative numbers, because logprobs are negative."""

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
    text: str = ""


@dataclass(frozen=True, slots=True)
class JobDone:
    """Result of a job that finished or failed.

    Attributes:
        began_s, ended_s: seconds since the start of the run. Their difference is the completion
            time.
        error: reason why the job did not finish; None if it finished.
    """

    name: str
    began_s: float
    ended_s: float
    turns: tuple[TurnDone, ...]
    error: str | None = None

    @property
    def completion_s(self) -> float:
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True)
class Run:
    """Results of one workload on one server.

    Attributes:
        server: name of the server in the results.
        load: name of the load; ``jobs_per_s`` is its arrival rate.
        round: number of the round, from 0.
        flags, versions: server flags and package versions; empty for a server that was already
            running.
        cpu_s: processor time of the server during the run.
        rss_bytes: resident memory of the server at the end.
        agents: sub-agents as separate jobs. A parent job's time includes the times of its
            sub-agents.
        reports_cached: True if the server reported cached prompt tokens. Otherwise
            ``cached_tokens`` is 0 in all turns.
        counts: prompt tokens by the server's own counters: all (``asked``), found in VRAM
            (``vram``) and restored by the connector (``connector``).
    """

    server: str
    load: str
    round: int
    seed: int
    jobs_per_s: float
    jobs: tuple[JobDone, ...]
    flags: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    cpu_s: float = 0.0
    rss_bytes: int = 0
    agents: tuple[JobDone, ...] = ()
    reports_cached: bool = True
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def finished(self) -> list[JobDone]:
        return [job for job in self.jobs if job.error is None]

    @property
    def turns(self) -> list[TurnDone]:
        """Turns of all jobs, including those of sub-agents."""
        return [turn for job in (*self.jobs, *self.agents) for turn in job.turns]

    @property
    def span_s(self) -> float:
        """Seconds from the first job's start to the last job's end."""
        began = min((job.began_s for job in self.jobs), default=0.0)
        return max((job.ended_s for job in self.jobs), default=0.0) - began


@dataclass(frozen=True, slots=True)
class Kept:
    """A run and the conditions under which it was measured.

    Attributes:
        reserved_cpus: cores that the CPU worker reserved, according to its log.
        other_cores: average number of cores that other programs used during the run; None if
            unknown.
    """

    run: Run
    reserved_cpus: str | None = None
    other_cores: float | None = None
