"""A context is restored from CPU memory as it was saved, or recomputed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.messages import Reports
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.transfer.base import Direction

BOTH = pytest.mark.parametrize("mode", list(RestoreMode))


def evicted(rig: Rig, prompt: list[int]) -> None:
    """Compute a prompt, and evict its KV from VRAM, so that only CPU memory has it."""
    assert rig.ask("first", prompt) == expected(prompt, 4)
    rig.fill()


def test_a_prompt_whose_last_block_its_answer_filled_is_found_completely(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    prompt = text(301, seed=41)
    rig.ask("first", prompt, max_tokens=30)  # the block of tokens 288 to 303 is full now
    rig.fill()

    assert rig.ask("again", prompt) == expected(prompt, 4)
    assert rig.count("prompt_tokens_cpu") == 300


def test_a_job_keeps_even_a_tail_without_a_full_block(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(9, seed=6)
    rig.ask("first", prompt, params={"job_id": "j"})
    rig.now += 5
    rig.fill()

    assert rig.ask("again", prompt) == expected(prompt, 4)

    assert rig.count("prompt_tokens_cpu") == 8


def test_a_few_tokens_without_a_job_take_no_slot(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.ask("stray", text(3, seed=6))
    assert len(rig.index) == 0


@pytest.mark.parametrize("length", [300, 296, 40])
def test_a_request_aborted_before_its_restore_failure_is_known_harms_no_other(
    make_rig: MakeRig, length: int
) -> None:
    """vLLM may abort a request after the forward pass in which its restore failed, but before it
    handles the workers' reports. Later requests with the same prompt are answered correctly."""
    rig = make_rig()
    rig.pages.restores.policy = AlwaysRestore(RestoreMode.SYNC)
    faulty = rig.inject(FaultyTransfer)
    prompt = text(300, seed=43)
    evicted(rig, prompt)

    faulty.fail_next(Direction.LOAD, {0})
    rig.add("gone", prompt[:length] + text(60, seed=44), params={"job_id": "j"}, max_tokens=20)
    answered = rig.scheduler.update_from_output

    def aborted_before(*args: Any) -> Any:
        rig.abort("gone")
        rig.scheduler.update_from_output = answered
        return answered(*args)

    rig.scheduler.update_from_output = aborted_before
    rig.step()
    assert faulty.struck == 1
    whole = rig.prompts["gone"] + text(30, seed=45)
    assert rig.ask("next", whole) == expected(whole, 4)
    rig.fill()
    assert rig.ask("later", whole) == expected(whole, 4)
    rig.now += 60
    rig.ask("tick", text(8, seed=9))
    rig.check_clean()


@BOTH
def test_restores_that_cannot_be_ordered_do_not_take_each_other_s_place(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, mode: RestoreMode
) -> None:
    rig = make_rig()
    rig.pages.restores.policy = AlwaysRestore(mode)
    prompts = {name: text(300, seed=ord(name)) for name in "ab"}
    for name, prompt in prompts.items():
        rig.ask(f"first-{name}", prompt)
    rig.fill()

    def broken(*_: Any) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(rig.pages.restores, "order", broken)
        for name, prompt in prompts.items():
            rig.add(name, prompt)
        rig.run()
    for name, prompt in prompts.items():
        assert rig.outputs[name] == expected(prompt, 4)
        assert rig.ask(f"again-{name}", prompt) == expected(prompt, 4)
    assert rig.count("hook_errors") == 2


def test_a_full_cpu_tier_evicts_the_oldest_context_from_its_end(make_rig: MakeRig) -> None:
    page = 16 * 8
    rig = make_rig(blocks=35, max_model_len=272, extra={"cpu_gib": 40 * page / 2**30})
    old, middle, new = (text(256, seed=30 + i) for i in range(3))  # 17 pages each
    for name, prompt in {"old": old, "middle": middle, "new": new}.items():
        rig.ask(name, prompt)

    assert rig.count("pages_evicted") == 3 * 17 - 40
    assert rig.ask("again", old) == expected(old, 4)
    found = rig.count("prompt_tokens_cpu") + rig.count("prompt_tokens_vram")
    assert found == (17 - 11) * 16
    assert rig.count("prompt_tokens_cpu") > 0
    rig.check_clean()


def test_a_failure_reported_before_drops_no_further_save(make_rig: MakeRig) -> None:
    """Every report of a worker contains the number of its failures so far. Only a new failure makes
    saves doubtful, so only then are unsent saves dropped."""
    rig = make_rig()
    rig.add("t1", text(200, seed=46))
    while "t1" not in rig.finished:
        rig.step()
    for failures in ({}, {0: 1}, {0: 1}):
        unsent = list(rig.pages.saves.unsent)
        new = failures.get(0, 0) > rig.pages.dispatch.seen_failures.get(0, 0)
        reports = Reports({}, failures, {})
        rig.half.on_reports(reports)
        assert rig.pages.saves.unsent == ([] if new else unsent)
        if new:
            rig.add("t2", text(200, seed=47))
            while "t2" not in rig.finished:
                rig.step()
            assert rig.pages.saves.unsent
    rig.run()
    rig.check_clean()


def test_many_concurrent_returns_start_their_restores_over_a_few_steps(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six contexts return in the same step. Two of their restores start in each step, and a prompt
    that restores nothing does not wait for them."""
    monkeypatch.setattr("tiered_kv.connectors.runtime.pages.restores.PAGES_A_STEP", 8)
    rig = make_rig(blocks=200, extra={"cpu_gib": 0.001})
    prompts = {f"r{i}": text(80, seed=i) for i in range(6)}
    for name, prompt in prompts.items():
        rig.ask(name, prompt)
    rig.half.release_all()
    rig.pool.evict_blocks(set(range(200)))
    rig.step()
    for name, prompt in prompts.items():
        rig.add(f"{name}again", prompt + text(10, seed=99))
    rig.add("cold", text(30, seed=50))
    began = []
    for _ in range(3):
        ordered = rig.count("restores_async") + rig.count("restores_sync")
        began.append((ordered, "cold" in rig.step().num_scheduled_tokens))
    assert began[0] == (0, True)
    assert [restores for restores, _ in began] == [0, 2, 4], "of five pages each"
    rig.run()
    assert rig.count("pages_restored") == 30
    for name in prompts:
        again = f"{name}again"
        assert rig.outputs[again] == expected(rig.prompts[again], 4)
    rig.half.release_all()
    rig.check_clean()
