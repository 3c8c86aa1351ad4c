"""What comes back from CPU memory is what was saved, or is computed again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.messages import Reports
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import WrongKV, expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.transfer.base import Direction

BOTH = pytest.mark.parametrize("mode", list(RestoreMode))


def evicted(rig: Rig, prompt: list[int]) -> None:
    """Leave the prompt's KV in CPU memory alone."""
    assert rig.ask("first", prompt) == expected(prompt, 4)
    rig.fill()


@BOTH
def test_an_evicted_context_comes_back_from_cpu_memory(make_rig: MakeRig, mode: Any) -> None:
    rig = make_rig()
    rig.pages.restores.policy = AlwaysRestore(mode)
    prompt = text(300, seed=1)
    evicted(rig, prompt)

    assert rig.ask("again", prompt) == expected(prompt, 4)

    assert rig.count(f"restores_{mode.value}") == 1
    assert rig.count("prompt_tokens_cpu") == 299  # all but the one that must be computed
    rig.check_clean()


def test_the_next_turn_finds_the_partial_tail_of_the_last(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(303, seed=2)  # 18 full blocks and 15 tokens; the output adds 3 more with KV
    evicted(rig, prompt)
    turn2 = prompt + expected(prompt, 4) + text(40, seed=3)

    assert rig.ask("turn2", turn2) == expected(turn2, 4)

    assert rig.count("prompt_tokens_cpu") == 303 + 3  # where vLLM's own blocks end at 304
    rig.check_clean()


def test_a_tail_is_reused_as_far_as_its_tokens_agree(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(296, seed=4)  # 18 blocks and 8 tokens
    evicted(rig, prompt)
    fork = prompt[:293] + text(40, seed=5)

    assert rig.ask("fork", fork) == expected(fork, 4)

    assert rig.count("prompt_tokens_cpu") == 293


def test_a_prompt_that_ended_in_a_block_its_answer_filled_is_found_whole(
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


def test_a_few_stray_tokens_take_no_slot(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.ask("stray", text(3, seed=6))
    assert len(rig.index) == 0


def test_tails_of_another_salt_are_strangers(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(9, seed=7)
    turn = {"job_id": "j"}
    assert rig.ask("mine", prompt, salt="me", params=turn) == expected(prompt, 4)
    rig.now += 5
    rig.fill()

    rig.ask("theirs", prompt, salt="you", params=turn)
    assert rig.count("prompt_tokens_cpu") == 0
    rig.ask("mine again", prompt, salt="me", params=turn)
    assert rig.count("prompt_tokens_cpu") == 8


def test_a_page_is_saved_once_however_often_it_is_used(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=128)
    prompt = text(320, seed=8)

    for i in range(5):
        rig.ask(f"r{i}", prompt, max_tokens=1)

    assert rig.count("pages_saved") == 20
    rig.check_clean()


def test_blocks_filled_while_decoding_are_saved(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(20, seed=9)
    rig.ask("long", prompt, max_tokens=100)  # 119 tokens with KV: 7 blocks and a tail
    assert rig.count("pages_saved") == 8
    rig.fill()

    turn2 = prompt + expected(prompt, 100)
    assert rig.ask("again", turn2) == expected(turn2, 4)

    assert rig.count("prompt_tokens_cpu") == 119


def test_a_preempted_request_resumes_from_what_was_saved(make_rig: MakeRig) -> None:
    """Preemption tells no connector, so only what was saved eagerly is still there."""
    rig = make_rig(blocks=30, max_model_len=400)
    prompts = {f"r{i}": text(120, seed=20 + i) for i in range(3)}
    requests = [rig.add(name, prompt, max_tokens=200) for name, prompt in prompts.items()]
    rig.run()

    for name, prompt in prompts.items():
        assert rig.outputs[name] == expected(prompt, 200)
    assert sum(request.num_preemptions for request in requests) > 0
    assert rig.count("pages_restored") > 0
    rig.check_clean()


@BOTH
def test_a_failed_restore_is_recomputed_and_not_tried_again(make_rig: MakeRig, mode: Any) -> None:
    rig = make_rig()
    rig.pages.restores.policy = AlwaysRestore(mode)
    faulty = rig.inject(FaultyTransfer)
    prompt = text(300, seed=10)
    evicted(rig, prompt)

    faulty.fail_next(Direction.LOAD, {7})
    assert rig.ask("again", prompt) == expected(prompt, 4)
    assert rig.count("restore_failures") == 1
    rig.fill()

    assert rig.ask("third", prompt) == expected(prompt, 4)
    assert rig.count("restore_failures") == 1
    rig.check_clean()


def test_what_was_computed_on_a_failed_restore_is_not_saved(make_rig: MakeRig) -> None:
    """The forward pass of that step attended to garbage: its KV must never be found."""
    rig = make_rig()
    rig.pages.restores.policy = AlwaysRestore(RestoreMode.SYNC)
    faulty = rig.inject(FaultyTransfer)
    start = text(160, seed=11)
    evicted(rig, start)
    longer = start + text(200, seed=12)

    faulty.fail_next(Direction.LOAD, {0})
    assert rig.ask("longer", longer) == expected(longer, 4)
    assert rig.count("save_failures") > 0
    rig.fill()

    saved = rig.count("prompt_tokens_cpu")
    assert rig.ask("again", longer) == expected(longer, 4)
    assert rig.count("prompt_tokens_cpu") <= saved + 160
    rig.fill()
    assert rig.ask("once more", longer) == expected(longer, 4)
    assert rig.count("prompt_tokens_cpu") > saved + 300
    tail = longer + rig.outputs["once more"]
    rig.fill()
    before = rig.count("prompt_tokens_cpu")
    rig.ask("goes on", [*tail, 1, 2, 3])
    assert rig.count("prompt_tokens_cpu") - before >= len(tail) - 1, "ends are saved as before"
    rig.check_clean()


@pytest.mark.parametrize("length", [300, 296, 40])
def test_a_request_that_goes_away_before_its_restore_is_known_to_have_failed_poisons_nobody(
    make_rig: MakeRig, length: int
) -> None:
    """vLLM carries out aborts between the forward pass and what the workers report of it."""
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


@pytest.mark.parametrize("ahead", [False, True])
def test_a_turn_whose_async_restore_failed_is_saved_like_any_other(
    make_rig: MakeRig, ahead: bool
) -> None:
    """What it computes instead is right: vLLM did not begin before it knew."""
    rig = make_rig(ahead=ahead)
    rig.pages.restores.policy = AlwaysRestore(RestoreMode.ASYNC)
    faulty = rig.inject(FaultyTransfer)
    start = text(160, seed=46)
    evicted(rig, start)
    longer = start + text(200, seed=47)

    faulty.fail_next(Direction.LOAD, {3})
    assert rig.ask("longer", longer) == expected(longer, 4)
    assert rig.count("restore_failures") == 1
    rig.fill()

    before = rig.count("prompt_tokens_cpu")
    assert rig.ask("again", longer) == expected(longer, 4)
    assert rig.count("prompt_tokens_cpu") - before == len(longer) - 1
    rig.check_clean()


def test_a_silently_wrong_page_is_noticed_by_this_rig(make_rig: MakeRig) -> None:
    """Without this, the other tests would prove nothing."""
    rig = make_rig()
    faulty = rig.inject(FaultyTransfer)
    prompt = text(300, seed=13)
    evicted(rig, prompt)

    faulty.corrupt_next_load()
    with pytest.raises(WrongKV):
        rig.ask("again", prompt)


def test_a_failed_save_is_not_there(make_rig: MakeRig) -> None:
    rig = make_rig()
    faulty = rig.inject(FaultyTransfer)
    prompt = text(300, seed=14)
    faulty.fail_next(Direction.SAVE, {3})
    evicted(rig, prompt)

    assert rig.ask("again", prompt) == expected(prompt, 4)

    assert rig.count("prompt_tokens_cpu") == 3 * 16
    rig.check_clean()


def test_a_request_aborted_while_it_is_restored_leaves_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.pages.restores.policy = AlwaysRestore(RestoreMode.ASYNC)
    prompt = text(300, seed=15)
    evicted(rig, prompt)

    rig.add("gone", prompt)
    rig.step()
    rig.abort("gone")
    rig.run()

    rig.check_clean()
    assert rig.ask("again", prompt) == expected(prompt, 4)


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


def test_without_a_cpu_tier_the_connector_only_pins(make_rig: MakeRig) -> None:
    rig = make_rig(extra={"cpu_gib": 0})
    prompt = text(200, seed=16)
    rig.ask("turn1", prompt, params={"job_id": "j"})

    assert rig.count("pins") == 1
    assert rig.count("pages_saved") == 0
    rig.now += 3
    rig.ask("other", text(8, seed=17))
    rig.check_clean()


def test_a_failed_restore_poisons_nobody_when_its_request_goes_away(make_rig: MakeRig) -> None:
    """vLLM hashes the blocks of a sync restore before it is made, and counts on the request
    to compute them anew when it fails. Aborted in between, garbage would stay findable."""
    rig = make_rig()
    rig.pages.restores.policy = AlwaysRestore(RestoreMode.SYNC)
    faulty = rig.inject(FaultyTransfer)
    prompt = text(300, seed=40)
    evicted(rig, prompt)

    faulty.fail_next(Direction.LOAD, {3})
    rig.add("gone", prompt)
    rig.step()
    rig.abort("gone")
    assert faulty.struck == 1

    assert rig.ask("next", prompt) == expected(prompt, 4)
    rig.check_clean()


def test_a_failure_heard_of_before_costs_no_save_again(make_rig: MakeRig) -> None:
    """Workers tell of all failures so far in every report; only a new one makes saves doubtful."""
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


def test_many_that_return_at_once_begin_their_restores_over_a_few_steps(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a prompt that restores nothing does not wait for them."""
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
