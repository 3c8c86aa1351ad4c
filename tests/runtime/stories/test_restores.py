"""A context is restored from CPU memory as it was saved, or recomputed."""

from __future__ import annotations

import pytest

from tests.runtime.stories.conftest import MakeEngine
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import WrongKV, expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.rig import EngineRig
from tiered_kv.transfer.base import Direction

BOTH = pytest.mark.parametrize("mode", list(RestoreMode))


def evicted(rig: EngineRig, prompt: list[int]) -> None:
    """Compute a prompt, and evict its KV from VRAM, so that only CPU memory has it."""
    assert rig.ask("first", prompt) == expected(prompt, 4)
    rig.fill()


@BOTH
def test_an_evicted_context_is_restored_from_cpu_memory(
    make_engine: MakeEngine, mode: RestoreMode
) -> None:
    rig = make_engine()
    rig.pages.restores.policy = AlwaysRestore(mode)
    prompt = text(300, seed=1)
    evicted(rig, prompt)

    assert rig.ask("again", prompt) == expected(prompt, 4)

    assert rig.count(f"restores_{mode.value}") == 1
    assert rig.count("prompt_tokens_cpu") == 299  # all but the last token, which must be computed
    rig.check_clean()


def test_the_next_turn_finds_the_partial_tail_of_the_last(make_engine: MakeEngine) -> None:
    rig = make_engine()
    prompt = text(303, seed=2)  # 18 full blocks and 15 tokens; the output adds 3 more with KV
    evicted(rig, prompt)
    turn2 = prompt + expected(prompt, 4) + text(40, seed=3)

    assert rig.ask("turn2", turn2) == expected(turn2, 4)

    assert rig.count("prompt_tokens_cpu") == 303 + 3
    rig.check_clean()


def test_a_fork_finds_the_tokens_it_shares(make_engine: MakeEngine) -> None:
    """The shared tokens come from VRAM while they are cached there, and later from CPU memory."""
    rig = make_engine()
    prompt = text(296, seed=4)  # 18 blocks and 8 tokens
    rig.ask("first", prompt)
    fork = prompt[:200] + text(90, seed=6)
    assert rig.ask("fork", fork) == expected(fork, 4)
    assert rig.count("prompt_tokens_vram") == 192
    rig.fill()
    late = prompt[:293] + text(40, seed=5)

    assert rig.ask("late", late) == expected(late, 4)

    assert rig.count("prompt_tokens_cpu") == 293
    rig.check_clean()


def test_tails_of_another_salt_are_not_found(make_engine: MakeEngine) -> None:
    rig = make_engine()
    prompt = text(9, seed=7)
    turn = {"job_id": "j"}
    assert rig.ask("mine", prompt, salt="me", params=turn) == expected(prompt, 4)
    rig.now += 5
    rig.fill()

    rig.ask("theirs", prompt, salt="you", params=turn)
    assert rig.count("prompt_tokens_cpu") == 0
    rig.ask("mine again", prompt, salt="me", params=turn)
    assert rig.count("prompt_tokens_cpu") == 8


def test_a_page_is_saved_once_however_often_it_is_used(make_engine: MakeEngine) -> None:
    rig = make_engine(blocks=128)
    prompt = text(320, seed=8)
    for i in range(5):
        rig.ask(f"r{i}", prompt, max_tokens=1)
    assert rig.count("pages_saved") == 20
    rig.check_clean()


def test_blocks_filled_while_decoding_are_saved(make_engine: MakeEngine) -> None:
    rig = make_engine()
    prompt = text(20, seed=9)
    rig.ask("long", prompt, max_tokens=100)  # 119 tokens with KV: 7 blocks and a tail
    assert rig.count("pages_saved") == 8
    rig.fill()

    turn2 = prompt + expected(prompt, 100)
    assert rig.ask("again", turn2) == expected(turn2, 4)

    assert rig.count("prompt_tokens_cpu") == 119


