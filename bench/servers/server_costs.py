"""Costs of a stock server's steps, from two runs of it.

Jobs that run alone tell what a prefill costs: their first tokens came after a request's overhead,
a step, so much a token and so much a (query, key) pair. Jobs beside each other tell what decoding
costs: the time of a token by the requests that decoded meanwhile, by the tokens of their contexts,
and by those of the prefills that came between. Both are least squares of relative errors, with no
coefficient below zero.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered_kv.bench.agents.results import Run, TurnDone

Array = NDArray[np.float64]

FEWEST_TOKENS = 20
"""Least length of an answer that tells how long a token takes."""


@dataclass(frozen=True, slots=True)
class _Span:
    """A turn on the run's clock: sent, first token, last."""

    sent: float
    first: float
    last: float
    turn: TurnDone

    @property
    def computed(self) -> int:
        """Tokens of the prompt that were."""
        return self.turn.prompt_tokens - self.turn.cached_tokens

    @property
    def context(self) -> float:
        """Tokens, in the middle of the answer."""
        return self.turn.prompt_tokens + self.turn.output_tokens / 2


@dataclass(frozen=True, slots=True)
class ServerCosts:
    """Times on a stock server, seconds.

    Attributes:
        first: from a request to its first token, without what is computed.
        token: of a prompt's token. pair: of a (query, key) pair.
        step: of a decoding step. seq: of each request in it. kv: of each token of their contexts.
    """

    first: float
    token: float
    pair: float
    step: float
    seq: float
    kv: float

    @classmethod
    def of(cls, alone: Run, beside: Run) -> ServerCosts:
        """The costs that two runs of a stock server tell.

        Args:
            alone: jobs one after the other. beside: several at a time.

        Raises:
            ValueError: there are too few turns.
        """
        prefills = [_prefill(span) for span in _spans(alone)]
        decodes = [row for run in (alone, beside) for row in _decodes(_spans(run))]
        if len(prefills) < 4 or len(decodes) < 8:
            raise ValueError("too few turns to tell what a step costs")
        first, token, pair = _line(prefills)
        step, seq, kv, _ = _line(decodes)
        return cls(first, token, pair, step, seq, kv)


def _spans(run: Run) -> list[_Span]:
    return [
        _Span(turn.sent_s, turn.sent_s + turn.ttft_s, turn.sent_s + turn.latency_s, turn)
        for job in run.jobs
        for turn in job.turns
    ]


def _prefill(span: _Span) -> tuple[float, ...]:
    """1, tokens, pairs; seconds."""
    end = span.turn.prompt_tokens
    pairs = span.computed * (end - span.computed / 2)
    return 1.0, span.computed, pairs, span.turn.ttft_s


def _decodes(spans: Sequence[_Span]) -> list[tuple[float, ...]]:
    """For each answer 1, requests decoding, tokens of their contexts, and tokens prefilled, a
    step; seconds of a step."""
    rows: list[tuple[float, ...]] = []
    for mine in spans:
        steps = mine.turn.output_tokens - 1
        if steps + 1 < FEWEST_TOKENS:
            continue
        took = mine.last - mine.first
        requests = contexts = 0.0
        for other in spans:
            both = max(0.0, min(mine.last, other.last) - max(mine.first, other.first)) / took
            requests += both
            contexts += both * other.context
        between = [one.computed for one in spans if mine.first < one.first < mine.last]
        rows.append((1.0, requests, contexts, sum(between) / steps, took / steps))
    return rows


def _line(rows: Sequence[tuple[float, ...]]) -> list[float]:
    """Coefficients of the columns for the last one."""
    optimize: Any = importlib.import_module("scipy.optimize")
    table: Array = np.array(rows, dtype=np.float64)
    weighted = table[:, :-1] / table[:, -1:]
    scale = np.maximum(weighted.max(axis=0), 1e-300)
    found, _ = optimize.nnls(weighted / scale, np.ones(len(table)))
    return [float(one) for one in found / scale]
