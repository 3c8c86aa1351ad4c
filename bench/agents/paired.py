"""Paired ratios: two servers given the same jobs, side by side in several rounds."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """A ratio of positive figures, such as mean completion times, over pairs.

    Attributes:
        value: geometric mean of the pairs' ratios.
        low, high: bounds of its 95% interval (Student's, of the logarithms); None for one pair,
            which does not tell how far two of them differ.
    """

    value: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> PairedRatio:
        """Raises:
        ValueError: there is no pair, or one figure is missing.
        """
        logs = [math.log(one / other) for one, other in zip(ours, theirs, strict=True)]
        if not logs:
            raise ValueError("there is no pair")
        count = len(logs)
        mean = math.fsum(logs) / count
        if count == 1:
            return cls(math.exp(mean), None, None)
        variance = math.fsum((one - mean) ** 2 for one in logs) / (count - 1)
        stats: Any = importlib.import_module("scipy.stats")
        quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
        half = quantile * math.sqrt(variance / count)
        return cls(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
