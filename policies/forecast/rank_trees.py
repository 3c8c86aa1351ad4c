"""Trees that know what a job's moments say about the next gap, learned across all jobs.

The other parts forecast, and these say where in that forecast gaps really fall: each gap's rank is
kept with the features of its moment, and trees learn how ranks depend on them (see ``boosting``).
What they learn tilts the next forecast. They are grown beside the scheduler's work, and used only
while the gaps that came since were likelier with them than without.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .boosting import BINS, DEPTH, grown, heights, losses
from .job_moments import FEATURES
from .ranks import EVEN, KNOTS, at_knots, ranks_of, tilted
from .saved_state import entry, numbers

Array = NDArray[np.float64]

MAX_SAMPLES = 32_768
"""Gaps kept as samples, the latest ones: 7 MiB."""
ENOUGH = 2_000
"""Gaps before the first trees are grown: fewer do not help."""
FRESH = 0.1
"""Share of the samples that must be new before trees are grown again."""
HELD_OUT = 0.2
"""Share of the samples, the latest, that say how many trees help."""
MAX_TREES = 200
"""Trees that are tried; a decision walks through all that were found to help."""


@dataclass(frozen=True, slots=True)
class Trees:
    """Grown trees. A row whose ``features`` exceed the ``splits`` answers yes.

    Attributes:
        features, splits: of every question. Shape (trees, levels).
        leaves: heights at the knots. Shape (trees, leaves, knots).
        samples: number of gaps that they were grown from.
    """

    features: NDArray[np.intp]
    splits: Array
    leaves: Array
    samples: int

    def __post_init__(self) -> None:
        if not self.features.size or self.features.min() < 0 or self.features.max() >= FEATURES:
            raise ValueError("not trees over these features")

    def heights(self, row: list[float]) -> Array:
        """The sum of the leaves that a row of features falls into. Shape (knots,)."""
        return heights(np.array(row), self.features, self.splits, self.leaves)


class RankTrees:
    """The trees, the samples they grow from, and the record of their use.

    All methods run on one thread but ``refit``, which may run on another and installs the new trees
    in one assignment. A gap that is observed meanwhile may, at worst, mix two samples.
    """

    def __init__(self) -> None:
        self._rows: Array = np.zeros((MAX_SAMPLES, FEATURES))
        self._ranks: Array = np.zeros((MAX_SAMPLES, len(KNOTS)))
        self._seen = self._tried_at = 0
        self._trees: Trees | None = None
        self._judged: Trees | None = None
        self._gain = 0.0

    def corrected(self, masses: Array, row: list[float]) -> Array:
        """Return the corrected probability of each cell. Does not mutate. Shape (cells,)."""
        trees = self._trees
        if trees is None or (trees is self._judged and self._gain < 0):
            return masses
        return tilted(masses, trees.heights(row))

    def observe(self, masses: Array, row: list[float], cells: Array) -> None:
        """Learn from a gap that lies in each cell with probability ``cells``, where ``masses``
        were forecast without the trees."""
        trees = self._trees
        if trees is not None:
            if trees is not self._judged:
                self._judged, self._gain = trees, 0.0
            with_trees = tilted(masses, trees.heights(row))
            self._gain += _log_likelihood(cells, with_trees) - _log_likelihood(cells, masses)
        at = self._seen % MAX_SAMPLES
        self._rows[at] = row
        self._ranks[at] = at_knots(ranks_of(masses), cells)
        self._seen += 1

    def refit(self) -> bool:
        """Grow trees from the last gaps, in some seconds. Returns False, and changes nothing, with
        too few gaps (less than half of those that the present trees know, too), with few new ones,
        or if trees do not help."""
        seen = self._seen
        count = min(seen, MAX_SAMPLES)
        known = self._trees.samples if self._trees else 0
        if count < max(ENOUGH, known / 2) or seen - self._tried_at < FRESH * count:
            return False
        self._tried_at = seen
        order = np.arange(seen - count, seen) % MAX_SAMPLES
        trees = _grown(self._rows[order], self._ranks[order])
        if trees is None:
            return False
        self._trees = trees
        return True

    def dump(self) -> dict[str, object] | None:
        """Return the trees as JSON; None without any."""
        trees = self._trees
        if trees is None:
            return None
        return {
            "features": trees.features.tolist(),
            "splits": trees.splits.tolist(),
            "leaves": np.round(trees.leaves, 4).tolist(),
            "samples": trees.samples,
        }

    @classmethod
    def loaded(cls, saved: object) -> RankTrees:
        """Build from what ``dump`` returned.

        Raises:
            ValueError: the state is malformed.
        """
        made = cls()
        if saved is None:
            return made
        splits = numbers(entry(saved, "splits"), -1, DEPTH)
        if len(splits) > MAX_TREES:
            raise ValueError("more trees than a decision has time for")
        features = numbers(entry(saved, "features"), *splits.shape).astype(np.intp)
        leaves = numbers(entry(saved, "leaves"), len(splits), 1 << DEPTH, len(KNOTS))
        samples = numbers(entry(saved, "samples"), least=0)
        made._trees = Trees(features, splits, leaves, int(samples))
        return made


def _log_likelihood(cells: Array, masses: Array) -> float:
    return math.log(max(float(cells @ masses), 1e-12))


def _grown(rows: Array, ranks: Array) -> Trees | None:
    """Grow as many trees as help with the latest samples; None if that is none."""
    shares = np.linspace(0, 1, BINS + 1)[1:-1]
    cuts = np.quantile(rows, shares, axis=0).T
    bins = np.array(
        [np.searchsorted(cut, row) for cut, row in zip(cuts, rows.T, strict=True)], np.uint8
    )
    kept = len(rows) - int(len(rows) * HELD_OUT)
    tried = grown(np.ascontiguousarray(bins[:, :kept]), ranks[:kept], EVEN, MAX_TREES)
    count = int(losses(tried, bins[:, kept:], ranks[kept:], EVEN).argmin())
    if not count:
        return None
    features, splits, leaves = grown(bins, ranks, EVEN, count)
    return Trees(features, cuts[features, splits], leaves, len(rows))
