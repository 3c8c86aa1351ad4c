"""The default policy after a day of observations."""

from __future__ import annotations

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu_time import loops
from tests.policies.turn_ends import gaps_s, turn_end, turn_ends
from tiered_kv.policies.base import NO_TOOL, Costs, Tier, ToolUse, TurnEnd
from tiered_kv.policies.tier_choice import Occupancy
from tiered_kv.tiers import SSD

LS = ToolUse(("bash", "ls", "ls"))
BUILD = ToolUse(("bash", "make", "make all"))
COSTS = Costs(recompute_s=8.0, cpu_s=2.0)


def after_a_day() -> Occupancy:
    policy, rng = Occupancy(), random.Random(0)
    for number in range(300):
        for tool, median_s in ((LS, 0.1), (BUILD, 90.0), (NO_TOOL, 400.0)):
            turn = turn_end(f"{number}", tool=tool)
            policy.observe(turn, median_s * rng.lognormvariate(0, 0.5), ended=True)
    return policy


def test_quick_tools_are_waited_for_and_slow_ones_are_not() -> None:
    policy = after_a_day()
    assert policy.decide(turn_end(tool=LS), COSTS).tier is Tier.PIN
    assert policy.decide(turn_end(tool=BUILD), COSTS).tier is Tier.CPU
    assert policy.decide(turn_end(tool=NO_TOOL), COSTS).tier is Tier.CPU


def test_the_decision_depends_on_what_is_saved() -> None:
    policy = after_a_day()
    assert policy.decide(turn_end(tool=BUILD), Costs(recompute_s=600.0)).tier is Tier.PIN
    assert policy.decide(turn_end(tool=LS), Costs(recompute_s=0.01)).tier is not Tier.PIN


def test_a_turn_whose_tool_is_not_read_yet_is_decided_too() -> None:
    made = after_a_day().decide(turn_end(tool=None), COSTS)
    assert made.forecast is not None
    assert made.tier is Tier.PIN, "one gap in three was an `ls`"
    assert made.ttl_s < 2


def test_decisions_are_the_same_after_a_restart() -> None:
    policy, other = after_a_day(), Occupancy()
    other.load(json.loads(json.dumps(policy.dump())))
    for tool in (LS, BUILD, NO_TOOL, None):
        turn = turn_end("new", tool=tool)
        assert other.decide(turn, COSTS) == policy.decide(turn, COSTS)


costs = st.builds(
    Costs,
    recompute_s=st.floats(0, 1e4),
    cpu_s=st.none() | st.floats(0, 1e4),
    tiers_s=st.dictionaries(st.just(SSD), st.floats(0, 1e4)),
    queue_s=st.floats(0, 1e4),
    memoryfulness=st.floats(0, 1),
    vram_price=st.floats(0, 100),
    cpu_stay_s=st.floats(0, allow_nan=False),
)


@settings(max_examples=60)
@given(st.lists(st.tuples(turn_ends, gaps_s, st.booleans()), max_size=5), turn_ends, costs)
def test_any_turn_gets_a_decision_and_the_same_one_twice(
    past: list[tuple[TurnEnd, float, bool]], turn: TurnEnd, costs: Costs
) -> None:
    policy = Occupancy()
    for told, gap_s, ended in past:
        policy.observe(told, gap_s, ended=ended)
    made = policy.decide(turn, costs)
    assert (made.ttl_s > 0) is (made.tier is Tier.PIN)
    assert policy.decide(turn, costs) == made


def test_a_decision_takes_microseconds() -> None:
    """A decision takes about 65 µs on an idle core. The test allows the time of ten reference loops
    of about 30 µs each."""
    policy = after_a_day()
    turns = [turn_end("0", number, tool=BUILD) for number in range(50)]
    assert loops(lambda: [policy.decide(turn, COSTS) for turn in turns], calls=len(turns)) < 10
