"""Tokens over time: KV by the place where it lay, and prompts by where they were found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tiered_kv.trace.turn_table import Column, TurnTable

from .kv_places import PLACES, Place, Stays

BINS = 160
"""Moments of a curve."""
SOURCES = ("tokens.vram", "tokens.cpu", "tokens.ssd", "tokens.recomputed")
"""Sources of the tokens of a prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class OverTime:
    """Tokens in each part of the trace's time.

    Attributes:
        at: middle of each part, seconds after the first arrival. Shape (BINS,).
        resting: tokens of KV, on average over the part, by place.
        prompts: tokens of prompts that were admitted in the part, each second, by source.
    """

    at: Column
    resting: Mapping[Place, Column]
    prompts: Mapping[str, Column]

    @classmethod
    def of(cls, table: TurnTable, stays: Stays) -> OverTime:
        """The curves of a trace that is not empty."""
        arrived = table["arrived"] - table["arrived"].min()
        last = max(float((arrived + table["times.end_s"]).max()), float(stays.end.max(initial=0)))
        edges = np.linspace(0.0, max(last, 1e-3), BINS + 1)
        width = edges[1] - edges[0]
        context = (table["tokens.prompt"] + table["tokens.output"])[stays.row].astype(float)
        resting = {}
        for index, place in enumerate(PLACES):
            chosen = stays.place == index
            some = stays.among(chosen)
            resting[place] = np.diff(_lain(edges, some, context[chosen])) / width
        admitted = arrived + np.nan_to_num(table["times.admitted_s"].astype(float))
        prompts = {
            name: np.histogram(admitted, edges, weights=table[name].astype(float))[0] / width
            for name in SOURCES
        }
        return cls((edges[1:] + edges[:-1]) / 2, resting, prompts)


def _lain(edges: Column, stays: Stays, tokens: Column) -> Column:
    """Tokens times seconds that lay in the stays until each edge."""
    return _since(edges, stays.begin, tokens) - _since(edges, stays.end, tokens)


def _since(edges: Column, moments: Column, tokens: Column) -> Column:
    """Sum of tokens times the seconds from their moment until each edge."""
    order = np.argsort(moments)
    moments, tokens = moments[order], tokens[order]
    before = np.searchsorted(moments, edges)
    sums = np.append(0.0, np.cumsum(tokens))[before]
    offsets = np.append(0.0, np.cumsum(tokens * moments))[before]
    total: Column = sums * edges - offsets
    return total
