"""Forecast of the gap after a turn: by its tool, then corrected for its job and for the moment.

The constants of this module, ``job_history`` and ``rank_trees`` were
chosen by cross-validation over recorded coding-agent sessions: see docs/benchmarks.md. The results
hardly change with any of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tiered_kv.policies.base import TurnEnd
from tiered_kv.policies.distribution import CELLS, Forecast, cell_of

from .history_correction import HistoryCorrection, features_of
from .job_history import JobHistory
from .rank_trees import RankTrees
from .ranks import at_knots, ranks_of
from .saved_state import check_version, entry
from .tool_hierarchy import ToolHierarchy

Array = NDArray[np.float64]

VERSION = 2
"""Version of the saved state. The grid, the rank knots and the features are part of it."""


class GapModel:
    """Forecast that learns from every gap. Not thread-safe, except for ``refit``."""

    def __init__(self) -> None:
        self._tools = ToolHierarchy()
        self._jobs = JobHistory()
        self._correction = HistoryCorrection()
        self._trees = RankTrees()

    def forecast(self, turn: TurnEnd) -> Forecast:
        """Forecast the gap after a turn. Does not mutate."""
        past = self._jobs.past(turn)
        masses = self._correction.corrected(self._tools.forecast(turn.tool), features_of(past))
        return Forecast.of_masses(self._trees.corrected(masses, past.moments.features(turn)))

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        """Learn from a gap, as in ``TurnPolicy.observe``. Impossible gaps are ignored."""
        if not 0 <= gap_s < math.inf:
            return
        past = self._jobs.past(turn)
        masses, features = self._tools.forecast(turn.tool), features_of(past)
        corrected = self._correction.corrected(masses, features)
        moment = past.moments.features(turn)
        if ended:
            cells = np.zeros(CELLS)
            cells[cell_of(gap_s)] = 1.0
        else:
            forecast = Forecast.of_masses(self._trees.corrected(corrected, moment))
            cells = forecast.after(gap_s).masses
        self._correction.observe(masses, features, cells - corrected)
        self._trees.observe(corrected, moment, cells)
        self._jobs.observe(turn, gap_s, at_knots(ranks_of(masses), cells))
        self._tools.observe(turn.tool, cells)

    def refit(self) -> bool:
        """Regrow the trees; returns False if they did not change. May run on another thread,
        while other calls run."""
        return self._trees.refit()

    def dump(self) -> dict[str, object]:
        """Return the learned state as JSON, without the history of single jobs."""
        return {
            "version": VERSION,
            "tools": self._tools.dump(),
            "tilt": self._correction.dump(),
            "trees": self._trees.dump(),
        }

    def load(self, learned: Mapping[str, object]) -> None:
        """Restore a state that ``dump`` returned. Entries of earlier versions are ignored.

        Raises:
            ValueError: the state is malformed; the model is unchanged.
        """
        check_version(learned, VERSION)
        tools = ToolHierarchy.loaded(entry(learned, "tools"))
        correction = HistoryCorrection.loaded(entry(learned, "tilt"))
        trees = RankTrees.loaded(entry(learned, "trees"))
        self._tools, self._correction, self._trees = tools, correction, trees