def test_a_preempted_request_resumes_from_what_was_saved(make_engine: MakeEngine) -> None:
    """vLLM calls no connector hook for a preemption, so only pages saved earlier can be
    restored."""
    rig = make_engine(blocks=30, max_model_len=400)
    prompts = {f"r{i}": text(120, seed=20 + i) for i in range(3)}
    for name, prompt in prompts.items():
        rig.add(name, prompt, max_tokens=200)
    rig.run()

    for name, prompt in prompts.items():
        assert rig.outputs[name] == expected(prompt, 200)
    assert sum(rig.preemptions(name) for name in prompts) > 0
    assert rig.count("pages_restored") > 0
    rig.check_clean()


@BOTH
def test_a_failed_restore_is_recomputed_and_not_retried(
    make_engine: MakeEngine, mode: RestoreMode
) -> None:
    rig = make_engine()
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


def test_kv_computed_on_a_failed_restore_is_not_saved(make_engine: MakeEngine) -> None:
    """The forward pass after the failed restore attended to garbage, so its KV must never be
    found."""
    rig = make_engine()
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


def test_a_failed_restore_of_an_aborted_request_harms_no_other_request(
    make_engine: MakeEngine,
) -> None:
    rig = make_engine()
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


def test_a_turn_whose_async_restore_failed_is_saved_like_any_other(
    make_engine: MakeEngine,
) -> None:
    rig = make_engine()
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


def test_a_silently_wrong_page_is_detected(make_engine: MakeEngine) -> None:
    """The rig detects a restored page with wrong bytes. If it did not, the other tests could pass
    with wrong KV."""
    rig = make_engine()
    faulty = rig.inject(FaultyTransfer)
    prompt = text(300, seed=13)
    evicted(rig, prompt)

    faulty.corrupt_next_load()
    with pytest.raises(WrongKV):
        rig.ask("again", prompt)


def test_a_page_whose_save_failed_is_missing(make_engine: MakeEngine) -> None:
    rig = make_engine()
    faulty = rig.inject(FaultyTransfer)
    prompt = text(300, seed=14)
    faulty.fail_next(Direction.SAVE, {3})
    evicted(rig, prompt)

    assert rig.ask("again", prompt) == expected(prompt, 4)

    assert rig.count("prompt_tokens_cpu") == 3 * 16
    rig.check_clean()


def test_a_request_aborted_while_it_is_restored_leaves_nothing(make_engine: MakeEngine) -> None:
    rig = make_engine()
    rig.pages.restores.policy = AlwaysRestore(RestoreMode.ASYNC)
    prompt = text(300, seed=15)
    evicted(rig, prompt)

    rig.add("gone", prompt)
    rig.step()
    rig.abort("gone")
    rig.run()

    rig.check_clean()
    assert rig.ask("again", prompt) == expected(prompt, 4)


def test_without_a_cpu_tier_the_connector_only_pins(make_engine: MakeEngine) -> None:
    rig = make_engine(extra={"cpu_gib": 0})
    prompt = text(200, seed=16)
    rig.ask("turn1", prompt, params={"job_id": "j"})

    assert rig.count("pins") == 1
    assert rig.count("pages_saved") == 0
    rig.now += 3
    rig.ask("other", text(8, seed=17))
    rig.check_clean()


@pytest.mark.parametrize("extra", [{"cpu_gib": 0.001}, None])
def test_a_run_that_does_not_end_says_what_is_in_progress(
    make_engine: MakeEngine, extra: dict[str, float] | None
) -> None:
    rig = make_engine(extra=extra)
    rig.add("long", text(100, seed=1), max_tokens=50)
    with pytest.raises(AssertionError, match=r"after 3 steps: requests \['long'\]") as said:
        rig.run(limit=3)
    assert ("running ['long'], orders=" in str(said.value)) == (extra is not None)
    rig.run()
