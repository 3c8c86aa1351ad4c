"""Gradient-boosted trees over a tool's command: grown by LightGBM, evaluated here.

Growing needs LightGBM, the extra ``learned``; without it no trees are grown. LightGBM's own
prediction of one row takes longer than a decision may.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tiered_kv.policies.base import ToolUse

from .command_features import FEATURES, features_of
from .saved_state import entries, entry, numbers

Array = NDArray[np.float64]

MAX_SAMPLES = 4096
"""Gaps kept as samples, the latest ones."""
ENOUGH = 200
"""Gaps before the first trees are grown."""
TREES, LEAVES = 24, 8
MAX_CACHED = 1024

_PARAMS = {
    "num_leaves": LEAVES,
    "learning_rate": 0.1,
    "min_data_in_leaf": 10,
    "feature_fraction": 0.7,
    "seed": 1,
    "deterministic": True,
    "num_threads": 1,
    "verbose": -1,
}


@dataclass(frozen=True, slots=True)
class Trees:
    """Grown trees, whose leaf values add up to a score.

    Attributes:
        nodes: per tree, rows of (feature, threshold, low child, high child); a value up to the
            threshold goes to the low child. A child c < 0 is leaf -c - 1.
        leaves: per tree, the value of each leaf.
    """

    nodes: Sequence[Sequence[Sequence[float]]]
    leaves: Sequence[Sequence[float]]
    _cache: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def score(self, tool: ToolUse) -> float:
        """Return the score of a tool's command. Cached, since the same command is scored again
        soon."""
        known = self._cache.get(tool.command)
        if known is not None:
            return known
        score = self._cache[tool.command] = self.score_of(_features(tool))
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        return score

    def score_of(self, features: Sequence[float]) -> float:
        """Return the score of ``FEATURES`` numbers."""
        score = 0.0
        for nodes, leaves in zip(self.nodes, self.leaves, strict=True):
            at = 0 if nodes else -1
            while at >= 0:
                feature, threshold, low, high = nodes[at]
                at = int(low if features[int(feature)] <= threshold else high)
            score += leaves[-at - 1]
        return score

    def dump(self) -> list[object]:
        """Return the trees as JSON."""
        return [
            {"nodes": [list(node) for node in nodes], "leaves": list(leaves)}
            for nodes, leaves in zip(self.nodes, self.leaves, strict=True)
        ]

    @classmethod
    def loaded(cls, saved: object) -> Trees:
        """Build from what ``dump`` returned.

        Raises:
            ValueError: the state is malformed.
        """
        trees = [_checked(tree) for tree in entries(saved)]
        return cls([nodes for nodes, _ in trees], [leaves for _, leaves in trees])


class Samples:
    """The last gaps after commands, to grow trees from. ``latest`` may run on another thread
    than ``add``: at worst one sample mixes two gaps."""

    def __init__(self) -> None:
        self._rows: Array = np.zeros((MAX_SAMPLES, FEATURES + 1))
        self._seen = 0

    def add(self, tool: ToolUse, value: float) -> None:
        """Add the value that trees should predict for a tool. Tools without a command are
        skipped."""
        if not tool.command:
            return
        row = self._rows[self._seen % MAX_SAMPLES]
        row[:-1] = _features(tool)
        row[-1] = value
        self._seen += 1

    def latest(self) -> tuple[Array, Array] | None:
        """Return features [gaps, ``FEATURES``] and values, oldest first; None if too few."""
        count = min(self._seen, MAX_SAMPLES)
        if count < ENOUGH:
            return None
        rows = self._rows[np.arange(self._seen - count, self._seen) % MAX_SAMPLES]
        return rows[:, :-1], rows[:, -1]


def grown(rows: Array, values: Array, objective: Literal["regression", "binary"]) -> Trees | None:
    """Grow trees whose score is the value, or with ``binary`` the log-odds of a value of 1.

    Takes some tenths of a second. Returns None without LightGBM.
    """
    try:
        lightgbm: Any = importlib.import_module("lightgbm")
    except (ImportError, OSError):  # LightGBM itself, or the OpenMP it needs
        return None
    data = lightgbm.Dataset(rows, values)
    model = lightgbm.train({**_PARAMS, "objective": objective}, data, TREES)
    trees = [_flat(tree["tree_structure"]) for tree in model.dump_model()["tree_info"]]
    return Trees([nodes for nodes, _ in trees], [leaves for _, leaves in trees])


def _features(tool: ToolUse) -> Sequence[float]:
    return features_of(tool.path[0] if tool.path else "", tool.command)


def _flat(tree: Mapping[str, Any]) -> tuple[list[list[float]], list[float]]:
    """Flatten LightGBM's nested tree to the rows of ``Trees``."""
    nodes: list[list[float]] = []
    leaves: list[float] = []

    def add(node: Mapping[str, Any]) -> int:
        if "leaf_value" in node:
            leaves.append(float(node["leaf_value"]))
            return -len(leaves)
        row = [float(node["split_feature"]), float(node["threshold"]), 0.0, 0.0]
        nodes.append(row)
        at = len(nodes) - 1
        row[2], row[3] = float(add(node["left_child"])), float(add(node["right_child"]))
        return at

    add(tree)
    return nodes, leaves


def _checked(saved: object) -> tuple[list[list[float]], list[float]]:
    leaves = numbers(entry(saved, "leaves"), -1)
    nodes = numbers(entry(saved, "nodes") or np.empty((0, 4)), -1, 4)
    # A walk ends because children stand behind their parents.
    below = np.arange(len(nodes))[:, None]
    children = nodes[:, 2:]
    fits = ((children > below) & (children < len(nodes))) | (
        (children < 0) & (children >= -len(leaves))
    )
    features = nodes[:, 0]
    if not len(leaves) or not fits.all() or (features < 0).any() or (features >= FEATURES).any():
        raise ValueError("not a tree")
    return nodes.tolist(), leaves.tolist()
