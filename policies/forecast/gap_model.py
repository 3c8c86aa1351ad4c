"""How long the gap after a turn will be: by its tool, then by its job and its tokens.

The constants of ``history`` and ``tilt`` were chosen by cross-validation over recorded coding-agent
sessions, half of which were set aside. The figures hardly change with any of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tiered_kv.policies.base import ToolUse, TurnEnd
from tiered_kv.policies.distribution import CELLS, Forecast, cell_of

from .job_history import JobHistory
from .learned_rules import LearnedRules
from .ranks import at_knots, ranks_of
from .saved_state import check_version, entry
from .token_correction import Tilt, features_of
from .tool_hierarchy import ToolHierarchy

Array = NDArray[np.float64]

VERSION = 1
"""Of what is saved; the grid, the ranks' knots and the features are part of it."""


class LatencyModel:
    """Learns from every gap. One thread at a time."""

    def __init__(self) -> None:
        self._tools = ToolHierarchy()
        self._jobs = JobHistory()
        self._tilt = Tilt()
        self._learned = LearnedRules()

    def forecast(self, turn: TurnEnd) -> Forecast:
        """Changes nothing."""
        past = self._jobs.past(turn.job, turn.output_tokens)
        masses = self._by_tool(turn.tool)
        return Forecast.of_masses(self._tilt.tilted(masses, features_of(turn, past)))

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        """See ``TurnPolicy.observe``. A gap that cannot be one is ignored."""
        if not 0 <= gap_s < math.inf:
            return
        masses = self._by_tool(turn.tool)
        features = features_of(turn, self._jobs.past(turn.job, turn.output_tokens))
        if ended:
            cells = np.zeros(CELLS)
            cells[cell_of(gap_s)] = 1.0
            self._let_trees_learn(turn.tool, gap_s)
        else:
            tilted = Forecast.of_masses(self._tilt.tilted(masses, features))
            cells = tilted.after(gap_s).masses
        self._tilt.observe(masses, features, cells)
        self._jobs.observe(turn.job, turn.output_tokens, at_knots(ranks_of(masses), cells))
        self._tools.observe(turn.tool, cells)

    def _by_tool(self, tool: ToolUse | None) -> Array:
        if tool is not None and self._learned.trusted and self._tools.is_thin(tool):
            return self._tools.forecast(tool, self._learned.rule(tool))
        return self._tools.forecast(tool)

    def _let_trees_learn(self, tool: ToolUse | None, gap_s: float) -> None:
        if tool is None:
            return
        rule = self._learned.rule(tool)
        if rule is not None and self._tools.is_thin(tool):
            without, learned = self._tools.forecast(tool), self._tools.forecast(tool, rule)
            self._learned.judge(gap_s, Forecast.of_masses(without), Forecast.of_masses(learned))
        self._learned.observe(tool, gap_s)

    def refit(self) -> bool:
        """Grow the trees anew, if the extra ``learned`` is installed: see ``LearnedRules``. May
        run on another thread while all else goes on."""
        return self._learned.refit()

    def dump(self) -> dict[str, object]:
        """What was learned, as JSON; not the pasts of single jobs."""
        return {
            "version": VERSION,
            "tools": self._tools.dump(),
            "tilt": self._tilt.dump(),
            "learned": self._learned.dump(),
        }

    def load(self, learned: Mapping[str, object]) -> None:
        """Go on from what ``dump`` gave.

        Raises:
            ValueError: it is not that; nothing has changed.
        """
        check_version(learned, VERSION)
        tools = ToolHierarchy.loaded(entry(learned, "tools"))
        tilt = Tilt.loaded(entry(learned, "tilt"))
        trees = LearnedRules.loaded(entry(learned, "learned"))
        self._tools, self._tilt, self._learned = tools, tilt, trees
