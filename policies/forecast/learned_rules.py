"""Duration rules predicted by trees, for commands with little history.

A prediction is a rule: a median and a spread of ln X. It replaces the prior of a command that the
hierarchy has not seen. The trees are used only while they help: for each gap of such a command, the
regret of decisions with and without them is compared.

The gain is measured on few gaps only, and with fewer commands than ``trees.ENOUGH``: see
docs/benchmarks.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tiered_kv.policies.base import Rule, ToolUse
from tiered_kv.policies.distribution import Forecast
from tiered_kv.policies.pricing.pin_value import best_wait

from .saved_state import entry, numbers
from .trees import Samples, Trees, grown

HELD_OUT = 0.2
"""Share of the samples, the latest, that the spread of ln X is measured on."""
BENEFITS_S = (1.0, 5.0, 20.0)
"""Values of B at which regret is compared, seconds."""
TRIALS = 30
"""Compared gaps before the trees are used."""
GAIN_DECAY = 0.99
"""Decay of a compared gap's weight with each later one."""


@dataclass(frozen=True, slots=True)
class _Grown:
    """Trees that predict ln X, and the spread of ln X about their prediction."""

    trees: Trees
    sigma: float


class LearnedRules:
    """The trees, the samples they grow from, and the record of their use.

    All methods run on one thread but ``refit``, which may run on another and installs the new trees
    in one assignment.
    """

    def __init__(self) -> None:
        self._samples = Samples()
        self._grown: _Grown | None = None
        self._trials = 0
        self._gain_s = 0.0

    @property
    def trusted(self) -> bool:
        """True if recent decisions were better with the trees than without."""
        return self._trials >= TRIALS and self._gain_s > 0

    def rule(self, tool: ToolUse) -> Rule | None:
        """Return the trees' rule, trusted or not; None without trees or without a command."""
        made = self._grown
        if made is None or not tool.command:
            return None
        return Rule(math.exp(min(max(made.trees.score(tool), -10.0), 12.0)), made.sigma)

    def observe(self, tool: ToolUse, gap_s: float) -> None:
        """Add a gap to the samples. Tools without a command are skipped."""
        self._samples.add(tool, math.log(max(gap_s, 0.03)))

    def judge(self, gap_s: float, without: Forecast, learned: Forecast) -> None:
        """Compare both forecasts of a gap after a command with little history."""
        gain_s = sum(
            _utility(learned, gap_s, benefit_s) - _utility(without, gap_s, benefit_s)
            for benefit_s in BENEFITS_S
        )
        self._trials += 1
        self._gain_s = GAIN_DECAY * self._gain_s + gain_s

    def refit(self) -> bool:
        """Grow trees from the last gaps, in some tenths of a second. Returns False, and changes
        nothing, without LightGBM or with too few gaps."""
        latest = self._samples.latest()
        if latest is None:
            return False
        rows, logs = latest
        kept = len(logs) - int(len(logs) * HELD_OUT)
        trees = grown(rows[:kept], logs[:kept], "regression")
        if trees is None:
            return False
        missed = np.array([trees.score_of(row) for row in rows[kept:].tolist()]) - logs[kept:]
        self._grown = _Grown(trees, max(float(np.sqrt(np.mean(missed**2))), 0.1))
        return True

    def dump(self) -> dict[str, object] | None:
        """Return the trees and their record as JSON; None without trees."""
        made = self._grown
        if made is None:
            return None
        return {"trees": made.trees.dump(), "judged": [made.sigma, self._trials, self._gain_s]}

    @classmethod
    def loaded(cls, saved: object) -> LearnedRules:
        """Build from what ``dump`` returned.

        Raises:
            ValueError: the state is malformed.
        """
        made = cls()
        if saved is None:
            return made
        trees = Trees.loaded(entry(saved, "trees"))
        sigma, trials, gain_s = numbers(entry(saved, "judged"), 3).tolist()
        if sigma <= 0 or trials < 0:
            raise ValueError("not trees that were judged")
        made._grown = _Grown(trees, sigma)
        made._trials, made._gain_s = int(trials), gain_s
        return made


def _utility(forecast: Forecast, gap_s: float, benefit_s: float) -> float:
    wait_s = best_wait(forecast, benefit_s, 1.0)
    return (benefit_s if wait_s > 0 and gap_s <= wait_s else 0.0) - min(gap_s, wait_s)
