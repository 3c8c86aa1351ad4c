"""A reset works whatever is pinned or pending, and no earlier KV is found afterwards."""

from __future__ import annotations

from tests.runtime.stories.conftest import MakeEngine
from tiered_kv.testing.checked_kv import expected, text


def test_a_reset_succeeds_while_pins_and_saves_are_pending(make_engine: MakeEngine) -> None:
    rig = make_engine()
    prompt = text(200, seed=1)
    rig.add("t1", prompt, params={"job_id": "j"})
    while "t1" not in rig.finished:
        rig.step()
    assert len(rig.pins) == 1
    assert rig.pages.saves.unsent, "the tail's save waits for the next step"

    assert rig.reset_cache()

    assert rig.ask("t2", prompt) == expected(prompt, 4)
    assert rig.count("prompt_tokens_vram") == rig.count("prompt_tokens_cpu") == 0
    rig.check_clean()


def test_saves_in_flight_during_a_reset_are_never_found(make_engine: MakeEngine) -> None:
    rig = make_engine()
    prompt = text(200, seed=2)
    rig.add("t1", prompt)
    rig.step()  # saves of the first blocks are sent
    rig.abort("t1")
    assert rig.pages.book.in_flight > 0 or rig.pages.saves.unsent

    assert rig.reset_cache()
    rig.run()

    assert len(rig.index) == 0
    rig.ask("t2", prompt)
    assert rig.count("prompt_tokens_cpu") == 0
    rig.check_clean()


def test_a_reset_that_preempts_lets_the_request_be_saved_again(make_engine: MakeEngine) -> None:
    rig = make_engine()
    prompt = text(100, seed=4)
    rig.add("old", prompt, max_tokens=60)
    for _ in range(5):
        rig.step()

    assert rig.reset_cache()
    rig.run()

    assert rig.outputs["old"] == expected(prompt, 60)
    assert len(rig.index) > 0
    rig.check_clean()


def test_generations_do_not_mix(make_engine: MakeEngine) -> None:
    rig = make_engine()
    prompt = text(200, seed=6)
    for i in range(3):
        rig.ask(f"before{i}", prompt)
        rig.reset_cache()
    rig.ask("after", prompt)
    assert rig.count("prompt_tokens_recomputed") == 200 * 4
    rig.fill()
    assert rig.ask("again", prompt) == expected(prompt, 4)
    assert rig.count("prompt_tokens_cpu") == 199
    rig.check_clean()
