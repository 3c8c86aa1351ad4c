"""Baseline policies behave as published."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.turn_ends import gaps_s, turn_end, turn_ends
from tiered_kv.policies.base import (
    NO_TOOL,
    Costs,
    Decision,
    GapClass,
    Tier,
    ToolUse,
    TurnEnd,
    TurnPolicy,
)
from tiered_kv.policies.baselines import continuum
from tiered_kv.policies.baselines.contextserve import FAST_WORDS, ContextServe
from tiered_kv.policies.baselines.continuum import ALL, Continuum, ContinuumFixed, ToolGaps
from tiered_kv.policies.baselines.infercept import InferCept
from tiered_kv.policies.baselines.unpinned import Lru, NoOffload
from tiered_kv.policies.registry import POLICIES

COSTS = Costs(recompute_s=10.0)
LS = ToolUse(("bash", "ls", "ls"), command="ls")
TEST = ToolUse(("bash", "runner", "runner <path>"), command="runner tests")


def tell(policy: TurnPolicy, tool: ToolUse | None, *gaps: float) -> None:
    for gap_s in gaps:
        policy.observe(turn_end(tool=tool), gap_s, ended=True)


# -- Continuum, as published ----------------------------------------------------------


def test_continuum_starts_with_an_exponential_prior() -> None:
    """With fewer than a hundred observed gaps, Continuum assumes an exponential distribution with a
    mean of 1 s, and η = 1. The time to live is then τ* = ln(T + R), and there is no pin unless τ*
    is above 0."""
    policy = Continuum()
    tell(policy, LS, *[50.0] * 99)
    made = policy.decide(turn_end(tool=LS), Costs(recompute_s=10.0, queue_s=2.0))
    assert made.ttl_s == pytest.approx(math.log(12))
    assert policy.decide(turn_end(tool=LS), Costs(recompute_s=0.5)).tier is Tier.DROP


def test_continuum_pools_all_tools_until_one_has_a_hundred_gaps() -> None:
    policy = Continuum()
    tell(policy, TEST, *[3.0] * 150)
    tell(policy, LS, *[0.5] * 99)
    assert policy.decide(turn_end(tool=LS), COSTS) == Decision(Tier.PIN, 3.0)
    tell(policy, LS, 0.5)
    assert policy.decide(turn_end(tool=LS), COSTS) == Decision(Tier.PIN, 0.5)


def brute_force(gaps: list[float], benefit_s: float) -> float:
    gains = {t: sum(g <= t for g in gaps) / len(gaps) * benefit_s - t for t in gaps}
    best = max(gains.values())
    return min(t for t, gain in gains.items() if gain == best) if best > 0 else 0.0


@settings(max_examples=30)
@given(st.lists(st.integers(1, 300), min_size=100, max_size=130), st.integers(1, 100))
def test_continuum_s_time_to_live_is_the_best_of_the_recorded_gaps(
    tenths: list[int], benefit: int
) -> None:
    gaps = [tenth / 8 for tenth in tenths]  # eighths are exact, so no result depends on rounding
    policy = Continuum()
    tell(policy, LS, *gaps)
    made = policy.decide(turn_end(tool=LS), Costs(recompute_s=float(benefit)))
    gain = np.mean(np.array(gaps) <= made.ttl_s) * benefit - made.ttl_s
    best = brute_force(gaps, float(benefit))
    assert gain == pytest.approx(np.mean(np.array(gaps) <= best) * benefit - best)


def test_continuum_weighs_the_queue_by_memoryfulness() -> None:
    policy = Continuum()
    tell(policy, LS, *[5.0] * 100)
    waits = Costs(recompute_s=1.0, queue_s=10.0)
    assert policy.decide(turn_end(tool=LS), waits).ttl_s == 5.0
    fresh = Costs(recompute_s=1.0, queue_s=10.0, memoryfulness=0.0)
    assert policy.decide(turn_end(tool=LS), fresh).tier is Tier.DROP


def test_gaps_are_kept_up_to_a_limit_and_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuum, "MAX_GAPS", 50)
    monkeypatch.setattr(continuum, "MAX_TOOLS", 5)
    gaps, rng = ToolGaps(), random.Random(0)
    told = [rng.choice([1.0, 2.0, rng.random() * 9]) for _ in range(300)]
    for number, gap_s in enumerate(told):
        gaps.observe({ALL, (f"tool {number}",)}, gap_s)
    assert gaps.ascending(ALL).tolist() == sorted(told[-50:])
    assert gaps.latest(ALL, 3).tolist() == told[:-4:-1]
    assert gaps.count(("tool 299",)) == 1
    assert gaps.count(("tool 0",)) == 0


# -- Continuum, as released -------------------------------------------------------------


def test_continuum_fixed_pins_for_two_seconds_what_is_quick_on_average() -> None:
    policy = ContinuumFixed()
    assert policy.decide(turn_end(tool=LS), COSTS) == Decision(Tier.PIN, 2.0), "as none was yet"
    tell(policy, LS, 0.1, 3.9)
    assert policy.decide(turn_end(tool=LS), COSTS) == Decision(Tier.PIN, 2.0)
    tell(policy, LS, 2.1)
    assert policy.decide(turn_end(tool=LS), COSTS) == Decision(Tier.DROP)
    assert policy.decide(turn_end(tool=TEST), COSTS) == Decision(Tier.PIN, 2.0)
    assert policy.decide(turn_end(tool=NO_TOOL), COSTS) == Decision(Tier.DROP)


# -- ContextServe -----------------------------------------------------------------------


def test_contextserve_s_rules_look_at_how_a_command_begins() -> None:
    assert len(FAST_WORDS) == 33
    fooled = ToolUse(("bash", "pytest", "pytest"), command="cd src && pytest")
    made = ContextServe().decide(turn_end(tool=fooled), Costs(recompute_s=0.01))
    assert made == Decision(Tier.PIN, 3.0, GapClass.FAST), "whatever follows, whatever it costs"
    slow = ToolUse(("bash", "pip install", "pip install"), command="pip install numpy")
    made = ContextServe().decide(turn_end(tool=slow), Costs(recompute_s=1e4, cpu_s=1.0))
    assert made == Decision(Tier.CPU, 0.0, GapClass.SLOW)


def test_contextserve_s_posteriors() -> None:
    policy = ContextServe()
    rng = random.Random(0)
    quick, slow = ToolUse(("quick",)), ToolUse(("slow",))
    tell(policy, quick, *(rng.lognormvariate(math.log(0.2), 0.3) for _ in range(50)))
    tell(policy, slow, *(rng.lognormvariate(math.log(60), 0.3) for _ in range(50)))
    made = policy.decide(turn_end(tool=quick), COSTS)
    assert (made.tier, made.gap_class) == (Tier.PIN, GapClass.FAST)
    assert made.forecast is not None
    assert made.ttl_s == made.forecast.quantile(0.9) == pytest.approx(0.3, abs=0.1)
    assert policy.decide(turn_end(tool=slow), COSTS).gap_class is GapClass.SLOW
    assert policy.decide(turn_end(tool=slow), COSTS).tier is Tier.DROP


def test_contextserve_leaves_the_rest_to_continuum() -> None:
    policy = ContextServe()
    unsure = ToolUse(("unsure",))
    tell(policy, unsure, *[0.2, 7.0] * 60)
    made = policy.decide(turn_end(tool=unsure), COSTS)
    assert (made.tier, made.ttl_s, made.gap_class) == (Tier.PIN, 0.2, GapClass.UNCERTAIN)


def test_contextserve_uses_the_narrowest_context_with_enough_gaps() -> None:
    policy = ContextServe()
    tell(policy, ToolUse(("bash", "sync", "sync a")), *[0.1] * 9)
    tell(policy, ToolUse(("bash", "sync", "sync b")), *[60.0] * 10)
    one = policy.decide(turn_end(tool=ToolUse(("bash", "sync", "sync b"))), COSTS)
    assert one.gap_class is GapClass.SLOW
    other = policy.decide(turn_end(tool=ToolUse(("bash", "sync", "sync a"))), COSTS)
    assert other.gap_class is GapClass.UNCERTAIN, "nine are too few: the tool has both"


# -- other baselines ------------------------------------------------------------------------


def test_infercept_preserves_until_its_waste_equals_the_alternatives() -> None:
    assert InferCept().decide(turn_end(), COSTS) == Decision(Tier.PIN, 10.0)
    assert InferCept().decide(turn_end(), Costs(10.0, cpu_s=0.5)) == Decision(Tier.PIN, 1.0)


def test_without_a_policy_there_is_lru_or_nothing() -> None:
    assert Lru().decide(turn_end(), COSTS) == Decision(Tier.CPU)
    assert NoOffload().decide(turn_end(), COSTS) == Decision(Tier.DROP)


@pytest.mark.parametrize("name", POLICIES)
class TestEveryPolicy:
    """Tests in addition to ``test_conformance``."""

    @settings(max_examples=25)
    @given(past=st.lists(st.tuples(turn_ends, gaps_s, st.booleans()), max_size=5), turn=turn_ends)
    def test_any_turn_gets_the_same_decision_twice(
        self, name: str, past: list[tuple[TurnEnd, float, bool]], turn: TurnEnd
    ) -> None:
        policy = POLICIES[name]()
        for told, gap_s, ended in past:
            policy.observe(told, gap_s, ended=ended)
        made = policy.decide(turn, COSTS)
        assert (made.ttl_s > 0) is (made.tier is Tier.PIN)
        assert policy.decide(turn, COSTS) == made

    def test_another_policys_state_is_refused(self, name: str) -> None:
        policy = POLICIES[name]()
        if not policy.dump():
            return
        tell(policy, LS, 1.0, 2.0)
        before = policy.dump()
        wrongs: list[dict[str, Any]] = [
            {},
            {**before, "version": 99},
            {"version": 1, "tools": None},
            {"version": 1, "tools": [{"tool": [], "gaps": [-1.0]}]},
            {"version": 1, "tools": [{"tool": [], "gaps": ["x"]}]},
            {"version": 1, "tools": [{"tool": ["no root"], "gaps": [1.0]}]},
        ]
        for wrong in wrongs:
            with pytest.raises(ValueError, match=r"."):
                policy.load(wrong)
        assert policy.dump() == before
