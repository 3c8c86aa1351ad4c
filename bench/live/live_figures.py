"""Figures of measured runs: completion times, first tokens, hits; and servers in pairs.

Times carry the names that Continuum's own analysis gives them (``average_duration``,
``percentile_95`` and so on), so that its readers find them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from tiered_kv.bench.agents.paired import PairedRatio
from tiered_kv.bench.replay.results import JobDone, TurnDone

from .live_load import Load
from .live_run import LiveRun

PERCENTILES = (50, 90, 95, 99)


def live_rows(runs: Sequence[LiveRun]) -> list[dict[str, Any]]:
    """One row for every load and server, over all rounds; times in seconds.

    ``hit_ratio`` is the share of prompt tokens that the server had, by what its answers say, and
    ``hits_by_counter`` by its own counters; None where it does not tell. ``tpot`` is of turns,
    the mean time from one token of an answer to the next. ``turns_per_s`` and ``tokens_per_s``
    (of prompts and answers) are over the time from a run's begin to its end.
    """
    return [_row(load, server, own) for load, server, own in _grouped(runs)]


def live_pairs(runs: Sequence[LiveRun]) -> list[dict[str, Any]]:
    """Every server against the first, by load: paired ratios over rounds.

    In a round count the jobs that finished on both; for tokens a second all that was answered.
    ``paired_difference`` is the ratio of completion times less one, in per cent; it is told with
    its interval where there are two rounds or more. ``tpot_ratio`` is left out where a server sends
    answers of one piece.
    """
    servers = list(dict.fromkeys(run.server for run in runs))
    found = []
    for load in _loads(runs):
        by_round = {(run.server, run.round): run for run in runs if run.load == load}
        for server in servers[1:]:
            pair = _pair(by_round, servers[0], server)
            if pair is not None:
                found.append({"load": load.name, "server": server, "over": servers[0], **pair})
    return found


def _pair(by_round: dict[tuple[str, int], LiveRun], first: str, server: str) -> Any:
    means: dict[str, list[tuple[float, float]]] = defaultdict(list)
    jobs = 0
    for (name, number), run in sorted(by_round.items()):
        other = by_round.get((first, number))
        if name != server or other is None:
            continue
        ours, theirs = _times(run), _times(other)
        common = sorted(ours.keys() & theirs.keys())
        if not common:
            continue
        jobs += len(common)
        one = np.array([ours[job] for job in common])
        two = np.array([theirs[job] for job in common])
        means["mean"].append((float(one.mean()), float(two.mean())))
        means["p90"].append((float(np.quantile(one, 0.9)), float(np.quantile(two, 0.9))))
        turns = [_turns(each, common) for each in (run, other)]
        means["ttft"].append(_both(_mean(turn.ttft_s for turn in own) for own in turns))
        tpot = _both(_mean(_tpots(own)) for own in turns)
        if all(one > 0 for one in tpot):
            means["tpot"].append(tpot)
        means["tokens_per_s"].append(_both(_tokens_per_s(each) for each in (run, other)))
    if not means:
        return None
    ratios = {
        name: PairedRatio.of([one for one, _ in pairs], [two for _, two in pairs])
        for name, pairs in means.items()
    }
    mean = ratios["mean"]
    return {
        "rounds": len(means["mean"]),
        "jobs": jobs,
        "paired_difference": {
            "percent": 100 * (mean.value - 1),
            "low": None if mean.low is None else 100 * (mean.low - 1),
            "high": None if mean.high is None else 100 * (mean.high - 1),
        },
        **{f"{name}_ratio": asdict(one) for name, one in ratios.items()},
    }


def _row(load: Load, server: str, runs: Sequence[LiveRun]) -> dict[str, Any]:
    done = [job for run in runs for job in run.jobs if job.error is None]
    failed = [job for run in runs for job in run.jobs if job.error is not None]
    times = np.array([job.completion_s for job in done] or [np.nan])
    turns = [turn for run in runs for job in (*run.jobs, *run.agents) for turn in job.turns]
    seconds = sum(_span(run) for run in runs)
    prompt = sum(turn.prompt_tokens for turn in turns)
    answer = sum(turn.output_tokens for turn in turns)
    tells = all(run.tells_cached for run in runs)
    return {
        "server": server,
        "load": load.name,
        load.arriving.value: load.level,
        "rounds": len(runs),
        "num_jobs": len(done),
        "unfinished": len(failed),
        "first_error": failed[0].error if failed else None,
        "average_duration": float(times.mean()),
        "min_duration": float(times.min()),
        "max_duration": float(times.max()),
        "median_duration": float(np.median(times)),
        **{f"percentile_{at}": float(np.percentile(times, at)) for at in PERCENTILES},
        "ttft": _distribution([turn.ttft_s for turn in turns]),
        "tpot": _distribution(_tpots(turns)),
        "by_turn": _by_turn(job for run in runs for job in run.jobs),
        "hit_ratio": sum(turn.cached_tokens for turn in turns) / prompt if tells else None,
        "hits_by_counter": _counted(runs),
        "jobs_per_s": len(done) / seconds,
        "turns_per_s": len(turns) / seconds,
        "tokens_per_s": (prompt + answer) / seconds,
        "prompt_tokens": prompt,
        "answer_tokens": answer,
    }


def _by_turn(jobs: Iterable[JobDone]) -> list[dict[str, float]]:
    grouped: dict[int, list[TurnDone]] = defaultdict(list)
    for job in jobs:
        for turn in job.turns:
            grouped[turn.turn].append(turn)
    return [
        {
            "turn": number,
            "requests": len(turns),
            "ttft": _mean(turn.ttft_s for turn in turns),
            "latency": _mean(turn.latency_s for turn in turns),
            "prompt_tokens": _mean(turn.prompt_tokens for turn in turns),
        }
        for number, turns in sorted(grouped.items())
    ]


def _counted(runs: Sequence[LiveRun]) -> dict[str, float] | None:
    """Shares of the prompt tokens that a server looked up, by where it found them."""
    if not all(run.counts.get("asked") for run in runs):
        return None
    asked = sum(run.counts["asked"] for run in runs)
    places = [place for place in runs[0].counts if place != "asked"]
    return {place: sum(run.counts.get(place, 0) for run in runs) / asked for place in places}


def _distribution(values: Sequence[float]) -> dict[str, float]:
    some = np.array(values or [np.nan])
    at = {f"p{percent}": float(np.percentile(some, percent)) for percent in PERCENTILES}
    return {"mean": float(some.mean()), **at}


def _grouped(runs: Sequence[LiveRun]) -> Iterator[tuple[Load, str, list[LiveRun]]]:
    for load in _loads(runs):
        for server in dict.fromkeys(run.server for run in runs):
            own = [run for run in runs if (run.load, run.server) == (load, server)]
            if own:
                yield load, server, own


def _loads(runs: Sequence[LiveRun]) -> list[Load]:
    return list(dict.fromkeys(run.load for run in runs))


def _times(run: LiveRun) -> dict[str, float]:
    return {job.name: job.completion_s for job in run.jobs if job.error is None}


def _turns(run: LiveRun, names: Sequence[str]) -> list[TurnDone]:
    wanted = set(names)
    return [turn for job in run.jobs if job.name in wanted for turn in job.turns]


def _tpots(turns: Iterable[TurnDone]) -> list[float]:
    """Seconds a token after the first, of every answer that has more than one."""
    return [
        (turn.latency_s - turn.ttft_s) / (turn.output_tokens - 1)
        for turn in turns
        if turn.output_tokens > 1
    ]


def _tokens_per_s(run: LiveRun) -> float:
    jobs = (*run.jobs, *run.agents)
    return sum(turn.prompt_tokens + turn.output_tokens for job in jobs for turn in job.turns) / (
        _span(run)
    )


def _span(run: LiveRun) -> float:
    return max(job.ended_s for job in run.jobs)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values) or [np.nan]))


def _both(values: Iterable[float]) -> tuple[float, float]:
    ours, theirs = values
    return ours, theirs
