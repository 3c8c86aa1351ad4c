"""Gradient boosting of oblivious trees, whose leaves are functions of a rank.

A tree asks the same few questions of every row, one per level, so its leaf is the number that the
answers spell (A. Gulin et al., "Winning the transfer learning track of Yahoo's Learning To Rank
Challenge with YetiRank", 2011). All trees together tilt an even distribution over the knots: s(q)
adds up over trees, and the loss is cross entropy. A leaf's step is Newton's with the curvature of
the even distribution, p (1 - p), which the sums hardly leave.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import float32, float64, intp, uint8, void  # type: ignore[import-untyped]
from numpy.typing import NDArray

from .compiled import array, compiled

Array = NDArray[np.float64]
Numbers = NDArray[np.intp]
Bins = NDArray[np.uint8]

DEPTH = 4
"""Questions of a tree."""
BINS = 32
"""Intervals of a feature."""
RATE = 0.1
"""Share of a leaf's step that is taken."""
PRIOR_WEIGHT = 1.0
"""Weight of an even leaf that every leaf starts with, in rows."""


class Grown(NamedTuple):
    """Grown trees.

    Attributes:
        features, splits: of every question, and the bin up to which the answer is no. Shape
            (trees, levels).
        leaves: shape (trees, leaves, knots).
    """

    features: Numbers
    splits: Numbers
    leaves: Array


def grown(bins: Bins, targets: Array, even: Array, trees: int) -> Grown:
    """Grow trees. Releases the interpreter while it works.

    Args:
        bins: number of the interval in which each feature lies. Shape (features, rows).
        targets: share of each knot in the row's rank. Shape (rows, knots), each row's sum 1.
        even: share of each knot if ranks are even. Shape (knots,).
        trees: how many.
    """
    knots = len(even)
    features = np.zeros((trees, DEPTH), np.intp)
    splits = np.zeros((trees, DEPTH), np.intp)
    leaves = np.zeros((trees, 1 << DEPTH, knots))
    heights = np.zeros(targets.shape)
    slopes = np.ones((len(targets), knots + 1), np.float32)  # and the row itself, for its count
    leaf = np.zeros(len(targets), np.intp)
    gains = np.zeros((len(bins), BINS))
    curvature = even * (1 - even)
    for tree in range(trees):
        chance = even * np.exp(heights)
        slopes[:, :knots] = targets - chance / chance.sum(axis=1, keepdims=True)
        leaf[:] = 0
        for level in range(DEPTH):
            _find_gains(bins, slopes, leaf, 1 << level, curvature, gains)
            feature, split = np.unravel_index(gains[:, :-1].argmax(), (len(bins), BINS - 1))
            features[tree, level], splits[tree, level] = feature, split
            leaf *= 2
            leaf += bins[feature] > split
        rows = np.bincount(leaf, minlength=1 << DEPTH)
        for q in range(knots):
            total = np.bincount(leaf, slopes[:, q], 1 << DEPTH)
            leaves[tree, :, q] = RATE * total / ((rows + PRIOR_WEIGHT) * curvature[q])
        heights += leaves[tree][leaf]
    return Grown(features, splits, leaves)


def losses(grown_trees: Grown, bins: Bins, targets: Array, even: Array) -> Array:
    """Mean cross entropy of rows under the first trees: none, one, two, and so on. Arguments as in
    ``grown``. Shape (trees + 1,)."""
    heights = np.zeros(targets.shape)
    found = []
    for features, splits, leaves in [(None, None, None), *zip(*grown_trees, strict=True)]:
        if leaves is not None:
            leaf = np.zeros(len(targets), np.intp)
            for feature, split in zip(features, splits, strict=True):
                leaf = 2 * leaf + (bins[feature] > split)
            heights += leaves[leaf]
        logs = heights - np.log(np.exp(heights) @ even)[:, None]
        found.append(-float((targets * logs).sum(axis=1).mean()))
    return np.array(found)


@compiled(
    void,
    array(uint8, 2),
    array(float32, 2),
    array(intp, 1),
    intp,
    array(float64, 1),
    array(float64, 2, written=True),
)
def _find_gains(
    bins: Bins,
    slopes: NDArray[np.float32],
    leaf: Numbers,
    leaves: int,
    curvature: Array,
    gains: Array,
) -> None:
    """Find how much the loss would fall if each leaf were split at a feature's bin, for each."""
    rows, width = slopes.shape
    knots = width - 1
    below = np.zeros((leaves, BINS, width))
    for feature in range(len(bins)):
        below[:] = 0.0
        for i in range(rows):
            cell = below[leaf[i], bins[feature, i]]
            for q in range(width):
                cell[q] += slopes[i, q]
        for split in range(1, BINS):
            for n in range(leaves):
                for q in range(width):
                    below[n, split, q] += below[n, split - 1, q]
        for split in range(BINS - 1):
            gain = 0.0
            for n in range(leaves):
                low, all_ = below[n, split], below[n, BINS - 1]
                low_rows = low[knots] + PRIOR_WEIGHT
                high_rows = all_[knots] - low[knots] + PRIOR_WEIGHT
                for q in range(knots):
                    high = all_[q] - low[q]
                    squares = low[q] * low[q] / low_rows + high * high / high_rows
                    gain += squares / curvature[q]
            gains[feature, split] = gain


@compiled(
    array(float64, 1, written=True),
    array(float64, 1),
    array(intp, 2),
    array(float64, 2),
    array(float64, 3),
)
def heights(row: Array, features: Numbers, borders: Array, leaves: Array) -> Array:
    """Heights at the knots for a row of features, which answers yes above a border. Shapes
    (features,), (trees, levels), (trees, levels), (trees, leaves, knots)."""
    found = np.zeros(leaves.shape[2])
    for tree in range(len(features)):
        leaf = 0
        for level in range(features.shape[1]):
            leaf = 2 * leaf + (row[features[tree, level]] > borders[tree, level])
        for knot in range(len(found)):
            found[knot] += leaves[tree, leaf, knot]
    return found
