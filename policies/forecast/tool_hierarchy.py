"""Tool durations in a hierarchy: global, tool, subcommand, masked command. Each level is the prior
of the next.

A node learns the distribution of ln X as a Normal-Inverse-Gamma posterior from observations whose
weight decays. With enough observations, it mixes in the empirical distribution. A node with few
observations forecasts like its parent.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiered_kv.json_fields import Fields, items, strings
from tiered_kv.policies.base import Rule, ToolUse
from tiered_kv.policies.distribution import CELL_LOG_S, CELLS, GRID, Forecast, masses_of

from .normal_inverse_gamma import NormalInverseGamma
from .saved_state import numbers

Array = NDArray[np.float64]

ROOT_PRIOR = NormalInverseGamma(mu=0.0, lam=1.0, alpha=1.0, beta=1.0)
"""Prior of all gaps, from ContextServe."""
PRIOR_WORTH = 4.0
"""κ: weight of a prior from the parent or from a rule, as a number of observations."""
NODE_DECAY = 0.99
"""Factor by which the weight of an observation decays with each later observation of the same
node."""
HISTOGRAM_DECAY = 0.9995
"""Factor by which the weight of an observation in the empirical distribution decays with each later
observation. A distribution needs many more observations than a mean."""
HISTOGRAM_FROM = 30
"""Minimum number of observations for the empirical distribution to be used. At this number, it has
about half of the weight."""
MAX_NODES = 1024
"""Maximum number of nodes. The least recently used node is evicted, because models keep inventing
commands."""
EXPECTED_SIGMA = 0.7
"""Spread of ln X around a client's estimate, which is mostly right within a factor of two."""

_LOG_GRID = np.log(GRID)


@dataclass(slots=True)
class Node:
    """Observations of one tool, subcommand or command.

    Attributes:
        seen: number of observations.
        weight: total weight of the observations after decay.
        mean, squares: weighted mean of ln X, and weighted sum of squared deviations from the mean.
        histogram: weight of the gaps in each cell. Shape (cells,).
    """

    seen: int = 0
    weight: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    histogram: Array = field(default_factory=lambda: np.zeros(CELLS))

    def observe(self, cells: Array, mean: float, variance: float) -> None:
        """Add a gap. ``cells`` is the probability that it lies in each cell; ``mean`` and
        ``variance`` describe its logarithm."""
        old = self.weight * NODE_DECAY
        off = mean - self.mean
        self.seen += 1
        self.weight = old + 1
        self.mean += off / self.weight
        self.squares = self.squares * NODE_DECAY + off * off * old / self.weight + variance
        self.histogram *= HISTOGRAM_DECAY
        self.histogram += cells


_UNSEEN = Node()


class ToolHierarchy:
    """Forecasts gaps from the tool alone, learned from all jobs. Not thread-safe."""

    def __init__(self) -> None:
        self._root = Node()
        self._nodes: OrderedDict[tuple[str, ...], Node] = OrderedDict()

    def forecast(self, tool: ToolUse | None) -> Array:
        """Return the probability of each cell after a call of ``tool``, or of any tool if ``tool``
        is None. Shape (cells,). Does not change the hierarchy."""
        belief = _posterior(ROOT_PRIOR, self._root)
        deepest = self._root
        path = tool.path if tool else ()
        for depth in range(1, len(path) + 1):
            node = self._nodes.get(path[:depth])
            belief = belief.capped(PRIOR_WORTH)
            # A rule is specific to a command, so it replaces the prior of all shell commands.
            if tool and tool.rule and depth == min(2, len(path)):
                belief = _rule_prior(tool.rule)
            if node:
                belief = _posterior(belief, node)
            deepest = node or _UNSEEN
        cdf = belief.cdf(_LOG_GRID)
        if deepest.seen >= HISTOGRAM_FROM:
            empirical = deepest.histogram.cumsum()
            total = float(empirical[-1])
            # The empirical distribution has the weight total / (total + HISTOGRAM_FROM).
            cdf *= HISTOGRAM_FROM
            cdf += empirical[:-1]
            cdf /= total + HISTOGRAM_FROM
        if tool is None:
            return masses_of(cdf)
        forecast = Forecast(cdf).between(tool.least_s, tool.most_s)
        return _sharpened(forecast.masses, tool.expected_s)

    def observe(self, tool: ToolUse | None, cells: Array) -> None:
        """Add a gap after a call of ``tool``. ``cells`` is the probability that the gap lies in
        each cell, shape (cells,)."""
        mean = float(cells @ CELL_LOG_S)
        variance = float(cells @ (CELL_LOG_S - mean) ** 2)
        self._root.observe(cells, mean, variance)
        path = tool.path if tool else ()
        for depth in range(1, len(path) + 1):
            key = path[:depth]
            node = self._nodes.setdefault(key, Node())
            node.observe(cells, mean, variance)
            self._nodes.move_to_end(key)
        while len(self._nodes) > MAX_NODES:
            self._nodes.popitem(last=False)

    def dump(self) -> list[object]:
        """Return the nodes as JSON: the root, then the other nodes, least recently used first."""
        return [_dumped((), self._root), *(_dumped(*item) for item in self._nodes.items())]

    @classmethod
    def loaded(cls, saved: object) -> ToolHierarchy:
        """Create a hierarchy from what ``dump`` returned.

        Raises:
            ValueError: the state is malformed.
        """
        found = dict(_loaded(one) for one in map(Fields, items(saved)))
        if () not in found or len(found) > MAX_NODES + 1:
            raise ValueError("the saved tool hierarchy has no root, or too many nodes")
        made = cls()
        made._root = found.pop(())
        made._nodes = OrderedDict(found)
        return made


def _posterior(prior: NormalInverseGamma, node: Node) -> NormalInverseGamma:
    return prior.updated(node.weight, node.mean, node.squares)


def _rule_prior(rule: Rule) -> NormalInverseGamma:
    alpha = PRIOR_WORTH / 2
    return NormalInverseGamma(
        math.log(max(rule.median_s, 1e-3)), PRIOR_WORTH, alpha, alpha * rule.sigma**2
    )


def _sharpened(masses: Array, expected_s: float | None) -> Array:
    """Multiply the probability of each cell by the likelihood of the client's estimate given a gap
    in that cell, and normalise. Without a usable estimate, ``masses`` is returned unchanged."""
    if expected_s is None or not 0 < expected_s < math.inf:
        return masses
    off = (CELL_LOG_S - math.log(expected_s)) / EXPECTED_SIGMA
    likely = masses * np.exp(-off * off / 2)
    total = likely.sum()
    return likely / total if total > 1e-12 else masses


def _dumped(path: tuple[str, ...], node: Node) -> dict[str, object]:
    cells = np.flatnonzero(node.histogram)
    return {
        "path": list(path),
        "observed": [node.seen, node.weight, node.mean, node.squares],
        "cells": cells.tolist(),
        "weights": node.histogram[cells].tolist(),
    }


def _loaded(saved: Fields) -> tuple[tuple[str, ...], Node]:
    seen, weight, mean, squares = saved.take("observed", numbers, 4).tolist()
    cells = saved.take("cells", numbers, -1, least=0)
    weights = saved.take("weights", numbers, len(cells), least=0)
    if seen < 0 or weight < 0 or squares < 0 or (cells >= CELLS).any():
        raise ValueError("the saved observations of a tool are invalid")
    node = Node(int(seen), weight, mean, squares)
    node.histogram[cells.astype(np.intp)] = weights
    return saved.take("path", strings), node
