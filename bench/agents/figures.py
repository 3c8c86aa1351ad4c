"""Figures of runs: times, tiers that prompts came from, and paired comparisons of two servers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .paired import PairedRatio
from .results import JobDone, Kept, Run, TurnDone

BUSY_CORES = 0.15
"""Threshold, cores. The results contain a note if other programs used more on average during a run.
"""


@dataclass(frozen=True, slots=True)
class Compared:
    """Ratios of one server's figures to another's under one load, over the rounds in which both
    ran. In each round, only jobs that finished on both servers are counted, except in
    ``tokens_per_s``, which counts all answers.

    Attributes:
        rounds: ratio of mean completion times, one per round.
        jobs: number of job pairs over all rounds.
        mean, p90, p95: ratios of the mean and of the 90th and 95th percentiles of completion times.
        ttft: ratio of mean times to first token.
        tpot: ratio of mean times per output token; None if a server does not stream its answers.
        tokens_per_s: ratio of throughputs, prompt and answer tokens per second of the whole run.
    """

    rounds: tuple[float, ...]
    jobs: int
    mean: PairedRatio
    p90: PairedRatio
    p95: PairedRatio
    ttft: PairedRatio
    tokens_per_s: PairedRatio
    tpot: PairedRatio | None = None


def compare(runs: Iterable[Run], server: str, over: str) -> Compared | None:
    """Compare ``server`` with ``over`` in the runs of one load. Returns None if there is no round
    in which a job finished on both servers.
    """
    by_name = {(run.server, run.round): run for run in runs}
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    jobs = 0
    for number in sorted(number for name, number in by_name if name == server):
        one, other = by_name[server, number], by_name.get((over, number))
        if other is not None and (among := common([one, other])):
            pairs.append((_figures(one, among), _figures(other, among)))
            jobs += len(among)
    if not pairs:
        return None
    ratios = {}
    for name in pairs[0][0]:
        # Answers that are not streamed have no time per output token.
        both = [(one[name], other[name]) for one, other in pairs]
        if known := [pair for pair in both if all(one > 0 for one in pair)]:
            ratios[name] = PairedRatio.of(*zip(*known, strict=True))
    rounds = tuple(one["mean"] / other["mean"] for one, other in pairs)
    return Compared(rounds, jobs, **ratios)


def _figures(run: Run, among: frozenset[str]) -> dict[str, float]:
    times = completions(run, among)
    turns = [turn for job in run.jobs if job.name in among for turn in job.turns]
    return {
        "mean": mean(times),
        "p90": float(np.quantile(times, 0.9)),
        "p95": float(np.quantile(times, 0.95)),
        "ttft": mean(turn.ttft_s for turn in turns),
        "tpot": mean(tpots(turns)),
        "tokens_per_s": tokens(run.turns) / run.span_s,
    }


def completions(run: Run, among: frozenset[str] | None = None) -> list[float]:
    """Return the completion times of the run's finished jobs, seconds, sorted by job name.

    Args:
        among: names of the jobs to include; None means all.
    """
    jobs = sorted(run.finished, key=lambda job: job.name)
    return [job.completion_s for job in jobs if among is None or job.name in among]


def common(runs: Iterable[Run]) -> frozenset[str]:
    """Return the names of the jobs that finished in every run. There must be at least one run."""
    names = [{job.name for job in run.finished} for run in runs]
    return frozenset(set.intersection(*names))


def sources_of(turn: TurnDone) -> dict[str, int]:
    """Return a turn's prompt tokens by tier. If the server does not report tiers, the keys are
    "cached" and "recomputed".
    """
    if turn.sources:
        return dict(turn.sources)
    return {"cached": turn.cached_tokens, "recomputed": turn.prompt_tokens - turn.cached_tokens}


def sum_sources(turns: Iterable[TurnDone]) -> dict[str, int]:
    """Return the prompt tokens of all turns, summed by tier."""
    total: Counter[str] = Counter()
    for turn in turns:
        total.update(sources_of(turn))
    return dict(total)


def recomputed(job: JobDone) -> int:
    """Return the prompt tokens of a job that were recomputed although the previous turn's context
    contained them.
    """
    known = found = 0
    for turn in job.turns:
        new = turn.prompt_tokens - known
        found += max(0, sources_of(turn).get("recomputed", 0) - new)
        known = turn.prompt_tokens + turn.output_tokens
    return found


def tpots(turns: Iterable[TurnDone]) -> list[float]:
    """Return the seconds per token after the first, for each answer with more than one token."""
    return [
        (turn.latency_s - turn.ttft_s) / (turn.output_tokens - 1)
        for turn in turns
        if turn.output_tokens > 1
    ]


def tokens(turns: Iterable[TurnDone]) -> int:
    """Return the number of tokens in all prompts and answers."""
    return sum(turn.prompt_tokens + turn.output_tokens for turn in turns)


def by_number(jobs: Iterable[JobDone]) -> dict[int, list[TurnDone]]:
    """Group turns by their number in the job, from 1."""
    grouped: dict[int, list[TurnDone]] = defaultdict(list)
    for job in jobs:
        for turn in job.turns:
            grouped[turn.turn].append(turn)
    return dict(sorted(grouped.items()))


def mean(values: Iterable[float]) -> float:
    """Return the mean, or NaN if there are no values."""
    return float(np.mean(list(values) or [np.nan]))


def unequal(kept: Sequence[Kept]) -> list[str]:
    """Return the reasons why runs cannot be compared, one sentence each."""
    found = []
    cores = {one.reserved_cpus for one in kept}
    if len(cores) > 1:
        found.append(
            f"servers reserved different cores for the framework: {sorted(map(str, cores))}"
        )
    busy = max((one.other_cores or 0.0 for one in kept), default=0.0)
    if busy > BUSY_CORES:
        found.append(f"other programs used up to {busy:.1f} cores during a run")
    return found
