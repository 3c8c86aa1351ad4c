"""Policies that know a gap in advance, and policies without one of their parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.policies.turn_ends import turn_end
from tiered_kv.bench.sim.servers.foresight import Ablated, Clairvoyant, KnownJobs, Part
from tiered_kv.bench.sim.servers.servers import BASES, server
from tiered_kv.policies.base import Costs, Decision, JobKey, Rule, Tier, ToolUse, TurnEnd
from tiered_kv.policies.tier_choice import Occupancy
from tiered_kv.tiers import SSD

SHORT = ToolUse(("bash", "cat"), "cat notes.txt", Rule(0.05, 0.5))
LONG = ToolUse(("bash", "make"), "make -j", Rule(400.0, 0.5), least_s=300.0)
DEAR = Costs(recompute_s=20.0, cpu_s=1.0, tiers_s={SSD: 3.0}, queue_s=5.0, cpu_stay_s=60.0)


def turn(tool: ToolUse | None, number: int = 2) -> TurnEnd:
    return TurnEnd(JobKey("", "job"), number, False, False, 4_000, tool=tool)


@pytest.mark.parametrize("tool", [SHORT, LONG, None])
def test_without_pins_a_context_waits_in_a_tier(tool: ToolUse | None) -> None:
    whole, ablated = Occupancy(), Ablated(Occupancy(), Part.PINS)
    found, expected = ablated.decide(turn(tool), DEAR), whole.decide(turn(tool), DEAR)
    assert found.ttl_s == 0.0
    if expected.tier is Tier.PIN:
        assert found.tier in (Tier.CPU, Tier.STORE)
    else:
        assert found == expected
    assert found.forecast == expected.forecast


def test_a_short_gap_is_one_that_would_have_been_pinned() -> None:
    assert Occupancy().decide(turn(SHORT), DEAR).tier is Tier.PIN


def test_without_promotion_nothing_comes_up_ahead() -> None:
    whole, ablated = Occupancy(), Ablated(Occupancy(), Part.PROMOTION)
    expected = whole.decide(turn(LONG), DEAR)
    assert expected.back_s is not None
    assert ablated.decide(turn(LONG), DEAR) == replace(expected, back_s=None)


def test_without_a_forecast_no_tool_and_no_gap_makes_a_difference() -> None:
    ablated = Ablated(Occupancy(), Part.FORECAST)
    assert not ablated.reads_tools
    first = ablated.decide(turn(SHORT), DEAR)
    for _ in range(50):
        ablated.observe(turn(LONG), 500.0, ended=True)
    assert ablated.decide(turn(SHORT), DEAR) == first
    assert ablated.decide(turn(LONG), DEAR) == first
    assert Occupancy().decide(turn(LONG), DEAR) != first


def test_what_is_left_still_learns() -> None:
    whole, ablated = Occupancy(), Ablated(Occupancy(), Part.PINS)
    for policy in (whole, ablated):
        for _ in range(20):
            policy.observe(turn(None), 90.0, ended=True)
    assert ablated.dump() == whole.dump()
    again = Ablated(Occupancy(), Part.PINS)
    again.load(ablated.dump())
    assert again.dump() == whole.dump()


def test_every_part_has_a_server() -> None:
    lacking = {server(name).lacks for name in BASES} - {None}
    assert lacking == set(Part)


@pytest.mark.parametrize(
    ("gap_s", "price", "made"),
    [
        (3.0, 1.0, Decision(Tier.PIN, 3.0)),
        (11.0, 1.0, Decision(Tier.DROP)),
        (3.0, 4.0, Decision(Tier.DROP)),
    ],
)
def test_the_clairvoyant_pins_for_just_the_gap(gap_s: float, price: float, made: Decision) -> None:
    policy = Clairvoyant()
    policy.gap_s = gap_s
    assert policy.decide(turn_end(), Costs(recompute_s=10.0, vram_price=price)) == made


def test_known_jobs_grow_to_their_longest_context_by_their_last_turn() -> None:
    known = KnownJobs({"job": [160, 320, 960, 480]}, block=16)
    job = JobKey("", "job")
    assert known.ahead(job, 1, 0.0) == ((960 - 160) / 16 / 3, 3.0)
    known.asked("job", 2)
    assert known.ahead(job, 1, 0.0) == ((960 - 320) / 16 / 2, 2.0), "its second turn waits"
    known.asked("job", 3)
    assert known.ahead(job, 3, 50.0) == (0.0, 1.0), "it will be cut short"
    known.asked("job", 4)
    assert known.ahead(job, 4, 50.0) == (0.0, 0.0)
    known.lengths.ended(5)
    assert known.ahead(JobKey("", "inferred"), 1, 0.0) == (0.0, 4.0), "as others do"
