"""Paired ratios of two servers over rounds, with the confidence interval of every comparison."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

CONFIDENCE = 0.95
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """A ratio of positive figures, such as mean completion times, over pairs.

    A pair is a round: both servers got the same jobs at nearly the same time, so the machine's
    other load affects both and cancels in the ratio. Slowdowns multiply times, so ratios are
    averaged as logarithms. Then A over B is the inverse of B over A, including its interval.

    There are three to ten rounds. For so few rounds, a bootstrap gives too narrow an interval (with
    three rounds, one resample in nine consists of a single round), and resampling the jobs of a
    round would treat concurrent jobs as independent. Student's t is exact for few pairs if the
    logarithms are normal; ``drawn_order`` makes their errors independent and symmetric.

    Attributes:
        value: geometric mean of the ratios.
        low, high: bounds of the 95% interval; None for a single pair, which has no spread.
    """

    value: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> PairedRatio:
        """Return the ratio of ``ours`` to ``theirs``. Each position is a pair.

        Raises:
            ValueError: there are no pairs, the sequences differ in length, or a ratio is not
                positive.
        """
        logs = [math.log(one / other) for one, other in zip(ours, theirs, strict=True)]
        if not logs:
            raise ValueError("there are no pairs")
        count = len(logs)
        mean = math.fsum(logs) / count
        if count == 1:
            return cls(math.exp(mean), None, None)
        variance = math.fsum((one - mean) ** 2 for one in logs) / (count - 1)
        stats: Any = importlib.import_module("scipy.stats")
        quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
        half = quantile * math.sqrt(variance / count)
        return cls(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def drawn_order(servers: Sequence[T], seed: int, number: int) -> list[T]:
    """Return the order of the servers in round ``number``: as given or reversed, decided by a coin
    toss that is seeded with ``seed``.

    The coin toss makes differences between equal servers as likely positive as negative,
    independently in each round and whatever the noise, as the interval assumes. Strict alternation
    would put two runs of one server next to each other, where one period of noise affects both.
    """
    heads = np.random.default_rng([seed, number, 3]).integers(2)
    return list(reversed(servers)) if heads else list(servers)
