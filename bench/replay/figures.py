"""Figures of runs: completion times, tokens recomputed, how far the gap is closed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .agreement import agreement
from .names import BOUND, IDLE, PRESSURE, STOCK, TIERED
from .results import JobDone, Run, TurnDone

BOOTSTRAPS = 10_000


@dataclass(frozen=True, slots=True)
class ByTurn:
    """Turns of one number, over jobs and rounds.

    Attributes:
        ttft_s, latency_s: means, seconds.
        sources: prompt tokens by tier.
    """

    turn: int
    ttft_s: float
    latency_s: float
    sources: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Row:
    """One server under one load, over all rounds. Times in seconds, of jobs that finished.

    Attributes:
        recomputed_fraction: of all prompt tokens, those that were computed though an earlier turn
            of their job had been through them, 0 to 1. What a turn adds is new, and in no part.
        agrees: raw logprobs of the answers agree with stock's; None where that means nothing.
        unfinished: names of the jobs that did not finish, with the round.
        jobs_per_s: arrival rate. done_per_s: jobs finished a second.
        sources: prompt tokens by tier; "cached" where the server does not say which, "recomputed"
            what no tier had, new or not.
        cpu_s, rss_bytes: of the server, means over the rounds.
    """

    server: str
    load: str
    mean_s: float
    p95_s: float
    recomputed_fraction: float
    agrees: bool | None
    p50_s: float
    p90_s: float
    p99_s: float
    jobs: int
    unfinished: tuple[str, ...]
    jobs_per_s: float
    done_per_s: float
    ttft_s: float
    sources: Mapping[str, int]
    by_turn: tuple[ByTurn, ...]
    cpu_s: float
    rss_bytes: int


def sources_of(turn: TurnDone) -> dict[str, int]:
    """Prompt tokens by tier."""
    if turn.sources:
        return dict(turn.sources)
    return {"cached": turn.cached_tokens, "recomputed": turn.prompt_tokens - turn.cached_tokens}


def recomputed(job: JobDone) -> int:
    """Prompt tokens that were computed though the turn before had them in its prompt or answer."""
    known = found = 0
    for turn in job.turns:
        new = turn.prompt_tokens - known
        found += max(0, sources_of(turn).get("recomputed", 0) - new)
        known = turn.prompt_tokens + turn.output_tokens
    return found


def finished(run: Run) -> list[JobDone]:
    return [job for job in run.jobs if job.error is None]


def completions(run: Run, among: frozenset[str] | None = None) -> list[float]:
    """Completion times of the run's finished jobs, seconds, in order of their names."""
    jobs = sorted(finished(run), key=lambda job: job.name)
    return [job.completion_s for job in jobs if among is None or job.name in among]


def row(server: str, load: str, runs: Sequence[Run], *, forced: bool) -> Row:
    """All rounds of one server under one load, out of all ``runs``.

    Args:
        forced: answers were forced, so that outputs can be compared.
    """
    own = [run for run in runs if (run.server, run.load) == (server, load)]
    times = np.array([s for run in own for s in completions(run)] or [np.nan])
    turns = [turn for run in own for job in run.jobs for turn in job.turns]
    sources = _sum(turns)
    p50, p90, p95, p99 = (float(q) for q in np.quantile(times, [0.5, 0.9, 0.95, 0.99]))
    verdicts = [agreement(run, runs) for run in own] if forced else []
    known = [verdict for verdict in verdicts if verdict is not None]
    spans = sum(_span(run) for run in own)
    done = sum(len(finished(run)) for run in own)
    return Row(
        server=server,
        load=load,
        mean_s=float(times.mean()),
        p95_s=p95,
        recomputed_fraction=_share(
            sum(recomputed(job) for run in own for job in run.jobs), sum(sources.values())
        ),
        agrees=all(known) if known else None,
        p50_s=p50,
        p90_s=p90,
        p99_s=p99,
        jobs=done,
        unfinished=tuple(
            f"{job.name} (round {run.round + 1})"
            for run in own
            for job in run.jobs
            if job.error is not None
        ),
        jobs_per_s=float(np.mean([run.jobs_per_s for run in own])),
        done_per_s=_share(done, spans),
        ttft_s=float(np.mean([turn.ttft_s for turn in turns] or [np.nan])),
        sources=sources,
        by_turn=tuple(_by_turn(turns)),
        cpu_s=float(np.mean([run.cpu_s for run in own])),
        rss_bytes=int(np.mean([run.rss_bytes for run in own])),
    )


