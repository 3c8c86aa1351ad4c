"""Histograms over powers of ten, so that a page holds counts instead of values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tiered_kv.trace.turn_table import Column

A_DECADE = 8
"""Bars between a power of ten and the next."""


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """Counts of values.

    Attributes:
        edges: ends of the bars. Shape (bars + 1,).
        counts: values in each bar. Shape (bars,).
    """

    edges: Column
    counts: Column


def histograms(values: Mapping[str, Column], least: float) -> dict[str, Histogram]:
    """Histograms of several sets of values, with the same bars. NaN are left out, and so are sets
    without any value.

    Args:
        least: begin of the first bar, a power of ten. What is less is counted there.
    """
    sets = {name: some[~np.isnan(some)].astype(float) for name, some in values.items()}
    sets = {name: np.maximum(some, least) for name, some in sets.items() if len(some)}
    if not sets:
        return {}
    low = int(np.floor(np.log10(min(some.min() for some in sets.values()))))
    high = int(np.floor(np.log10(max(some.max() for some in sets.values())))) + 1
    edges = np.logspace(low, high, (high - low) * A_DECADE + 1)
    edges[0], edges[-1] = edges[0] * (1 - 1e-9), edges[-1] * (1 + 1e-9)  # for rounding
    return {name: Histogram(edges, np.histogram(some, edges)[0]) for name, some in sets.items()}
