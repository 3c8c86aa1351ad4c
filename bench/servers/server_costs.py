"""Estimates the step costs of a server from the times of its turns.

A turn's prefill lasts until its first token, and its answer from then until its last token. The
work of concurrent turns is assumed to be spread evenly over their own prefill and answer. A
decoding request produces one token per step. Each prefill and each answer therefore yields a row:
steps, prefill tokens, (query, key) pairs, requests, context tokens read, and duration in seconds.
The fitted costs minimize the relative errors, and none is negative. Outliers, such as the first
turns after a start, have little weight.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered_kv.bench.agents.results import Run
from tiered_kv.sizing.step_cost import StepCost

Array = NDArray[np.float64]

FEWEST_ROWS = 12
FEWEST_STEPS, FEWEST_TOKENS = 8, 16
"""Answers with fewer steps, and prefills with fewer tokens, are not used for the fit."""
LEAST_S = 1e-6
"""Minimum duration of a prefill or answer, seconds. No engine is faster."""
MOST_ROWS = 750
"""Maximum number of prefills per run, and of answers. From larger runs, an evenly spaced sample is
used."""
STEP_SHARE = 0.1
"""Fraction of a pure decode step that is not spent on reading weights. It is assumed, because a
measurement cannot separate the two parts."""
FAR_OFF = 0.15
"""Relative error above which a row has less weight in the fit."""
STEP_TOKENS = 2_048
"""Maximum tokens per step, for servers whose limit is unknown."""


@dataclass(frozen=True, slots=True)
class Span:
    """A turn, with times on the run's clock in seconds.

    Attributes:
        begin: start of the prefill.
        first, end: times of the first and of the last token.
        prompt, output: token counts.
        computed: number of prompt tokens computed.
        copied: time during which the engine only copied pages for this turn.
        requested: True if ``begin`` is the time at which the client sent the turn.
        waited: True if the turn may have waited in a queue since ``begin``.
    """

    begin: float
    first: float
    end: float
    prompt: int
    computed: int
    output: int
    copied: float = 0.0
    requested: bool = False
    waited: bool = False


@dataclass(frozen=True, slots=True)
class FittedCost:
    """Cost of a step, and how well it explains the times to which it was fitted.

    Attributes:
        overhead_s: time between request and prefill, seconds; 0 unless turns were ``requested``.
        error: median absolute relative error of prefills and answers.
    """

    cost: StepCost
    overhead_s: float
    error: float


@dataclass(frozen=True, slots=True)
class ServerCosts:
    """Times on a stock vLLM server, seconds.

    Attributes:
        first: from a request to its first token, excluding computation.
        token: per prompt token.
        pair: per (query, key) pair.
        step: per decode step.
        seq: per request in a step.
        kv: per context token that a step reads.
    """

    first: float
    token: float
    pair: float
    step: float
    seq: float
    kv: float

    @classmethod
    def of(cls, alone: Run, beside: Run) -> ServerCosts:
        """Return the costs fitted to two runs of a stock server; see ``fit_runs``.

        Raises:
            ValueError: there are too few turns.
        """
        found = fit_runs(alone, beside)
        cost = found.cost
        first, step = found.overhead_s + cost.step + cost.seq, cost.step + cost.weights
        return cls(first, cost.token, cost.pair, step, cost.seq, cost.kv)


def fit_runs(alone: Run, beside: Run) -> FittedCost:
    """Fit the cost of a step to two runs of a stock server.

    Args:
        alone: run with one job at a time.
        beside: run with several concurrent jobs.

    Raises:
        ValueError: there are too few turns.
    """
    runs = []
    for run, waited in ((alone, False), (beside, True)):
        turns = [turn for job in run.jobs for turn in job.turns]
        spans = [
            Span(
                turn.sent_s,
                turn.sent_s + turn.ttft_s,
                turn.sent_s + turn.latency_s,
                turn.prompt_tokens,
                max(1, turn.prompt_tokens - turn.cached_tokens),
                turn.output_tokens,
                requested=True,
                waited=waited,
            )
            for turn in turns
        ]
        runs.append(spans)
    return fit_steps(runs, STEP_TOKENS)


def fit_steps(runs: Sequence[Sequence[Span]], step_tokens: int) -> FittedCost:
    """Fit the cost of a step to the turns of one engine's runs.

    Args:
        step_tokens: maximum number of tokens that a step computes.

    Raises:
        ValueError: there are too few turns.
    """
    rows = [row for spans in runs for row in _rows(spans, step_tokens)]
    if len(rows) < FEWEST_ROWS or not any(row[2] for row in rows):
        raise ValueError(
            f"there are too few turns: {len(rows)} prefills and answers are long enough to "
            f"estimate the cost of a step, but {FEWEST_ROWS} are needed, including prefills"
        )
    return _fit(np.array(rows, dtype=np.float64).T)


def _rows(turns: Sequence[Span], step_tokens: int) -> list[tuple[float, ...]]:
    """Return a row for each prefill and answer that is long enough. A row has the work that the
    engine did during the prefill or answer, including the work of concurrent turns, and the
    duration in seconds. The work is: steps, steps with a prefill, prefill tokens, prefill pairs,
    requests summed over steps, context tokens read, seconds of copies, requests sent.
    """
    spans = [one for one in turns if one.first - one.begin >= LEAST_S and one.end >= one.first]
    spans.sort(key=lambda one: (one.begin, one.first, one.end))
    table: Array = np.array(
        [
            (
                # The start of a prefill after a wait in the queue is unknown. It is assumed to be
                # right before the first token.
                one.first - 2 * LEAST_S if one.waited else one.begin,
                one.first,
                one.end,
                one.computed,
                one.computed * max(one.computed / 2, one.prompt - one.computed / 2),
                np.ceil(one.computed / step_tokens),
                one.prompt + one.output / 2,
                one.copied,
            )
            for one in spans
        ],
        dtype=np.float64,
    ).reshape(-1, 8)

    def row(one: Span, since: float, until: float, said: int) -> tuple[float, ...]:
        meets = table[(table[:, 0] < until) & (table[:, 2] > since)]
        begin, first, end, computed, pairs, chunks, context, copied = meets.T
        prefill = _overlap(since, until, begin, first) / (first - begin)
        tokens, chunked = float((prefill * computed).sum()), float((prefill * chunks).sum())
        steps = said or max(float(np.ceil(one.computed / step_tokens)), tokens / step_tokens)
        decoded = _overlap(since, until, first, end) / (until - since) * steps
        return (
            steps,
            min(chunked, steps),
            tokens,
            float((prefill * pairs).sum()),
            float(decoded.sum()) + chunked,
            float((decoded * context).sum()),
            float(copied[(begin >= since) & (begin < until)].sum()),
            float(one.requested and not said),
            until - since,
        )

    prefills = [one for one in spans if one.computed >= FEWEST_TOKENS and not one.waited]
    answers = [one for one in spans if one.output > FEWEST_STEPS and one.end - one.first >= LEAST_S]
    return [
        *(row(one, one.begin, one.first, 0) for one in _some(prefills)),
        *(row(one, one.first, one.end, one.output - 1) for one in _some(answers)),
    ]


def _some(found: list[Span]) -> list[Span]:
    return found[:: -(-len(found) // MOST_ROWS) or 1]


def _overlap(since: float, until: float, begin: Array, end: Array) -> Array:
    shared: Array = np.maximum(0.0, np.minimum(until, end) - np.maximum(since, begin))
    return shared


def _fit(rows: Array) -> FittedCost:
    optimize: Any = importlib.import_module("scipy.optimize")
    steps, chunks, tokens, pairs, requests, read, copied, sent, took = rows
    base, token = np.median(took / steps), np.median((took / np.maximum(tokens, 1e-9))[tokens > 0])
    scale = np.array(
        [
            base,
            token,
            token / max(1.0, pairs.max() / max(1.0, tokens.max())),
            base / max(1.0, (requests / steps).max()),
            base / max(1.0, (read / steps).max()),
            base,
        ]
    )

    def errors(shares: Array) -> Array:
        base, token, pair, seq, kv, overhead = np.append(shares, 0.0)[:6] * scale
        weights = (
            1 - STEP_SHARE
        ) * base  # time to read the weights, which a prefill in the step hides
        seconds = (
            STEP_SHARE * base * steps
            + weights * (steps - chunks)
            + np.maximum(weights * chunks, token * tokens)
            + pair * pairs
            + seq * requests
            + kv * read
            + copied
            + overhead * sent
        )
        relative: Array = seconds / took - 1
        return relative

    # The overhead is a sixth cost, fitted only if requests have an overhead.
    start = np.array([0.5, 0.5, 0.1, 0.1, 0.1, 0.1] if sent.any() else [0.5, 0.5, 0.1, 0.1, 0.1])
    found = optimize.least_squares(
        errors, start, bounds=(0.0, np.inf), loss="soft_l1", f_scale=FAR_OFF
    )
    costs = np.append(found.x, 0.0)[:6] * scale
    base, token, pair, seq, kv, overhead = map(float, costs)
    step = STEP_SHARE * base
    cost = StepCost(step, base - step, token, pair, kv, seq)
    return FittedCost(cost, overhead, float(np.median(np.abs(errors(found.x)))))
