"""Cost of a step of the engine that wrote a trace, from the times of its turns.

A turn's prefill lasts from the first step that computes of it to its first token, its answer from
there to its end. Other turns were computed in that time as well: each evenly over its own prefill
and its own answer, as is assumed. A request that decodes says one token in each step. So each
prefill and each answer is a row: steps, tokens of prefills, (query, key) pairs, requests, and
tokens of contexts that were read; and the seconds that it took. Costs are those with the least
relative errors, none of them below zero. Turns that lie far off, as the first ones after a start,
count little.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered_kv.sizing.step_cost import StepCost
from tiered_kv.trace.turn_record import TurnRecord

from .recording import WhatIfError

Column = NDArray[np.float64]

FEWEST_ROWS = 6
FEWEST_STEPS = 8
"""Least length of an answer that tells how long a step takes."""
FEWEST_TOKENS = 16
"""Least length of a prefill that tells how long a token takes."""
LEAST_S = 1e-6
"""Shortest prefill or answer: no engine is as fast."""
MOST_ROWS = 1_500
STEP_SHARE = 0.1
"""Share of a decoding step alone that is not reading weights: the two cannot be told apart."""
FAR_OFF = 0.15
"""Relative error from which on a row counts less."""


@dataclass(frozen=True, slots=True)
class FittedCost:
    """Cost of a step, and how well it tells the times that it was fitted to.

    Attributes:
        rows: prefills and answers.
        error: median of their relative errors, without signs.
    """

    cost: StepCost
    rows: int
    error: float


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    """Turns on the wall clock, ordered by their first steps. All have shape (turns,).

    Attributes:
        begin, first, end: of the first step, the first token, the answer, seconds.
        computed, pairs, chunks: of the prefill: tokens, (query, key) pairs, steps.
        said: tokens of the answer behind the first one. context: tokens in its middle.
        copied: seconds in which the engine copied pages for it and did nothing else.
    """

    begin: Column
    first: Column
    end: Column
    computed: Column
    pairs: Column
    chunks: Column
    said: Column
    context: Column
    copied: Column


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Work of prefills and answers, those of others beside them included. Shape (rows,).

    Attributes:
        steps: engine's steps. chunks: those of them with a prefill.
        tokens, pairs: of prefills. requests: sum over steps. read: tokens of contexts that decoding
            read. copied: seconds of copies. took: seconds of all.
    """

    steps: Column
    chunks: Column
    tokens: Column
    pairs: Column
    requests: Column
    read: Column
    copied: Column
    took: Column


def fit_costs(turns: Sequence[TurnRecord], step_tokens: int, copy_s_per_token: float) -> FittedCost:
    """Fit the cost of a step to the turns of one engine.

    Args:
        step_tokens: most tokens that a step computes.
        copy_s_per_token: seconds to copy a token's KV up from CPU memory.

    Raises:
        WhatIfError: there are too few turns with times and answers.
    """
    spans = _spans(turns, step_tokens, copy_s_per_token)
    rows = _rows(spans, step_tokens)
    if len(rows.took) < FEWEST_ROWS or not (rows.tokens > 0).any():
        raise WhatIfError(
            f"the trace has {len(rows.took)} prefills and answers that are long enough to tell "
            f"what a step costs, and {FEWEST_ROWS} are needed: record more turns"
        )
    return _fit(rows)


def _spans(turns: Sequence[TurnRecord], step_tokens: int, copy_s_per_token: float) -> _Spans:
    table = []
    for one in turns:
        times, tokens = one.times, one.tokens
        if times.scheduled_s is None or times.first_token_s is None or tokens.output < 1:
            continue
        computed, prompt = float(max(1, tokens.recomputed)), float(tokens.prompt)
        waited_s = times.scheduled_s - (times.admitted_s or 0.0)
        restored = max(0, tokens.cpu + tokens.ssd) * copy_s_per_token
        table.append(
            (
                one.arrived + times.scheduled_s,
                one.arrived + times.first_token_s,
                one.ended,
                computed,
                computed * max(computed / 2, prompt - computed / 2),
                np.ceil(computed / step_tokens),
                tokens.output - 1.0,
                prompt + tokens.output / 2,
                restored if waited_s < restored / 2 else 0.0,  # else it waited for them aside
            )
        )
    columns: Column = np.array(sorted(table), dtype=np.float64).reshape(-1, 9).T
    begin, first, end = columns[:3]
    sound = (first - begin >= LEAST_S) & (end >= first)
    return _Spans(*(column[sound] for column in columns))


