"""Forecast of the gap after a turn: from its tool, then corrected by the job's own earlier gaps.

The correction multiplies the probability of each cell by exp(s(rank)), then normalises (exponential
tilting). s is piecewise linear in the rank of the cell, and linear in the job's history. Because s
depends on ranks and not on seconds, a correction learned with one tool applies to others. It is
learned online: AdaGrad (Duchi, Hazan & Singer, 2011) on the log loss of every gap, which is convex.

The constants of this module and of ``job_history`` were chosen by cross-validation on recorded
coding-agent sessions. The results are insensitive to each of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tiered_kv.json_fields import Fields, exactly
from tiered_kv.policies.base import ToolUse, TurnEnd
from tiered_kv.policies.distribution import CELLS, Forecast, cell_of

from .job_history import NO_PAST, JobHistory, Past
from .ranks import KNOTS, at_knots, ranks_of, tilted
from .saved_state import numbers
from .tool_hierarchy import ToolHierarchy

Array = NDArray[np.float64]

VERSION = 2
"""Version of the saved state. Increased when its format, the grid or the rank knots change."""
TRUST = 0.5
"""Initial exponent of each of the two views of the job's history. With 0.5 for both, the correction
is their geometric mean."""
RATE = 0.05
"""Step size of AdaGrad."""
CAUTION = 1.0
"""Initial sum of squared gradients, which keeps AdaGrad's first steps small."""
MOST_KEPT = 64
"""Maximum number of forecasts kept until the next gap is observed. When many jobs arrive together,
their first turns also end together, most of them with the same forecast."""


class GapModel:
    """Gap forecast that learns from every gap. Not thread-safe."""

    def __init__(self) -> None:
        self._tools = ToolHierarchy()
        self._jobs = JobHistory()
        self._correction = HistoryCorrection()
        self._of_first: dict[ToolUse | None, Forecast] = {}  # by tool, for jobs without a history

    def forecast(self, turn: TurnEnd) -> Forecast:
        """Forecast the gap after a turn. The learned state does not change."""
        past = self._jobs.past(turn)
        if past is not NO_PAST:
            return self._forecast(turn.tool, past)
        found = self._of_first.get(turn.tool)
        if found is None:
            if len(self._of_first) == MOST_KEPT:
                self._of_first.clear()
            found = self._of_first[turn.tool] = self._forecast(turn.tool, past)
        return found

    def _forecast(self, tool: ToolUse | None, past: Past) -> Forecast:
        masses = self._tools.forecast(tool)
        return Forecast.of_masses(self._correction.corrected(masses, features_of(past)))

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        """Update the model with a gap (see ``TurnPolicy.observe``). Ignores gaps that are negative
        or infinite."""
        if not 0 <= gap_s < math.inf:
            return
        masses, features = self._tools.forecast(turn.tool), features_of(self._jobs.past(turn))
        corrected = self._correction.corrected(masses, features)
        if ended:
            cells = np.zeros(CELLS)
            cells[cell_of(gap_s)] = 1.0
        else:
            cells = Forecast.of_masses(corrected).after(gap_s).masses
        self._correction.observe(masses, features, cells - corrected)
        self._jobs.observe(turn, at_knots(ranks_of(masses), cells))
        self._tools.observe(turn.tool, cells)
        self._of_first.clear()

    def dump(self) -> dict[str, object]:
        """Return the learned state as JSON, without the histories of jobs."""
        return {
            "version": VERSION,
            "tools": self._tools.dump(),
            "tilt": self._correction.dump(),
        }

    def load(self, learned: Mapping[str, object]) -> None:
        """Restore a state that ``dump`` returned. Unknown entries are ignored.

        Raises:
            ValueError: the state is malformed; the model is unchanged.
        """
        fields = Fields(learned)
        fields.take("version", exactly, VERSION)
        tools = fields.take("tools", ToolHierarchy.loaded)
        correction = fields.take("tilt", HistoryCorrection.loaded)
        self._tools, self._correction = tools, correction
        self._of_first.clear()


def features_of(past: Past) -> Array:
    """Return the features of a job's history: a constant 1, then both views. Shape (features,)."""
    return np.concatenate([_ONE, past.recent, past.similar])


_ONE = np.ones(1)


class HistoryCorrection:
    """Correction of a forecast by the job's history, learned online. Not thread-safe."""

    def __init__(self) -> None:
        eye = TRUST * np.eye(len(KNOTS))
        self.weights: Array = np.vstack([np.zeros((1, len(KNOTS))), eye, eye])
        self.squares: Array = np.full_like(self.weights, CAUTION)

    def corrected(self, masses: Array, features: Array) -> Array:
        """Return the corrected probability of each cell, shape (cells,). Learns nothing."""
        return tilted(masses, features @ self.weights)

    def observe(self, masses: Array, features: Array, missed: Array) -> None:
        """Learn from a gap after a turn with these features.

        Args:
            masses: probability of each cell, forecast from the tool alone.
            missed: observed probability of each cell, minus its corrected forecast.
        """
        gradient = np.outer(features, at_knots(ranks_of(masses), missed))
        self.squares += gradient * gradient
        self.weights += RATE * gradient / np.sqrt(self.squares)

    def dump(self) -> dict[str, object]:
        """Return the learned state as JSON."""
        return {"weights": self.weights.tolist(), "squares": self.squares.tolist()}

    @classmethod
    def loaded(cls, saved: object) -> HistoryCorrection:
        """Create a correction from what ``dump`` returned.

        Raises:
            ValueError: the state is malformed.
        """
        made, fields = cls(), Fields(saved)
        made.weights = fields.take("weights", numbers, *made.weights.shape)
        made.squares = fields.take("squares", numbers, *made.squares.shape, least=1e-6)
        return made
