"""Gradient-boosted trees on the command, for commands of which little was seen.

They give the same as a rule: a median and a spread of ln X, which stands in for what the
hierarchy would believe of a command without a past. Whether they may is measured: for each gap of
such a command, the regret of the decisions with and without them.

Growing trees takes LightGBM, the extra ``learned``; without it nothing is grown. Trees are walked
here, as LightGBM's own prediction of one row takes longer than a decision may.
"""

from __future__ import annotations

import importlib
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered_kv.policies.command_features import FEATURES, features_of
from tiered_kv.policies.forecast import Forecast
from tiered_kv.policies.saved import entries, entry, numbers
from tiered_kv.policies.signals import Rule, ToolUse
from tiered_kv.policies.ttl import best_wait

Array = NDArray[np.float64]

MAX_SAMPLES = 4096
"""The last gaps that trees are grown from."""
ENOUGH = 200
"""Gaps before the first trees."""
HELD_OUT = 0.2
"""Share of the samples, the latest, that tells the spread of ln X about the prediction."""
TREES, LEAVES = 24, 8
BENEFITS_S = (1.0, 5.0, 20.0)
"""B at which regret is compared."""
TRIALS = 30
"""Compared gaps before the trees may have a say."""
FORGETTING = 0.99
"""What a compared gap still counts after the next one."""
MAX_CACHED = 1024

_PARAMS = {
    "objective": "regression",
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
    """Grown trees, which predict ln X.

    Attributes:
        nodes: per tree, rows of (feature, threshold, low child, high child); a value at most the
            threshold goes to the low child. A child c < 0 is leaf -c - 1.
        leaves: per tree, the value of each leaf.
        sigma: spread of ln X about the sum of the leaves' values.
    """

    nodes: Sequence[Sequence[Sequence[float]]]
    leaves: Sequence[Sequence[float]]
    sigma: float
    _cache: OrderedDict[str, Rule] = field(default_factory=OrderedDict)

    def rule(self, tool: ToolUse) -> Rule:
        """What the trees say of a tool; remembered by its command, for it is asked again soon."""
        known = self._cache.get(tool.command)
        if known is not None:
            return known
        features = _features(tool)
        log_s = 0.0
        for nodes, leaves in zip(self.nodes, self.leaves, strict=True):
            at = 0 if nodes else -1
            while at >= 0:
                feature, threshold, low, high = nodes[at]
                at = int(low if features[int(feature)] <= threshold else high)
            log_s += leaves[-at - 1]
        rule = Rule(math.exp(min(max(log_s, -10.0), 12.0)), self.sigma)
        self._cache[tool.command] = rule
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        return rule


class LearnedRules:
    """Trees, the samples they grow from, and whether they have earned a say.

    All on one thread but ``refit``, which may run on another: it reads the samples while they
    change, at worst takes half of one for another, and puts the new trees in place at once.
    """

    def __init__(self) -> None:
        self._samples: Array = np.zeros((MAX_SAMPLES, FEATURES + 1))
        self._seen = 0
        self._trees: Trees | None = None
        self._trials = 0
        self._gain_s = 0.0

    @property
    def trusted(self) -> bool:
        """Whether decisions were better with the trees than without, of late."""
        return self._trials >= TRIALS and self._gain_s > 0

    def rule(self, tool: ToolUse) -> Rule | None:
        """What the trees say, trusted or not; None without trees, or without a command."""
        trees = self._trees
        return trees.rule(tool) if trees and tool.command else None

    def observe(self, tool: ToolUse, gap_s: float) -> None:
        """A gap to grow trees from; those of tools without a command are not."""
        if not tool.command:
            return
        row = self._samples[self._seen % MAX_SAMPLES]
        row[:-1] = _features(tool)
        row[-1] = math.log(max(gap_s, 0.03))
        self._seen += 1

    def judge(self, gap_s: float, without: Forecast, learned: Forecast) -> None:
        """A gap of a command of which little was seen, and the forecasts of both kinds."""
        gain_s = sum(
            _utility(learned, gap_s, benefit_s) - _utility(without, gap_s, benefit_s)
            for benefit_s in BENEFITS_S
        )
        self._trials += 1
        self._gain_s = FORGETTING * self._gain_s + gain_s

    def refit(self) -> bool:
        """Grow trees from the last gaps. Takes some tenths of a second. False, and nothing
        happens, without LightGBM or with too few gaps."""
        count = min(self._seen, MAX_SAMPLES)
        if count < ENOUGH:
            return False
        try:
            lightgbm: Any = importlib.import_module("lightgbm")
        except (ImportError, OSError):  # LightGBM itself, or the OpenMP it needs
            return False
        order = np.arange(self._seen - count, self._seen) % MAX_SAMPLES
        samples = self._samples[order]
        kept = count - int(count * HELD_OUT)
        rows, logs = samples[:, :-1], samples[:, -1]
        data = lightgbm.Dataset(rows[:kept], logs[:kept])
        grown = lightgbm.train(_PARAMS, data, TREES)
        missed = grown.predict(rows[kept:]) - logs[kept:]
        sigma = max(float(np.sqrt(np.mean(missed**2))), 0.1)
        flat = [_flat(tree["tree_structure"]) for tree in grown.dump_model()["tree_info"]]
        self._trees = Trees([nodes for nodes, _ in flat], [leaves for _, leaves in flat], sigma)
        return True

    def dump(self) -> dict[str, object] | None:
        """As JSON: the trees, and how they did; None without trees."""
        if self._trees is None:
            return None
        trees = self._trees
        return {
            "trees": [
                {"nodes": [list(node) for node in nodes], "leaves": list(leaves)}
                for nodes, leaves in zip(trees.nodes, trees.leaves, strict=True)
            ],
            "judged": [trees.sigma, self._trials, self._gain_s],
        }

    @classmethod
    def loaded(cls, saved: object) -> LearnedRules:
        """What ``dump`` gave.

        Raises:
            ValueError: it is not that.
        """
        made = cls()
        if saved is None:
            return made
        trees = [_checked(tree) for tree in entries(entry(saved, "trees"))]
        sigma, trials, gain_s = numbers(entry(saved, "judged"), 3).tolist()
        if sigma <= 0 or trials < 0:
            raise ValueError("not trees that were judged")
        made._trees = Trees([nodes for nodes, _ in trees], [leaves for _, leaves in trees], sigma)
        made._trials, made._gain_s = int(trials), gain_s
        return made


def _features(tool: ToolUse) -> Sequence[float]:
    return features_of(tool.path[0] if tool.path else "", tool.command)


def _utility(forecast: Forecast, gap_s: float, benefit_s: float) -> float:
    wait_s = best_wait(forecast, benefit_s, 1.0)
    return (benefit_s if wait_s > 0 and gap_s <= wait_s else 0.0) - min(gap_s, wait_s)


def _flat(tree: Mapping[str, Any]) -> tuple[list[list[float]], list[float]]:
    """LightGBM's nested tree as ``Trees`` has it."""
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
