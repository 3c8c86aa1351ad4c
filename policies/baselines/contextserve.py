"""ContextServe: rules on the command, then Normal-Inverse-Gamma posteriors, then Continuum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from tiered_kv.policies.baselines.continuum import ALL, ToolGaps, pinned, time_to_live
from tiered_kv.policies.forecast import GRID, Forecast
from tiered_kv.policies.nig import Nig
from tiered_kv.policies.signals import Costs, Decision, GapClass, Tier, ToolUse, TurnEnd
from tiered_kv.policies.tier_choice import unpriced, without_pin

_FAST = (
    "cat ls cd pwd echo head tail grep find wc sort uniq cut tr sed awk diff file stat which "
    "env printenv date whoami id uname basename dirname mkdir touch cp mv rm"
)
FAST_WORDS = frozenset(_FAST.split())
"""Commands that begin with one of these are fast, whatever follows."""
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

PRIOR = Nig(mu=0.0, lam=1.0, alpha=1.0, beta=1.0)
WINDOW = 200
FAST_S, SLOW_S = 1.0, 5.0
SURE = 0.85
TTL_QUANTILE = 0.9
_FROM = (10, 5, 2)  # observations of the command, of the tool, of all
_LOG_GRID = np.log(GRID)
_LOG_BOUNDS = np.log([FAST_S, SLOW_S])


class ContextServe:
    """As described, with thresholds that know nothing of what a restore costs.

    Layers: the first word is known to be fast: pinned for 3 s; the command begins like a known
    slow one: freed at once. Else the posterior of the narrowest context with enough gaps (10 of
    the command, 5 of the tool, 2 of all) says FAST if P(X < 1 s) > 0.85 and SLOW if
    P(X > 5 s) > 0.85; FAST is pinned for the 0.9 quantile. All else waits as Continuum has it.
    The gradient-boosted trees between the last two come with their authors' training set and
    are left out, as is Thompson sampling, which is optional.
    """

    reads_tools: ClassVar[bool] = True

    def __init__(self) -> None:
        self.gaps = ToolGaps()

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        decided = unpriced(turn)
        if decided is not None:
            return decided
        by_rule = _rule(turn.tool)
        if by_rule is GapClass.FAST:
            return Decision(Tier.PIN, FAST_RULE_S, by_rule)
        if by_rule is GapClass.SLOW:
            return Decision(without_pin(costs, 0.0), 0.0, by_rule)
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

    def _posterior(self, tool: ToolUse | None) -> Nig | None:
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

    def refit(self) -> None:
        pass

    def dump(self) -> dict[str, object]:
        return self.gaps.dump()

    def load(self, learned: Mapping[str, object]) -> None:
        self.gaps.load(learned)


def _rule(tool: ToolUse | None) -> GapClass | None:
    command = tool.command.strip() if tool else ""
    if not command:
        return None
    if command.startswith(SLOW_PREFIXES):
        return GapClass.SLOW
    return GapClass.FAST if command.split(None, 1)[0] in FAST_WORDS else None
