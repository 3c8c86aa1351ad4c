"""Trees on the command, for commands of which little was seen.

They give the same as a rule: a median and a spread of ln X, which stands in for what the
hierarchy would believe of a command without a past. Whether they may is measured: for each gap of
such a command, the regret of the decisions with and without them.
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
"""Share of the samples, the latest, that tells the spread of ln X about the prediction."""
BENEFITS_S = (1.0, 5.0, 20.0)
"""B at which regret is compared."""
TRIALS = 30
"""Compared gaps before the trees may have a say."""
FORGETTING = 0.99
"""What a compared gap still counts after the next one."""


@dataclass(frozen=True, slots=True)
class _Grown:
    """Trees that score ln X, and the spread of ln X about their score."""

    trees: Trees
    sigma: float


class LearnedRules:
    """Trees, the samples they grow from, and whether they have earned a say.

    All on one thread but ``refit``, which may run on another and puts the new trees in place at
    once.
    """

    def __init__(self) -> None:
        self._samples = Samples()
        self._grown: _Grown | None = None
        self._trials = 0
        self._gain_s = 0.0

    @property
    def trusted(self) -> bool:
        """Whether decisions were better with the trees than without, of late."""
        return self._trials >= TRIALS and self._gain_s > 0

    def rule(self, tool: ToolUse) -> Rule | None:
        """What the trees say, trusted or not; None without trees, or without a command."""
        made = self._grown
        if made is None or not tool.command:
            return None
        return Rule(math.exp(min(max(made.trees.score(tool), -10.0), 12.0)), made.sigma)

    def observe(self, tool: ToolUse, gap_s: float) -> None:
        """A gap to grow trees from; those of tools without a command are not."""
        self._samples.add(tool, math.log(max(gap_s, 0.03)))

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
        """As JSON: the trees, and how they did; None without trees."""
        made = self._grown
        if made is None:
            return None
        return {"trees": made.trees.dump(), "judged": [made.sigma, self._trials, self._gain_s]}

    @classmethod
    def loaded(cls, saved: object) -> LearnedRules:
        """What ``dump`` gave.

        Raises:
            ValueError: it is not that.
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