def rows(runs: Sequence[Run], *, forced: bool) -> list[Row]:
    """A row for every server and load that was measured, in the order they came."""
    pairs = dict.fromkeys((run.load, run.server) for run in runs)
    loads = list(dict.fromkeys(load for load, _ in pairs))
    ordered = sorted(pairs, key=lambda pair: loads.index(pair[0]))
    return [row(server, load, runs, forced=forced) for load, server in ordered]


def closed(runs: Iterable[Run], percentile: float | None = None) -> float | None:
    """(stock - tiered) / (stock - bound) of completion times under pressure.

    Only jobs that finished in every run of the three count.

    Args:
        percentile: in percent; None compares means.

    Returns:
        None unless all three were measured and stock is slower than the bound.
    """
    under = [run for run in runs if run.load == PRESSURE]
    by_server = {
        name: [run for run in under if run.server == name] for name in (STOCK, TIERED, BOUND)
    }
    if not all(by_server.values()):
        return None
    among = common([run for found in by_server.values() for run in found])
    if not among:
        return None
    figure = {}
    for name, found in by_server.items():
        times = [s for run in found for s in completions(run, among)]
        figure[name] = float(
            np.mean(times) if percentile is None else np.percentile(times, percentile)
        )
    gap = figure[STOCK] - figure[BOUND]
    return (figure[STOCK] - figure[TIERED]) / gap if gap > 0 else None


@dataclass(frozen=True, slots=True)
class IdleRatio:
    """Mean completion time of a server over stock's at idle, and its 95% bootstrap interval."""

    ratio: float
    low: float
    high: float


def idle_ratio(runs: Iterable[Run], server: str) -> IdleRatio | None:
    """Over alternations that have both servers, with the jobs that finished on both.

    The interval is a percentile bootstrap over alternations: runs of one alternation stand
    beside each other in time, and so share what else the machine was doing.
    """
    idle = [run for run in runs if run.load == IDLE]
    ours = {run.round: run for run in idle if run.server == server}
    stock = {run.round: run for run in idle if run.server == STOCK}
    sums = []
    for number in sorted(ours.keys() & stock.keys()):
        pair = ours[number], stock[number]
        among = common(pair)
        if among:
            sums.append([sum(completions(run, among)) for run in pair])
    if not sums:
        return None
    table = np.array(sums)
    drawn = np.random.default_rng(0).integers(len(table), size=(BOOTSTRAPS, len(table)))
    top, bottom = table[drawn].sum(axis=1).T
    low, high = np.quantile(top / bottom, [0.025, 0.975])
    ours_s, stock_s = table.sum(axis=0)
    return IdleRatio(float(ours_s / stock_s), float(low), float(high))


def common(runs: Iterable[Run]) -> frozenset[str]:
    """Names of the jobs that finished in every run."""
    names = [{job.name for job in finished(run)} for run in runs]
    return frozenset(set.intersection(*names))


def _by_turn(turns: Iterable[TurnDone]) -> Iterable[ByTurn]:
    grouped = defaultdict(list)
    for turn in turns:
        grouped[turn.turn].append(turn)
    for number, found in sorted(grouped.items()):
        yield ByTurn(
            turn=number,
            ttft_s=float(np.mean([turn.ttft_s for turn in found])),
            latency_s=float(np.mean([turn.latency_s for turn in found])),
            sources=_sum(found),
        )


def _sum(turns: Iterable[TurnDone]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for turn in turns:
        total.update(sources_of(turn))
    return dict(total)


def _span(run: Run) -> float:
    began = min((job.began_s for job in run.jobs), default=0.0)
    return max((job.ended_s for job in run.jobs), default=0.0) - began


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
