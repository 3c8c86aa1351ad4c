"""A policy without a part decides as the whole one does, but for that part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tiered_kv.bench.sim.servers.ablated import Ablated, Part
from tiered_kv.bench.sim.servers.servers import LACKING, server
from tiered_kv.policies.base import Costs, JobKey, Rule, Tier, ToolUse, TurnEnd
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
    assert set(LACKING.values()) == set(Part)
    for name, part in LACKING.items():
        made = server(f"{name}+cpu+ssd")
        assert (made.policy, made.lacks, made.in_job_order) == ("occupancy", part, True)
