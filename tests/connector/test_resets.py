"""Resetting vLLM's cache works whatever we hold, and nothing of before is found after."""

from __future__ import annotations

import pytest

from tests.connector.conftest import MakeRig
from tiered_kv.testing.vllm_rig import expected, text


def test_a_reset_succeeds_while_pins_and_saves_are_pending(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(200, seed=1)
    rig.add("t1", prompt, params={"job_id": "j"})
    while "t1" not in rig.finished:
        rig.step()
    assert len(rig.half.pins) == 1
    assert rig.half.saves.unsent, "the tail's save waits for the next step"

    assert rig.scheduler.reset_prefix_cache()

    assert rig.ask("t2", prompt) == expected(prompt, 4)
    assert rig.count("prompt_tokens_vram") == rig.count("prompt_tokens_cpu") == 0
    rig.check_clean()


def test_saves_under_way_during_a_reset_are_never_found(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(200, seed=2)
    rig.add("t1", prompt)
    rig.step()  # saves of the first blocks are sent
    rig.abort("t1")
    assert rig.half.planner.in_flight > 0 or rig.half.saves.unsent

    assert rig.scheduler.reset_prefix_cache()
    rig.run()

    assert len(rig.half.index) == 0
    rig.ask("t2", prompt)
    assert rig.count("prompt_tokens_cpu") == 0
    rig.check_clean()


def test_a_running_request_is_not_saved_once_its_kv_was_reset(make_rig: MakeRig) -> None:
    """Its blocks were made by the weights of before; vLLM lets it run on with them."""
    rig = make_rig()
    prompt = text(100, seed=3)
    rig.add("old", prompt, max_tokens=60)
    for _ in range(5):
        rig.step()

    assert not rig.scheduler.reset_prefix_cache(), "vLLM refuses while a request runs"
    rig.run()

    assert rig.count("resets") == 1
    assert len(rig.half.index) == 0, "nothing of it is kept in the new generation"
    rig.check_clean()


def test_what_vllm_does_not_reset_is_not_found_by_those_who_come(make_rig: MakeRig) -> None:
    """They would save it for those who come after them, under the keys of the new weights."""
    rig = make_rig()
    prompt = text(100, seed=3)
    rig.add("old", prompt, max_tokens=60)
    for _ in range(5):
        rig.step()
    assert not rig.scheduler.reset_prefix_cache()
    rig.add("new", prompt)
    rig.run()
    assert rig.outputs["new"] == expected(prompt, 4)
    assert rig.count("prompt_tokens_vram") == 0
    rig.check_clean()


def test_a_reset_that_preempts_lets_the_request_be_saved_again(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(100, seed=4)
    rig.add("old", prompt, max_tokens=60)
    for _ in range(5):
        rig.step()

    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.run()

    assert rig.outputs["old"] == expected(prompt, 60)
    assert len(rig.half.index) > 0
    rig.check_clean()


def test_resetting_the_connector_alone_forgets_its_pages(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = text(200, seed=5)
    rig.ask("t1", prompt)
    assert len(rig.half.index) > 0

    assert rig.scheduler.reset_connector_cache()

    assert len(rig.half.index) == 0
    rig.check_clean()


@pytest.mark.parametrize("times", [1, 3])
def test_generations_do_not_mix(make_rig: MakeRig, times: int) -> None:
    rig = make_rig()
    prompt = text(200, seed=6)
    for i in range(times):
        rig.ask(f"before{i}", prompt)
        rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.ask("after", prompt)
    assert rig.count("prompt_tokens_recomputed") == 200 * (times + 1)
    rig.fill()
    assert rig.ask("again", prompt) == expected(prompt, 4)
    assert rig.count("prompt_tokens_cpu") == 199
    rig.check_clean()
