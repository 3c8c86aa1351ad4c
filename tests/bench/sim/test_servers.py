"""Simulated servers: names, order of arriving turns, knowledge of the future, and missing
features."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.policies.turn_ends import turn_end
from tiered_kv.bench.sim.engine.machines import machine
from tiered_kv.bench.sim.engine.models import MODELS
from tiered_kv.bench.sim.servers.arrivals import Gate, Order, Ordering
from tiered_kv.bench.sim.servers.foresight import Blind, Clairvoyant, KnownJobs, Late, Unpinned
from tiered_kv.bench.sim.servers.servers import BASES, server
from tiered_kv.bench.sim.study.catalogue import PLACES
from tiered_kv.bench.sim.workloads.workload import SimJob, SimTurn
from tiered_kv.policies.base import Costs, Decision, JobKey, Rule, Tier, ToolUse, TurnEnd
from tiered_kv.policies.tier_choice import Occupancy
from tiered_kv.tiers import SSD

SHORT = ToolUse(("bash", "cat"), "cat notes.txt", Rule(0.05, 0.5))
LONG = ToolUse(("bash", "make"), "make -j", Rule(400.0, 0.5), least_s=300.0)
DEAR = Costs(recompute_s=20.0, cpu_s=1.0, tiers_s={SSD: 3.0}, queue_s=5.0, cpu_stay_s=60.0)


def test_every_server_can_be_named_and_others_are_refused() -> None:
    for base in BASES:
        assert server(base).name == base
    assert server("occupancy+cpu+ssd").ssd
    assert server("lmcache").cpu
    with pytest.raises(ValueError, match="use one of"):
        server("ocupancy")
    with pytest.raises(ValueError, match="stock vLLM"):
        server("fcfs+cpu")


def test_a_server_may_have_another_eviction_rule_and_parts_from_elsewhere() -> None:
    assert server("occupancy+cpu").eviction is None
    assert server("occupancy+cpu@lru").eviction == "lru"
    rule = "tiered_kv.policies.cache.lru:LeastRecentlyUsed"
    named = server(f"tiered_kv.testing.policies:FixedPin+cpu@{rule}")
    assert (named.policy, named.cpu) == ("tiered_kv.testing.policies:FixedPin", True)
    assert named.eviction == rule
    assert named.outside == {"tiered_kv.testing.policies", "tiered_kv.policies.cache.lru"}
    with pytest.raises(ValueError, match="to choose an eviction rule"):
        server("occupancy@lru")  # without a CPU tier there are no pages to evict
    with pytest.raises(ValueError, match="is not a known eviction rule: did you mean lru"):
        server("occupancy+cpu@lur")
    with pytest.raises(ValueError, match="has no class Missing"):
        server("tiered_kv.testing.policies:Missing+cpu")


def test_every_machine_of_the_list_holds_its_model() -> None:
    for place in PLACES:
        assert place.machine().pool_tokens > 10_000
    with pytest.raises(ValueError, match="does not fit"):
        machine("rtx4090-24", "llama-3.1-70b")
    with pytest.raises(ValueError, match="use one of"):
        machine("gtx", "llama-3.1-8b")
    assert MODELS["llama-3.1-8b"].kv_bytes == 131_072


# -- arriving turns --------------------------------------------------------------------


def test_a_program_is_paused_when_contexts_grow_too_much_and_resumes_before_new_ones() -> None:
    gate, sent = Gate(pool_tokens=100), list[str]()
    gate.ask("a", 40, lambda: sent.append("a1"))
    gate.ask("b", 40, lambda: sent.append("b1"))
    gate.ask("c", 40, lambda: sent.append("c1"))
    assert sent == ["a1", "b1"], "there is no room for the third"
    gate.grew("a", 70)
    gate.tick()
    gate.ask("b", 45, lambda: sent.append("b2"))
    assert sent == ["a1", "b1"], "the last to come is paused"
    gate.ask("a", 80, lambda: sent.append("a2"))
    gate.over("a")
    gate.tick()
    assert sent == ["a1", "b1", "a2", "b2", "c1"]


def test_the_job_that_was_served_least_goes_first() -> None:
    order = Ordering(Order.ATTAINED)
    for job in ("long", "short"):
        order.began(job, None)
    assert order.asked("long", "r1", 0.0) == 0
    order.answered("long", "r1", waited_s=0.0, served_s=9.0)
    order.answered("short", "r2", waited_s=0.0, served_s=1.5)
    assert order.asked("short", "r3", 0.0) < order.asked("long", "r4", 0.0)
    order.answered("long", "r4", waited_s=100.0, served_s=0.0)
    assert order.asked("long", "r5", 0.0) == 0, "it has starved"


def test_jobs_are_ranked_by_their_start_and_sub_agents_as_their_parents() -> None:
    order = Ordering(Order.JOB)
    order.began("a", None)
    order.began("b", None)
    order.began("a/sub", "a")
    assert [order.asked(job, job, 0.0) for job in ("b", "a/sub", "a")] == [1, 0, 0]


# -- with and without knowledge of the future -------------------------------------------


def turn(tool: ToolUse | None) -> TurnEnd:
    return TurnEnd(JobKey("", "job"), 2, False, False, 4_000, tool=tool)


def test_without_pins_a_context_waits_in_a_tier() -> None:
    whole, unpinned = Occupancy(), Unpinned()
    pinned = whole.decide(turn(SHORT), DEAR)
    assert pinned.tier is Tier.PIN
    waits = unpinned.decide(turn(SHORT), DEAR)
    assert (waits.tier, waits.ttl_s) == (Tier.CPU, 0.0)
    assert waits.forecast == pinned.forecast
    assert unpinned.decide(turn(LONG), DEAR) == whole.decide(turn(LONG), DEAR)


def test_without_promotion_nothing_is_prefetched() -> None:
    expected = Occupancy().decide(turn(LONG), DEAR)
    assert expected.back_s is not None
    assert Late().decide(turn(LONG), DEAR) == replace(expected, back_s=None)


def test_without_a_forecast_no_tool_and_no_gap_makes_a_difference() -> None:
    blind = Blind()
    assert not blind.reads_tools
    first = blind.decide(turn(SHORT), DEAR)
    for _ in range(50):
        blind.observe(turn(LONG), 500.0, ended=True)
    assert blind.decide(turn(SHORT), DEAR) == blind.decide(turn(LONG), DEAR) == first
    assert Occupancy().decide(turn(LONG), DEAR) != first


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
    turns = tuple(SimTurn(0, context - 10, 10, 1.0) for context in (160, 320, 960, 480))
    known = KnownJobs([SimJob("job", 0.0, turns)], block=16)
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
