"""The tier chosen in different situations of a server."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.policies.turn_ends import forecast_of, turn_end
from tiered_kv.policies.base import Costs, Decision, GapClass, Tier, TurnEnd
from tiered_kv.policies.tier_choice import BACK_BEFORE, choose, unpriced
from tiered_kv.tiers import SSD

QUICK = forecast_of({0.2: 1.0})
MINUTES = forecast_of({150.0: 0.25, 200.0: 0.25, 300.0: 0.25, 400.0: 0.25})
NEVER = forecast_of({})
TURN = turn_end()


def test_a_quick_tool_is_waited_for_in_vram() -> None:
    made = choose(TURN, QUICK, Costs(recompute_s=10, cpu_s=0.5))
    assert made.tier is Tier.PIN
    assert 0.2 <= made.ttl_s <= 0.5
    assert (made.forecast, made.back_s) == (QUICK, None)


def test_a_restore_from_cpu_memory_may_be_too_cheap_to_wait_for() -> None:
    assert choose(TURN, QUICK, Costs(recompute_s=10, cpu_s=0.05)).tier is Tier.CPU


def test_a_long_queue_makes_a_pin_worth_it_again() -> None:
    queued = Costs(recompute_s=10, cpu_s=0.05, queue_s=5)
    assert choose(TURN, QUICK, queued).tier is Tier.PIN
    forgetful = Costs(recompute_s=10, cpu_s=0.05, queue_s=5, memoryfulness=0)
    assert choose(TURN, QUICK, forgetful).tier is Tier.CPU


def test_vram_that_other_jobs_need_more_is_not_pinned() -> None:
    assert choose(TURN, QUICK, Costs(recompute_s=1, vram_price=1)).tier is Tier.PIN
    assert choose(TURN, QUICK, Costs(recompute_s=1, vram_price=10)).tier is not Tier.PIN


def test_a_slow_tool_is_waited_for_in_cpu_memory_while_that_lasts() -> None:
    made = choose(TURN, MINUTES, Costs(recompute_s=10, cpu_s=0.5, tiers_s={SSD: 2}))
    assert (made.tier, made.ttl_s, made.gap_class) == (Tier.CPU, 0.0, GapClass.SLOW)


def test_a_slow_tool_is_waited_for_on_ssd_if_cpu_memory_would_evict_it() -> None:
    made = choose(TURN, MINUTES, Costs(recompute_s=10, cpu_s=0.5, tiers_s={SSD: 2}, cpu_stay_s=60))
    assert made.tier is Tier.STORE
    assert made.back_s is not None
    on_its_way_s = made.back_s + 2
    assert MINUTES.within(on_its_way_s) == pytest.approx(BACK_BEFORE, abs=0.05)


def test_an_ssd_slower_than_prefilling_is_not_used() -> None:
    slow = Costs(recompute_s=1, cpu_s=0.5, tiers_s={SSD: 2}, cpu_stay_s=60)
    assert choose(TURN, MINUTES, slow).tier is Tier.CPU
    assert choose(TURN, MINUTES, Costs(recompute_s=1, tiers_s={SSD: 2})).tier is Tier.DROP
    assert choose(TURN, MINUTES, Costs(recompute_s=1)).tier is Tier.DROP


def test_a_job_that_has_probably_ended_is_not_promoted() -> None:
    made = choose(TURN, NEVER, Costs(recompute_s=10, cpu_s=0.5, tiers_s={SSD: 2}, cpu_stay_s=60))
    assert (made.tier, made.back_s) == (Tier.STORE, None)


def test_a_return_earlier_than_a_promotion_takes_starts_immediately() -> None:
    soon = forecast_of({1.0: 0.3, 500.0: 0.7})
    made = choose(TURN, soon, Costs(recompute_s=10, cpu_s=0.01, tiers_s={SSD: 5}, cpu_stay_s=60))
    assert (made.tier, made.back_s) == (Tier.STORE, 0.0)


def test_an_instant_promotion_starts_when_the_job_is_expected() -> None:
    made = choose(
        TURN, MINUTES, Costs(recompute_s=10, cpu_s=0.5, tiers_s={SSD: 0.0}, cpu_stay_s=60)
    )
    assert (made.tier, made.back_s) == (Tier.STORE, MINUTES.quantile(BACK_BEFORE))


@pytest.mark.parametrize(
    ("turn", "tier"),
    [
        (turn_end(last=True), Tier.DROP),
        (turn_end(None, last=True), Tier.DROP),
        (turn_end(last=True, aborted=True), Tier.DROP),
        (turn_end(None), Tier.CPU),
        (turn_end(aborted=True), Tier.CPU),
    ],
)
def test_turns_that_are_decided_without_prices(turn: TurnEnd, tier: Tier) -> None:
    assert unpriced(turn) == Decision(tier)
    assert choose(turn, QUICK, Costs(recompute_s=10)) == Decision(tier)


def test_only_a_pin_has_a_deadline_and_only_a_store_promotes() -> None:
    for forecast in (QUICK, MINUTES, NEVER):
        for cpu_s in (None, 0.5):
            for tiers_s in ({}, {SSD: 2.0}):
                for stay_s in (60.0, math.inf):
                    costs = Costs(10, cpu_s, tiers_s, cpu_stay_s=stay_s)
                    made = choose(TURN, forecast, costs)
                    assert (made.ttl_s > 0) is (made.tier is Tier.PIN)
                    assert made.back_s is None or made.tier is Tier.STORE
                    assert unpriced(TURN) is None


def test_a_pin_saves_a_prefill_as_often_as_other_tiers_lose_the_pages() -> None:
    sure = Costs(recompute_s=10, cpu_s=0.5)
    assert sure.restore_s == 0.5
    assert replace(sure, survival=0.0).restore_s == 10
    assert replace(sure, survival=0.6).restore_s == pytest.approx(0.6 * 0.5 + 0.4 * 10)
    assert Costs(recompute_s=10, survival=0.0).restore_s == 10
    assert Costs(recompute_s=0.1, cpu_s=0.5, survival=0.5).restore_s == 0.1, "never copied"
