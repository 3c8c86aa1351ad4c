"""A model's row: means of all rounds, ratios with their range over rounds, and answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiered_kv.bench.replay.ab import unequal
from tiered_kv.bench.replay.agreement import Difference, difference, widest, within
from tiered_kv.bench.replay.figures import completions
from tiered_kv.bench.replay.ledger import Kept
from tiered_kv.bench.replay.results import JobDone, Run

from .counts import Counts
from .servers import DENSE, OURS, REACH, STOCK, UNLIMITED


@dataclass(frozen=True, slots=True)
class Played:
    """One run and what the server counted in it."""

    kept: Kept
    counts: Counts

    @property
    def run(self) -> Run:
        return self.kept.run

    @property
    def mean_job_s(self) -> float:
        return _mean(completions(self.run))

    @property
    def mean_ttft_s(self) -> float:
        return _mean([turn.ttft_s for job in self.run.jobs for turn in job.turns])


def make_row(
    model: str, groups: str, played: Sequence[Played], mistake: float | None = None
) -> dict[str, Any]:
    """Row as ``--json`` prints it; times in seconds, None where nothing was measured.

    Args:
        mistake: what a wrong page changes in stock's answer, mean nats a token.
    """
    by_server: dict[str, list[Played]] = {}
    for one in played:
        by_server.setdefault(one.run.server, []).append(one)
    found, usual = ours_and_usual([one.run for one in played])
    return {
        "model": model,
        "groups": groups,
        "servers": {name: _server(runs) for name, runs in by_server.items()},
        **_over("stock", by_server, STOCK),
        **_over("dense", by_server, DENSE),
        **_over("reach", by_server, REACH),
        **_over("unlimited", by_server, UNLIMITED),
        "answers_equal": within(found, usual) if found and usual else None,
        "answers": {
            "tokens": found.tokens if found else 0,
            "ours_worst_turn_nats": found.worst_turn if found else None,
            "stock_worst_turn_nats": usual.worst_turn if usual else None,
            "wrong_page_nats": mistake,
        },
        "notes": notes(played),
    }


def ours_and_usual(runs: Sequence[Run]) -> tuple[Difference | None, Difference | None]:
    """Differences of ours from stock, and those of stock from itself, each the widest over all
    runs: stock, keeping densely or with room for everything, cuts prompts in as many ways."""
    reference = next((run for run in runs if run.server == STOCK), None)
    if reference is None:
        return None, None
    others = [run for run in runs if run is not reference]
    ours = [difference(run, reference) for run in others if run.server == OURS]
    usual = [difference(run, reference) for run in others if run.server != OURS]
    return _widest(ours), _widest(usual)


def notes(played: Sequence[Played]) -> list[str]:
    """Reasons to doubt the row, a sentence each."""
    failed = [
        f"{one.run.server}, round {one.run.round + 1}: {job.name} ended with {job.error}"
        for one in played
        for job in one.run.jobs
        if job.error is not None
    ]
    return [
        *unequal([one.kept for one in played]),
        *failed,
        *_counted(played, lambda counts: counts.preempted, "requests were preempted"),
        *_counted(played, lambda counts: counts.stuck, "times it stood still for half a minute"),
    ]


def _counted(played: Sequence[Played], what: Callable[[Counts], int], said: str) -> list[str]:
    found = Counter[str]()
    for one in played:
        found[one.run.server] += what(one.counts)
    return [f"{server}: {count} {said}" for server, count in found.items() if count]


def mean_difference(one: Sequence[JobDone], other: Sequence[JobDone]) -> float | None:
    """Mean difference of the logprobs of two jobs' first answers, nats."""
    pairs = [
        (a, b)
        for left, right in zip(one, other, strict=True)
        for a, b in zip(left.turns[0].logprobs, right.turns[0].logprobs, strict=True)
    ]
    return _mean([abs(a - b) for a, b in pairs]) if pairs else None


def _server(runs: Sequence[Played]) -> Mapping[str, Any]:
    times = [one.mean_job_s for one in runs]
    return {
        "mean_job_s": _mean(times),
        "mean_job_s_range": [min(times), max(times)],
        "mean_ttft_s": _mean([one.mean_ttft_s for one in runs]),
        "prompt_tokens_computed": round(_mean([one.counts.computed for one in runs])),
        "prompt_tokens_restored": round(_mean([one.counts.restored for one in runs])),
        "prompt_tokens": round(_mean([one.counts.prompt for one in runs])),
        "rounds": len(runs),
    }


def _over(
    name: str, by_server: Mapping[str, Sequence[Played]], other: str
) -> dict[str, float | list[float] | None]:
    """Ours over another server: the ratio of means, and the range of the rounds' own ratios."""
    key = f"ours_over_{name}"
    ours = {one.run.round: one.mean_job_s for one in by_server.get(OURS, ())}
    theirs = {one.run.round: one.mean_job_s for one in by_server.get(other, ())}
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return {key: None, f"{key}_range": None}
    ratios = [ours[number] / theirs[number] for number in shared]
    whole = sum(ours[number] for number in shared) / sum(theirs[number] for number in shared)
    return {key: whole, f"{key}_range": [min(ratios), max(ratios)]}


def _widest(found: Sequence[Difference | None]) -> Difference | None:
    known = [one for one in found if one is not None]
    return widest(known) if known else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
