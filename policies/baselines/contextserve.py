"""ContextServe, a published policy that classifies gaps by the command, then by earlier gaps.

If neither classifies a gap, Continuum's rule decides. The authors' decision trees are omitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from tiered_kv.policies.base import Costs, Decision, GapClass, Tier, ToolUse, TurnEnd
from tiered_kv.policies.distribution import GRID, Forecast
from tiered_kv.policies.forecast.normal_inverse_gamma import NormalInverseGamma
from tiered_kv.policies.tier_choice import unpriced, without_pin

from .continuum import ALL, ToolGaps, pinned, time_to_live

_FAST = (
    "cat ls cd pwd echo head tail grep find wc sort uniq cut tr sed awk diff file stat which "
    "env printenv date whoami id uname basename dirname mkdir touch cp mv rm"
)
FAST_WORDS = frozenset(_FAST.split())
"""First words of commands that are fast, whatever their arguments."""
FAST_RULE_S = 3.0
SLOW_PREFIXES = (
    "make",
    "cmake",
    "ninja",
    "pip install",
    "pip3 install",
    "npm install",
    "npm run build",
    "yarn install",
    "cargo build",
    "cargo test",
    "go build",
    "mvn",
    "gradle",
    "docker build",
    "docker pull",
    "apt install",
    "apt-get install",
    "git clone",
    "pytest",
    "sleep",
)

PRIOR = NormalInverseGamma(mu=0.0, lam=1.0, alpha=1.0, beta=1.0)
WINDOW = 200
FAST_S, SLOW_S = 1.0, 5.0
SURE = 0.85
TTL_QUANTILE = 0.9
_FROM = (10, 5, 2)  # number of gaps required: of the command, of the tool, of all tools
_LOG_GRID = np.log(GRID)
_LOG_BOUNDS = np.log([FAST_S, SLOW_S])


class ContextServe:
    """ContextServe as described by its authors. Its thresholds do not depend on restore costs.

    The first layer that has an answer decides:

    1. Rules. If the command's first word is known to be fast, the gap is FAST, with a pin of 3 s.
       If the command starts with a prefix known to be slow, the gap is SLOW, without a pin.
    2. The posterior distribution of the gap X, learned from earlier gaps: of the same command if
       at least 10 are recorded, else of the same tool if at least 5 are, else of all tools if at
       least 2 are. The gap is FAST if P(X < 1 s) > 0.85, with a pin until the 0.9 quantile of X. It
       is SLOW, without a pin, if P(X > 5 s) > 0.85.
    3. Continuum's rule. The gap is UNCERTAIN.

    Two parts of the description are omitted: decision trees on the command, which the authors
    evaluate before Continuum's rule (neither the trees nor their training set are published), and
    Thompson sampling, which is optional.
    """

    reads_tools: ClassVar[bool] = True

    def __init__(self) -> None:
        self.gaps = ToolGaps()

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        decided = unpriced(turn)
        if decided is not None:
            return decided
        by_rule = _rule(turn.tool)
        if by_rule is not None:
            return _classed(by_rule, costs)
        belief = self._posterior(turn.tool)
        if belief is not None:
            below_fast, below_slow = belief.cdf(_LOG_BOUNDS).tolist()
            forecast = Forecast(belief.cdf(_LOG_GRID))
            if below_fast > SURE:
                ttl_s = min(forecast.quantile(TTL_QUANTILE), float(GRID[-1]))
                return Decision(Tier.PIN, ttl_s, GapClass.FAST, forecast)
            if 1 - below_slow > SURE:
                return Decision(without_pin(costs, 0.0), 0.0, GapClass.SLOW, forecast)
        ttl_s = time_to_live(self.gaps, turn.tool.path[:1] if turn.tool else ALL, costs)
        made = pinned(ttl_s, costs)
        return Decision(made.tier, made.ttl_s, GapClass.UNCERTAIN)

    def _posterior(self, tool: ToolUse | None) -> NormalInverseGamma | None:
        path = tool.path if tool else ALL
        for context, enough in zip((path, path[:1], ALL), _FROM, strict=True):
            if self.gaps.count(context) >= enough:
                last = self.gaps.latest(context, WINDOW)
                logs = np.log(np.maximum(last, 1e-3))
                mean = float(logs.mean())
                return PRIOR.updated(len(logs), mean, float(((logs - mean) ** 2).sum()))
        return None

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        if ended:
            path = turn.tool.path if turn.tool else ALL
            self.gaps.observe({ALL, path[:1], path}, gap_s)

    def dump(self) -> dict[str, object]:
        return self.gaps.dump()

    def load(self, learned: Mapping[str, object]) -> None:
        self.gaps.load(learned)


def _classed(gap_class: GapClass, costs: Costs) -> Decision:
    if gap_class is GapClass.FAST:
        return Decision(Tier.PIN, FAST_RULE_S, gap_class)
    return Decision(without_pin(costs, 0.0), 0.0, gap_class)


def _rule(tool: ToolUse | None) -> GapClass | None:
    command = tool.command.strip() if tool else ""
    if not command:
        return None
    if command.startswith(SLOW_PREFIXES):
        return GapClass.SLOW
    return GapClass.FAST if command.split(None, 1)[0] in FAST_WORDS else None
