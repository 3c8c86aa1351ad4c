"""Pins hold a job's KV in VRAM between turns, and never block other requests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime.turn import Hit
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.base import JobKey
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.policies.pins.release_order import PinState, PinValue
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.vllm.rig import Rig

VRAM_ONLY = {"cpu_gib": 0}


def turn(job: str, last: bool = False) -> dict[str, Any]:
    return {"job_id": job, "is_last_step": last}


def used_blocks(rig: Rig) -> int:
    return int(rig.free_at_start - rig.pool.get_num_free_blocks())


def test_a_context_of_most_of_the_pool_is_pinned_whole(make_rig: MakeRig) -> None:
    """On a small GPU, one job's context may fill most of VRAM, and is the most expensive one to
    recompute. It is pinned as a whole, and other requests do not evict it."""
    rig = make_rig(blocks=64, max_model_len=1008, extra=VRAM_ONLY)
    context = text(800, seed=1)
    rig.ask("long", context, params=turn("job"))
    assert rig.pins.held_blocks == 50
    for number in range(4):  # without a pin these would evict the context
        rig.ask(f"rival{number}", text(180, seed=10 + number))
    rig.ask("back", context)
    assert rig.count("prompt_tokens_vram") == 784, "the last token is computed in any case"


def test_a_job_that_returns_with_another_text_does_not_wait_for_its_own_pin(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(blocks=64, max_model_len=1008, extra=VRAM_ONLY, in_job_order=True)
    rig.ask("long", text(600, seed=1), params=turn("job"))
    rig.add("busy", text(60, seed=2), max_tokens=100)
    rig.step()
    rig.add("compacted", text(500, seed=3), params=turn("job"))
    rig.step()
    assert [r.request_id for r in rig.scheduler.running] == ["busy", "compacted"]
    rig.run()
    assert rig.outputs["compacted"] == expected(text(500, seed=3), 4)


def test_a_turn_whose_pin_holds_copies_is_admitted_after_vllm_refused_it(
    make_rig: MakeRig,
) -> None:
    """Two requests that generate the same text at the same time have blocks of their own for it.
    vLLM finds the first request's blocks, which are free, also for the next turn of the second
    request's job, whose pin holds copies of them. So the turn takes more free blocks than it would
    if its pin held the blocks that vLLM finds."""
    rig = make_rig(blocks=64, max_model_len=1008, extra=VRAM_ONLY)
    prompt = text(208, seed=1)
    rig.add("other", prompt, max_tokens=150)
    rig.add("first", prompt, max_tokens=180, params=turn("job"))
    rig.run()
    rig.ask("rival", text(26 * 16, seed=2), params=turn("rival"))
    assert rig.free_blocks < 16, "7 new blocks are needed, and 9 that are free and cached"

    longer = prompt + rig.outputs["first"] + text(100, seed=3)
    rig.add("back", longer, params=turn("job"))
    rig.step()
    assert rig.running() == []
    rig.step()
    assert rig.running() == ["back"]
    rig.run()
    assert rig.count("pins_ended_pressure") == 1
    assert rig.outputs["back"] == expected(longer, 4)


def test_no_request_waits_for_a_pin_while_only_a_preempted_turn_runs(make_rig: MakeRig) -> None:
    """A preempted turn has no blocks to free, and vLLM may not reach it before the waiting request.
    A pin is therefore released for the waiting request."""
    rig = make_rig(blocks=64, max_model_len=1008, extra=VRAM_ONLY, in_job_order=True)
    rig.ask("old", text(800, seed=1), params=turn("job"))
    rig.turns.running += 1  # simulates a preempted turn
    rig.add("young", text(500, seed=2))
    rig.step()
    assert [r.request_id for r in rig.scheduler.running] == ["young"]
    rig.turns.running -= 1
    rig.run()


@pytest.mark.parametrize("in_job_order", [False, True])
def test_pins_over_the_whole_pool_are_released_for_a_new_request(
    make_rig: MakeRig, in_job_order: bool
) -> None:
    rig = make_rig(blocks=64, max_model_len=512, extra=VRAM_ONLY, in_job_order=in_job_order)
    for i in range(6):
        rig.ask(f"r{i}", text(150, seed=i), params=turn(f"job{i}"))
    assert rig.pins.held_blocks > 50

    longest = text(500, seed=99)
    rig.add("longest", longest)
    rig.step()
    assert [r.request_id for r in rig.scheduler.running] == ["longest"]
    rig.run()
    assert rig.outputs["longest"] == expected(longest, 4)
    assert rig.pins.held_blocks < 50, "youngest went, the oldest may stay"


@pytest.mark.parametrize("mode", RestoreMode)
def test_a_request_that_lacks_no_blocks_takes_none_from_pins(
    make_rig: MakeRig, mode: RestoreMode
) -> None:
    """vLLM may leave a request waiting for reasons other than a lack of blocks. Pins are released
    only for an async restore, which may lack blocks, because it must leave enough free blocks for
    the prefills in progress."""
    rig = make_rig(extra=VRAM_ONLY)
    rig.ask("r1", text(150, seed=1), params=turn("job"))
    rig.add("waits", text(100, seed=2))
    waiting = rig.turn("waits")
    waiting.restore.hit = Hit((), 96, mode)
    for step in (7, 8, 9):
        rig.admission.pressure.for_waiting(waiting, 0, step)
    assert len(rig.pins) == (mode is RestoreMode.SYNC)
    rig.run()


def test_a_restored_request_gets_its_blocks_from_pins(make_rig: MakeRig) -> None:
    """After an async restore, vLLM calls no hook before it allocates further blocks for the
    request. Pins that hold these blocks are still released."""
    rig = make_rig(blocks=64, max_model_len=512)
    rig.pages.restores.policy = AlwaysRestore(RestoreMode.ASYNC)
    prompt = text(300, seed=1)
    rig.ask("first", prompt)
    rig.fill()
    back = prompt + text(180, seed=2)
    rig.add("back", back)
    rig.step()  # 19 blocks are allocated and being restored
    pool = rig.pool
    grabbed = pool.get_new_blocks(pool.get_num_free_blocks())
    # Simulates pins that were made while the restore was in progress.
    rig.pins.budget = len(grabbed)
    value = PinValue(PinState.HELD, 0.0, 1.0)
    assert rig.pins.pin(JobKey("", "late"), grabbed, rig.now + 60, rig.now, value) == len(grabbed)
    pool.free_blocks(grabbed)
    rig.run()

    assert rig.outputs["back"] == expected(back, 4)
    assert len(rig.pins) == 0
    rig.check_clean()


def test_jobs_of_other_salts_do_not_share_a_pin(make_rig: MakeRig) -> None:
    rig = make_rig(extra=VRAM_ONLY)
    rig.ask("a", text(100, seed=1), params=turn("job"), salt="alice")
    rig.ask("b", text(100, seed=1), params=turn("job"), salt="bob")
    assert len(rig.pins) == 2

    rig.ask("a2", text(8, seed=3), params=turn("job", last=True), salt="alice")
    assert len(rig.pins) == 1


def test_two_concurrent_turns_of_a_job_are_counted_and_balance(make_rig: MakeRig) -> None:
    rig = make_rig(extra=VRAM_ONLY)
    rig.add("left", text(100, seed=1), params=turn("job"))
    rig.add("right", text(80, seed=2), params=turn("job"), max_tokens=20)
    rig.run()

    assert rig.count("concurrent_turns") == 1
    assert len(rig.pins) == 1
    rig.ask("last", text(8, seed=3), params=turn("job", last=True))
    rig.check_clean()


def test_a_turn_without_a_job_is_not_pinned(make_rig: MakeRig) -> None:
    rig = make_rig(extra=VRAM_ONLY)
    rig.ask("t1", text(100, seed=1))
    assert rig.count("pins") == 0
    rig.check_clean()
