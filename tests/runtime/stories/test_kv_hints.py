"""Hints are carried out within their budgets and scopes, and each hint has a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.stories.conftest import MakeEngine
from tests.runtime.stories.test_tiers import CONTEXT, push_out, settings
from tiered_kv.policies.base import Costs, Decision, JobKey, Tier, TurnEnd
from tiered_kv.policies.baselines.unpinned import StatelessPolicy
from tiered_kv.policies.distribution import GRID, Forecast
from tiered_kv.policies.jobs.kv_hints import HintResult, Intent, KvHint, Outcome, Target
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.policies import Always, FixedPin
from tiered_kv.testing.rig import EngineRig
from tiered_kv.testing.stores import SSD
from tiered_kv.trace.trace_reader import TraceReader
from tiered_kv.trace.turn_record import StoryEnd

SOON = Forecast(np.minimum(GRID / 100, 1.0))
NEVER = Forecast(np.zeros(len(GRID)))
JOB = Target(job="j")
PAGES = 21
"""Number of pages of the context: twenty pages of full blocks and a partial page with the end of
the answer."""
KEPT = Always(Decision(Tier.CPU, forecast=SOON))


class ByExpectation(StatelessPolicy):
    """Pins KV for a minute if its job is expected back within that minute, and records the observed
    gaps."""

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[str, ...], float]] = []

    def decide(self, turn: TurnEnd, costs: Costs) -> Decision:
        expected_s = turn.tool.expected_s if turn.tool is not None else None
        if turn.is_last_step or expected_s is None:
            return Decision(Tier.STORE, forecast=SOON)
        tier = Tier.PIN if expected_s <= 60 else Tier.STORE
        return Decision(tier, 60.0 if tier is Tier.PIN else 0.0, forecast=SOON)

    def observe(self, turn: TurnEnd, gap_s: float, *, ended: bool) -> None:
        self.seen.append((turn.tool.path if turn.tool is not None else (), gap_s))


@pytest.fixture
def rig(make_engine: MakeEngine, tmp_path: Path) -> EngineRig:
    """An engine with sixty-four CPU slots and an SSD tier."""
    rig = make_engine(extra=settings(make_engine, tmp_path, 64), max_batched_tokens=64)
    rig.policy = KEPT
    return rig


def hint(intent: Intent, target: Target = JOB, **fields: Any) -> KvHint:
    return KvHint("a", intent, target, **fields)


def send(rig: EngineRig, *hints: KvHint, scope: str | None = "", **of: str) -> list[HintResult]:
    results: list[HintResult] = rig.half.kv_hints.carry_out(scope, hints, **of)
    return results


def send_one(rig: EngineRig, intent: Intent, target: Target = JOB, **fields: Any) -> HintResult:
    [result] = send(rig, hint(intent, target, **fields))
    return result


def first_turn(rig: EngineRig, job: str = "j", salt: str | None = None, **hints: Any) -> None:
    params = {"job_id": job, **hints}
    assert rig.ask(f"{job} {salt}", CONTEXT, params=params, salt=salt) == expected(CONTEXT, 4)


def settle(rig: EngineRig) -> None:
    rig.wait_for_worker()
    rig.run()
    assert not rig.half.kv_hints.works


def keys(rig: EngineRig, job: str = "j", salt: str = "") -> list[Any]:
    return list(rig.pages.order.context(JobKey(salt, job)))


def in_cpu(rig: EngineRig, pages: list[Any]) -> int:
    return sum(map(rig.index.readable, pages))


def pinned(rig: EngineRig) -> int:
    return rig.pins.held_blocks


def on_ssd(rig: EngineRig, pages: list[Any]) -> int:
    known = [key for key in pages if key in rig.pages.book.stores[SSD].index]
    assert {*known} <= {*rig.worker_half.stores[SSD].io.store.keys()}
    return len(known)


def in_vram(rig: EngineRig, pages: list[Any]) -> int:
    return sum(rig.half.pool.cached(key[16:], 0) is not None for key in pages)


def counted(rig: EngineRig, intent: Intent, outcome: Outcome) -> int:
    return rig.count(f"hints_{intent.value}_{outcome.value}")


# -- retain --------------------------------------------------------------------------------


def test_a_retained_context_outlives_others_until_its_time_is_up(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    slots = settings(make_engine, tmp_path, 100)["cpu_gib"]
    rig = make_engine(extra={"cpu_gib": slots}, blocks=128)
    rig.policy = Always(Decision(Tier.CPU, forecast=NEVER))
    for job in ("j", "other"):
        rig.ask(job, text(320, seed=len(job)), params={"job_id": job})
    mine, others = keys(rig), keys(rig, "other")
    result = send_one(rig, Intent.RETAIN, ttl_s=100.0, priority=1.0)
    assert (result.outcome, result.pages, result.until_s) == (Outcome.ACCEPTED, PAGES, 100.0)

    for seed in range(100, 104):
        rig.now += 2
        rig.ask(f"r{seed}", text(350, seed=seed), params={"job_id": f"r{seed}"})
    assert in_cpu(rig, mine) == PAGES
    assert in_cpu(rig, others) == 0

    rig.now += 100
    for seed in range(200, 208):
        rig.now += 2
        rig.ask(f"r{seed}", text(350, seed=seed), params={"job_id": f"r{seed}"})
    assert not rig.half.kv_hints.retained
    assert in_cpu(rig, mine) == 0
    rig.check_clean()


def test_retained_pages_are_limited_to_a_share_of_cpu_memory(rig: EngineRig) -> None:
    first_turn(rig)
    result = send_one(rig, Intent.RETAIN, ttl_s=1e9)
    assert (result.outcome, result.pages) == (Outcome.CLIPPED, 64 // 4)
    assert result.until_s == 86_400
    rig.ask("k", text(100, seed=5), params={"job_id": "k"})
    assert send_one(rig, Intent.RETAIN, Target(job="k")).outcome is Outcome.REJECTED
    assert send_one(rig, Intent.RETAIN).outcome is Outcome.CLIPPED, "it replaces itself"
    assert send_one(rig, Intent.RETAIN, ttl_s=-1.0).outcome is Outcome.REJECTED
    assert send_one(rig, Intent.RETAIN, Target(job="nobody")).outcome is Outcome.MISSING


def test_retention_needs_an_eviction_order_that_knows_contexts(make_engine: MakeEngine) -> None:
    rig = make_engine(extra={"cpu_gib": 0.001, "eviction": "lru"})
    first_turn(rig)
    assert send_one(rig, Intent.RETAIN).outcome is Outcome.REJECTED


def test_a_request_retains_its_own_context_at_its_end(rig: EngineRig) -> None:
    rig.add("t", CONTEXT[:200], params={"job_id": "j"})
    [result] = send(rig, hint(Intent.RETAIN, Target(own=True)), request_id="t")
    turn = rig.turn("t")
    assert result.outcome is Outcome.DEFERRED
    rig.run()
    [result] = turn.hint_results
    assert (result.outcome, result.pages) == (Outcome.ACCEPTED, 13)
    assert counted(rig, Intent.RETAIN, Outcome.DEFERRED) == 1
    assert counted(rig, Intent.RETAIN, Outcome.ACCEPTED) == 1


# -- pin -----------------------------------------------------------------------------------


def test_blocks_that_are_still_in_vram_are_pinned_until_the_time_is_up(rig: EngineRig) -> None:
    first_turn(rig)
    assert not pinned(rig)
    result = send_one(rig, Intent.PIN, ttl_s=30.0)
    assert (result.outcome, result.pages, result.until_s) == (Outcome.ACCEPTED, 20, 30.0)
    assert pinned(rig) == 20
    rig.now += 29
    rig.ask("tick", text(1, seed=2), max_tokens=1)
    assert pinned(rig) == 20
    rig.now += 2
    rig.ask("tock", text(1, seed=3), max_tokens=1)
    assert not pinned(rig)
    assert rig.count("pins_ended_expired") == 1
    rig.check_clean()


def test_a_pin_is_extended_and_never_shortened(make_engine: MakeEngine) -> None:
    rig = make_engine(extra={"cpu_gib": 0})
    rig.policy = FixedPin(20.0)
    first_turn(rig)
    assert send_one(rig, Intent.PIN, ttl_s=5.0).until_s == 20.0
    result = send_one(rig, Intent.PIN, ttl_s=1e6)
    assert (result.outcome, result.until_s) == (Outcome.CLIPPED, 600.0)
    rig.now += 30
    rig.ask("tick", text(1, seed=2), max_tokens=1)
    assert pinned(rig) == 20
    rig.ask("again", CONTEXT, params={"job_id": "j", "is_last_step": True})
    assert rig.count("prompt_tokens_vram") >= 304
    rig.check_clean()


def test_a_turn_is_pinned_at_its_end_whatever_the_policy_decides(rig: EngineRig) -> None:
    rig.add("t", CONTEXT, params={"job_id": "j"})
    send(rig, hint(Intent.PIN, Target(own=True)), request_id="t")
    turn = rig.turn("t")
    rig.run()
    assert turn.hint_results[0].outcome is Outcome.ACCEPTED
    assert pinned(rig) == 20
    rig.add("runs", text(200, seed=2), max_tokens=200)
    while not rig.outputs["runs"]:
        rig.step()
    rig.add("new", text(500, seed=3))
    while not rig.outputs["new"]:
        rig.step()
    assert "runs" not in rig.finished, "others never wait for it"
    assert rig.count("pins_ended_pressure") == 1
    rig.run()
    rig.check_clean()


def test_pins_by_hints_are_limited_to_a_share_of_the_budget(make_engine: MakeEngine) -> None:
    rig = make_engine(extra={"cpu_gib": 0.001, "pin_fraction": 0.5})
    rig.policy = KEPT
    first_turn(rig)
    result = send_one(rig, Intent.PIN)
    assert (result.outcome, result.pages) == (Outcome.CLIPPED, 15), "a quarter of 63 blocks"
    rig.ask("k", text(100, seed=5), params={"job_id": "k"})
    assert send_one(rig, Intent.PIN, Target(job="k")).outcome is Outcome.REJECTED
    assert pinned(rig) == 15
    rig.pins.release_all()
    rig.fill()
    assert send_one(rig, Intent.PIN).outcome is Outcome.REJECTED, "nothing is in VRAM"
    rig.check_clean()


# -- prefetch ------------------------------------------------------------------------------


def test_a_turn_after_a_prefetch_reads_nothing_from_ssd(rig: EngineRig) -> None:
    first_turn(rig)
    push_out(rig)
    pages = keys(rig)
    assert in_cpu(rig, pages) == 0
    result = send_one(rig, Intent.PREFETCH)
    assert (result.outcome, result.pages) == (Outcome.ACCEPTED, PAGES)
    rig.wait_for_worker()
    rig.run()
    assert in_cpu(rig, pages) == PAGES
    promoted = rig.count("pages_promoted")
    assert send_one(rig, Intent.PREFETCH).outcome is Outcome.ACCEPTED, "they are there"

    again = [*CONTEXT, *expected(CONTEXT, 4)]
    assert rig.ask("again", again, params={"job_id": "j"}) == expected(again, 4)
    assert rig.count("prompt_tokens_cpu") >= 319
    assert rig.count("pages_promoted") == promoted
    rig.check_clean()


def test_a_prefetch_also_promotes_pages_whose_blocks_are_still_in_vram(rig: EngineRig) -> None:
    first_turn(rig)
    assert send_one(rig, Intent.DEMOTE).outcome is not Outcome.REJECTED
    rig.wait_for_worker()
    rig.run()
    pages = keys(rig)
    assert in_cpu(rig, pages) == 0
    assert send_one(rig, Intent.PREFETCH).outcome is Outcome.ACCEPTED
    rig.wait_for_worker()
    rig.run()
    assert in_cpu(rig, pages) >= PAGES - 1, "all whole pages; the blocks may soon be reused"
    rig.check_clean()


def test_a_prefetch_is_clipped_where_space_or_pages_end(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    rig = make_engine(extra=settings(make_engine, tmp_path, 36), max_batched_tokens=64)
    rig.policy = KEPT
    first_turn(rig)
    push_out(rig)
    result = send_one(rig, Intent.PREFETCH)
    assert (result.outcome, result.pages) == (Outcome.CLIPPED, 18)
    settle(rig)
    assert send_one(rig, Intent.PREFETCH, Target(job="nobody")).outcome is Outcome.MISSING
    longer = Target(tokens=tuple(CONTEXT[:64] + text(64, seed=9)))
    result = send_one(rig, Intent.PREFETCH, longer)
    assert (result.outcome, result.pages) == (Outcome.CLIPPED, 4)
    strange = Target(tokens=tuple(text(64, seed=9)))
    assert send_one(rig, Intent.PREFETCH, strange).outcome is Outcome.MISSING


# -- demote --------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["job", "tokens", "hashes"])
def test_demoted_pages_leave_cpu_memory_once_they_are_on_ssd(rig: EngineRig, named: str) -> None:
    first_turn(rig)
    pages = keys(rig)
    targets = {
        "job": JOB,
        "tokens": Target(tokens=tuple(CONTEXT)),
        "hashes": Target(hashes=tuple(key[-8:] for key in pages)),
    }
    result = send_one(rig, Intent.DEMOTE, targets[named])
    assert result.outcome is Outcome.DEFERRED
    settle(rig)
    count = PAGES - (named == "tokens")
    assert on_ssd(rig, pages) == count
    assert in_cpu(rig, pages) == PAGES - count
    assert counted(rig, Intent.DEMOTE, Outcome.ACCEPTED) == 1
    rig.fill()
    assert rig.ask("again", CONTEXT, params={"job_id": "j"}) == expected(CONTEXT, 4)
    assert rig.count("prompt_tokens_ssd") >= 304
    rig.check_clean()


def test_a_demotion_ends_the_pin_and_is_rejected_without_a_lower_tier(
    make_engine: MakeEngine, rig: EngineRig
) -> None:
    first_turn(rig)
    send_one(rig, Intent.PIN)
    send_one(rig, Intent.DEMOTE)
    assert not pinned(rig)
    rig.run()
    without = make_engine()
    first_turn(without)
    assert send_one(without, Intent.DEMOTE).outcome is Outcome.REJECTED


def test_pages_of_another_job_are_not_demoted(rig: EngineRig) -> None:
    first_turn(rig)
    first_turn(rig, "k")
    send_one(rig, Intent.DEMOTE)
    settle(rig)
    assert in_cpu(rig, keys(rig)) == PAGES
    assert counted(rig, Intent.DEMOTE, Outcome.REJECTED) == 1


def test_pages_are_kept_if_the_tier_accepts_none(rig: EngineRig) -> None:
    first_turn(rig)
    store = rig.worker_half.stores[SSD].io.store
    store.put = lambda pages: frozenset(range(len(pages)))
    send_one(rig, Intent.DEMOTE)
    settle(rig)
    assert in_cpu(rig, keys(rig)) == PAGES
    assert counted(rig, Intent.DEMOTE, Outcome.REJECTED) == 1
    del store.put


# -- release -------------------------------------------------------------------------------


def test_a_released_job_has_no_pages_in_any_tier(rig: EngineRig, tmp_path: Path) -> None:
    rig.policy = Always(Decision(Tier.STORE, forecast=SOON))
    first_turn(rig)
    pages = keys(rig)
    assert on_ssd(rig, pages) == in_cpu(rig, pages) == PAGES
    assert in_vram(rig, pages) == 20
    result = send_one(rig, Intent.RELEASE)
    assert (result.outcome, result.pages) == (Outcome.ACCEPTED, PAGES)
    settle(rig)
    assert on_ssd(rig, pages) == in_cpu(rig, pages) == in_vram(rig, pages) == 0
    assert not {*pages} & {*rig.worker_half.stores[SSD].io.store.keys()}
    assert rig.gaps.manager.jobs.get(JobKey("", "j")) is None
    assert send_one(rig, Intent.RELEASE).outcome is Outcome.MISSING
    assert rig.ask("again", CONTEXT) == expected(CONTEXT, 4)
    assert rig.count("prompt_tokens_recomputed") == 640
    rig.check_clean()


def test_released_pages_are_not_written_when_the_engine_stops(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    extra = settings(make_engine, tmp_path, 200)
    rig = make_engine(extra=extra)
    rig.policy = KEPT
    first_turn(rig)
    send_one(rig, Intent.RELEASE)
    settle(rig)
    rig.close()
    second = make_engine(extra=extra)
    second.ask("again", CONTEXT)
    assert second.count("prompt_tokens_ssd") == 0


def test_pages_that_another_job_also_has_are_kept(rig: EngineRig) -> None:
    first_turn(rig)
    rig.ask("k", [*CONTEXT[:160], *text(40, seed=7)], params={"job_id": "k"})
    mine, others = keys(rig), keys(rig, "k")
    result = send_one(rig, Intent.RELEASE)
    assert (result.outcome, result.pages) == (Outcome.ACCEPTED, PAGES - 10)
    settle(rig)
    assert in_cpu(rig, mine) == in_vram(rig, mine) == 10
    assert in_cpu(rig, others) == len(others)
    send_one(rig, Intent.RELEASE, Target(job="k"))
    settle(rig)
    assert in_cpu(rig, [*mine, *others]) == in_vram(rig, [*mine, *others]) == 0
    rig.check_clean()


def test_pages_that_another_hint_pins_are_kept_until_they_are_released_themselves(
    rig: EngineRig,
) -> None:
    first_turn(rig)
    pages, prefix = keys(rig), Target(tokens=tuple(CONTEXT[:160]))
    assert send_one(rig, Intent.PIN, prefix, ttl_s=600.0).pages == 10
    result = send_one(rig, Intent.RELEASE)
    assert (result.outcome, result.pages) == (Outcome.ACCEPTED, PAGES - 10), "nothing is waited for"
    assert in_vram(rig, pages) == pinned(rig) == 10
    assert send_one(rig, Intent.RETAIN, prefix, ttl_s=600.0).outcome is Outcome.ACCEPTED
    result = send_one(rig, Intent.RELEASE, prefix)
    assert (result.outcome, result.pages) == (Outcome.ACCEPTED, 10)
    assert in_cpu(rig, pages) == in_vram(rig, pages) == pinned(rig) == 0
    assert not rig.half.kv_hints.retained
    settle(rig)
    rig.check_clean()


def test_a_running_turn_is_the_last_one_of_a_released_job(rig: EngineRig) -> None:
    rig.add("t", CONTEXT, params={"job_id": "j"})
    [result] = send(rig, hint(Intent.RELEASE))
    assert result.outcome is Outcome.DEFERRED
    rig.run()
    settle(rig)
    assert len(rig.index) == 0
    assert rig.half.pool.num_cached() == 0
    assert counted(rig, Intent.RELEASE, Outcome.ACCEPTED) == 1
    assert not len(rig.gaps.manager.open)
    rig.check_clean()


def test_a_job_that_continues_is_not_released(rig: EngineRig) -> None:
    rig.add("t", CONTEXT, params={"job_id": "j"})
    send(rig, hint(Intent.RELEASE))
    rig.step()
    rig.add("u", CONTEXT, params={"job_id": "j"})
    rig.run()
    assert counted(rig, Intent.RELEASE, Outcome.REJECTED) == 1
    assert in_cpu(rig, keys(rig)) == PAGES


def test_pages_in_use_are_released_once_they_are_unused(rig: EngineRig) -> None:
    first_turn(rig)
    pages = keys(rig)
    rig.add("reader", CONTEXT, max_tokens=30, params={"job_id": "k"})
    rig.step()
    assert send_one(rig, Intent.RELEASE).outcome is Outcome.DEFERRED
    for _ in range(3):
        rig.now += 1
        rig.step()
    assert in_vram(rig, pages) >= 19, "blocks that a request uses stay"
    rig.run()
    assert rig.outputs["reader"] == expected(CONTEXT, 30)
    assert in_cpu(rig, pages) >= 19, "they belong to the other job now"
    settle(rig)
    rig.check_clean()


# -- revise --------------------------------------------------------------------------------


def waits_pinned(rig: EngineRig) -> ByExpectation:
    policy = rig.policy = ByExpectation()
    first_turn(rig, tool_name="bash", expected_tool_s=30.0)
    assert pinned(rig) == 20
    return policy


def test_a_revision_with_a_long_remaining_time_ends_the_pin(rig: EngineRig) -> None:
    waits_pinned(rig)
    rig.now += 10
    result = send_one(rig, Intent.REVISE, progress=0.01)  # 990 seconds remain
    assert result.outcome is Outcome.ACCEPTED
    assert not pinned(rig)
    settle(rig)
    assert on_ssd(rig, keys(rig)) == PAGES


def test_a_revision_with_a_short_remaining_time_keeps_the_pin_and_is_not_observed(
    rig: EngineRig,
) -> None:
    policy = waits_pinned(rig)
    rig.now += 50
    result = send_one(rig, Intent.REVISE, expected_s=20.0)
    assert (result.outcome, result.until_s) == (Outcome.ACCEPTED, 60.0)
    rig.now += 50
    rig.ask("tick", text(1, seed=2), max_tokens=1)
    assert pinned(rig) == 20
    rig.ask("again", CONTEXT, params={"job_id": "j", "is_last_step": True})
    assert (("bash",), 100.0) in policy.seen, "the whole gap, after the tool that was called"
    assert len([path for path, _ in policy.seen if path]) == 1


def test_a_context_is_promoted_when_its_tool_has_ended(rig: EngineRig) -> None:
    rig.policy = ByExpectation()
    first_turn(rig, tool_name="bash", expected_tool_s=1000.0)
    push_out(rig)
    assert in_cpu(rig, keys(rig)) == 0
    assert send_one(rig, Intent.REVISE, done=True).outcome is Outcome.ACCEPTED
    rig.run()
    rig.wait_for_worker()
    rig.run()
    assert in_cpu(rig, keys(rig)) == PAGES


def test_a_gap_is_revised_only_while_it_runs(rig: EngineRig) -> None:
    first_turn(rig)
    assert send_one(rig, Intent.REVISE).outcome is Outcome.REJECTED
    assert send_one(rig, Intent.REVISE, progress=0.0).outcome is Outcome.REJECTED
    rig.add("again", CONTEXT, params={"job_id": "j"})
    assert send_one(rig, Intent.REVISE, done=True).outcome is Outcome.MISSING
    rig.run()


# -- scopes --------------------------------------------------------------------------------


@pytest.mark.parametrize("intent", list(Intent))
def test_a_hint_reveals_nothing_about_other_scopes_and_changes_nothing_there(
    rig: EngineRig, intent: Intent
) -> None:
    """A hint about a job in another scope gets the same result as a hint about a job that does not
    exist, whether it names the job, its tokens or its block hashes."""
    first_turn(rig, salt="mine")
    pages = keys(rig, salt="mine")
    block_hashes = tuple(key[16:] for key in pages)
    suffixes = tuple(key[-8:] for key in pages)
    names = [JOB, Target(number=1), Target(own=True)]
    names += [Target(hashes=block_hashes), Target(hashes=suffixes), Target(tokens=tuple(CONTEXT))]
    nobody = [Target(job="x"), Target(number=9), Target(own=True)]
    nobody += [Target(hashes=(bytes(32),)), Target(hashes=(bytes(8),))]
    nobody += [Target(tokens=tuple(text(320, seed=5)))]
    fields = {"done": True}
    theirs = send(rig, *(hint(intent, one, **fields) for one in names), scope="yours")
    absent = send(rig, *(hint(intent, one, **fields) for one in nobody), scope="yours")
    assert theirs == absent
    assert {one.outcome for one in theirs} <= {Outcome.MISSING, Outcome.REJECTED}
    settle(rig)
    assert in_cpu(rig, pages) == PAGES
    assert in_vram(rig, pages) == 20
    assert not pinned(rig)


def test_an_operator_names_jobs_of_all_scopes_by_number(rig: EngineRig) -> None:
    first_turn(rig, salt="mine")
    first_turn(rig, salt="yours")
    [several, one] = send(
        rig, hint(Intent.RELEASE), hint(Intent.RELEASE, Target(number=2)), scope=None
    )
    assert several.outcome is Outcome.REJECTED
    assert "number" in several.reason
    assert (one.outcome, one.pages) == (Outcome.ACCEPTED, PAGES)
    assert in_cpu(rig, keys(rig, salt="mine")) == PAGES
    [named] = send(rig, hint(Intent.RELEASE), scope=None)
    assert named.outcome is Outcome.ACCEPTED
    settle(rig)
    assert len(rig.index) == 0


def test_pages_are_released_by_prefix_and_by_hash(rig: EngineRig) -> None:
    first_turn(rig)
    pages = keys(rig)
    result = send_one(rig, Intent.RELEASE, Target(hashes=tuple(key[16:] for key in pages[15:])))
    assert (result.outcome, result.pages) == (Outcome.ACCEPTED, PAGES - 15)
    assert in_cpu(rig, pages) == 15
    result = send_one(rig, Intent.RELEASE, Target(tokens=tuple(CONTEXT)))
    assert (result.outcome, result.pages) == (Outcome.ACCEPTED, 15)
    settle(rig)
    assert in_cpu(rig, pages) == in_vram(rig, pages) == 0
    rig.check_clean()


def test_a_long_prefix_is_hashed_on_another_thread(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.connectors.runtime.hint_actions.TOKENS_AT_ONCE", 100)
    rig = make_engine()
    rig.policy = KEPT
    first_turn(rig)
    send_one(rig, Intent.PIN, Target(tokens=tuple(CONTEXT)))
    settle(rig)
    assert counted(rig, Intent.PIN, Outcome.ACCEPTED) == 1
    assert pinned(rig) == 20
    rig.half.release_all()
    rig.check_clean()


# -- reports and limits -------------------------------------------------------------------


def test_the_trace_has_the_hints_of_a_turn_and_its_gap(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    rig = make_engine(extra={"cpu_gib": 0.001, "trace": str(trace)})
    rig.policy = KEPT
    rig.add("t", CONTEXT, params={"job_id": "j"})
    send(rig, hint(Intent.RETAIN, Target(own=True)), request_id="t")
    rig.run()
    send(rig, hint(Intent.PIN), hint(Intent.DEMOTE), hint(Intent.PREFETCH), hint(Intent.REVISE))
    rig.ask("u", CONTEXT, params={"job_id": "j"})
    send(rig, hint(Intent.RELEASE))
    rig.close()
    reader = TraceReader(trace)
    first, second = sorted(reader, key=lambda one: one.turn)
    assert first.hints == (
        "pin accepted",
        "demote rejected",
        "prefetch accepted",
        "revise rejected",
    )
    assert second.hints == ("release accepted",)
    assert second.gap.end is StoryEnd.OVER
    assert not reader.bad


def test_a_reset_drops_everything(rig: EngineRig) -> None:
    first_turn(rig)
    send(rig, hint(Intent.RETAIN), hint(Intent.PIN), hint(Intent.DEMOTE))
    assert rig.half.kv_hints.works
    assert rig.reset_cache()
    assert not rig.half.kv_hints.works
    assert not rig.half.kv_hints.retained
    assert counted(rig, Intent.DEMOTE, Outcome.REJECTED) == 1
    rig.run()
    rig.check_clean()


def test_an_engine_in_observe_mode_moves_no_pages(make_engine: MakeEngine) -> None:
    rig = make_engine(extra={"cpu_gib": 0.001, "mode": "observe"})
    rig.policy = KEPT
    first_turn(rig)
    assert all(send_one(rig, intent).outcome is Outcome.REJECTED for intent in Intent)


def test_work_on_a_long_context_is_divided_into_steps(
    rig: EngineRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.connectors.runtime.hint_actions.PAGES_A_STEP", 4)
    first_turn(rig)
    pages = keys(rig)
    rig.half.kv_hints.advance()
    assert send_one(rig, Intent.RELEASE).outcome is Outcome.DEFERRED
    assert in_cpu(rig, pages) == PAGES - 4
    settle(rig)
    assert in_cpu(rig, pages) == 0
    assert counted(rig, Intent.RELEASE, Outcome.ACCEPTED) == 1
    rig.check_clean()


def test_an_error_is_counted_and_has_a_result(rig: EngineRig) -> None:
    first_turn(rig)
    result = send_one(rig, Intent.RELEASE, Target(job="j", hashes=("no bytes",)))  # type: ignore[arg-type]
    assert result.outcome is Outcome.ACCEPTED, "the job comes first"
    result = send_one(rig, Intent.PIN, Target(hashes=(7,)))  # type: ignore[arg-type]
    assert result.outcome is Outcome.REJECTED
    assert rig.count("hook_errors") == 1