def _rows(spans: _Spans, step_tokens: int) -> _Rows:
    """The work of each prefill and answer that is long enough; of very many, evenly taken ones."""
    prefills = np.flatnonzero(spans.computed >= FEWEST_TOKENS)
    answers = np.flatnonzero((spans.said >= FEWEST_STEPS) & (spans.end - spans.first >= LEAST_S))
    rows = [
        _row(spans, at, spans.begin[at], spans.first[at], 0.0, step_tokens)
        for at in _some(prefills)
    ]
    rows += [
        _row(spans, at, spans.first[at], spans.end[at], spans.said[at], step_tokens)
        for at in _some(answers)
    ]
    table: Column = np.array(rows, dtype=np.float64).reshape(-1, 8).T
    return _Rows(*table)


def _some(found: NDArray[np.int64]) -> NDArray[np.int64]:
    every = -(-len(found) // (MOST_ROWS // 2)) or 1
    return found[::every]


def _row(
    spans: _Spans, at: int, since: float, until: float, said: float, step_tokens: int
) -> tuple[float, ...]:
    """Work in a time in which one turn was computed alone or beside others.

    Args:
        at: the turn. said: tokens that it said in that time, each in a step; 0 for its prefill.
    """
    meets = (spans.begin < until) & (spans.end > since)
    begin, first, end = spans.begin[meets], spans.first[meets], spans.end[meets]
    prefill = _overlap(since, until, begin, first) / (first - begin)
    tokens = float((prefill * spans.computed[meets]).sum())
    chunks = float((prefill * spans.chunks[meets]).sum())
    steps = said or max(float(spans.chunks[at]), tokens / step_tokens)
    decoded = _overlap(since, until, first, end) / (until - since) * steps
    copying = (begin >= since) & (begin < until)
    return (
        steps,
        min(chunks, steps),
        tokens,
        float((prefill * spans.pairs[meets]).sum()),
        float(decoded.sum()) + chunks,
        float((decoded * spans.context[meets]).sum()),
        float(spans.copied[meets][copying].sum()),
        until - since,
    )


def _overlap(since: float, until: float, begin: Column, end: Column) -> Column:
    shared: Column = np.maximum(0.0, np.minimum(until, end) - np.maximum(since, begin))
    return shared


def _fit(rows: _Rows) -> FittedCost:
    optimize: Any = importlib.import_module("scipy.optimize")
    base = float(np.median(rows.took / rows.steps))
    with_tokens = rows.tokens > 0
    token = float(np.median(rows.took[with_tokens] / rows.tokens[with_tokens]))
    scale = np.array(
        [
            base,
            token,
            token / max(1.0, float(rows.pairs.max()) / max(1.0, float(rows.tokens.max()))),
            base / max(1.0, float((rows.requests / rows.steps).max())),
            base / max(1.0, float((rows.read / rows.steps).max())),
        ]
    )

    def errors(shares: Column) -> Column:
        relative: Column = _seconds(rows, shares * scale) / rows.took - 1
        return relative

    begin = np.array([0.5, 0.5, 0.1, 0.1, 0.1])
    found = optimize.least_squares(
        errors, begin, bounds=(0.0, np.inf), loss="soft_l1", f_scale=FAR_OFF
    )
    base, token, pair, seq, kv = (float(one) for one in found.x * scale)
    step = STEP_SHARE * base
    cost = StepCost(step, base - step, token, pair, kv, seq)
    return FittedCost(cost, len(rows.took), float(np.median(np.abs(errors(found.x)))))


def _seconds(rows: _Rows, costs: Column) -> Column:
    """Time of each row: a step with a prefill reads the weights while it computes."""
    base, token, pair, seq, kv = costs
    weights = (1 - STEP_SHARE) * base
    computing = np.maximum(weights * rows.chunks, token * rows.tokens)
    told: Column = (
        STEP_SHARE * base * rows.steps
        + weights * (rows.steps - rows.chunks)
        + computing
        + pair * rows.pairs
        + seq * rows.requests
        + kv * rows.read
        + rows.copied
    )
    return told
