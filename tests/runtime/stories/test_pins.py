"""Pins hold a job's blocks while its tool runs, and are released in time."""

from __future__ import annotations

from typing import Any

from tests.runtime.stories.conftest import MakeEngine
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.rig import EngineRig

VRAM_ONLY = {"cpu_gib": 0}


def turn(job: str, last: bool = False) -> dict[str, Any]:
    return {"job_id": job, "is_last_step": last}


def used_blocks(rig: EngineRig) -> int:
    return rig.free_at_start - rig.free_blocks


def test_a_five_turn_job_holds_its_blocks_and_releases_them_at_the_end(
    make_engine: MakeEngine,
) -> None:
    rig = make_engine(extra=VRAM_ONLY)
    context = text(60, seed=1)
    held = [0]
    for i in range(1, 6):
        context += rig.ask(f"t{i}", context, params=turn("job", last=i == 5)) + text(30, seed=i)
        after = used_blocks(rig)
        rig.now += 1.0
        # Run a step, so that the hooks run during the gap.
        rig.ask(f"tick{i}", text(1, seed=100 + i), max_tokens=1)
        assert used_blocks(rig) == after, "a pin holds still through its gap"
        held.append(after)
    assert held[:5] == sorted(set(held[:5])), "each turn holds more than the one before"
    assert held[5] == 0
    assert rig.count("pins_ended_returned") == 4
    rig.check_clean()


def test_a_pin_ends_at_its_deadline(make_engine: MakeEngine) -> None:
    rig = make_engine(extra=VRAM_ONLY)
    rig.ask("t1", text(100, seed=1), params=turn("job"))
    assert used_blocks(rig) > 0

    rig.now += 2.1
    rig.ask("tick", text(1, seed=2), max_tokens=1)

    assert rig.count("pins_ended_expired") == 1
    rig.check_clean()


def test_a_pinned_context_survives_rivals_that_evict_an_unpinned_one(
    make_engine: MakeEngine,
) -> None:
    rig = make_engine(blocks=64, max_model_len=256, extra=VRAM_ONLY)
    pinned, unpinned = text(200, seed=1), text(200, seed=2)
    rig.ask("pinned", pinned, params=turn("job"))
    rig.ask("unpinned", unpinned)
    for i in range(8):
        rig.ask(f"rival{i}", text(200, seed=10 + i))

    before = rig.count("prompt_tokens_vram")
    rig.ask("back", pinned)
    assert rig.count("prompt_tokens_vram") - before == 192
    before = rig.count("prompt_tokens_vram")
    rig.ask("gone", unpinned)
    assert rig.count("prompt_tokens_vram") == before


def test_pins_over_the_whole_pool_are_released_for_a_new_request(make_engine: MakeEngine) -> None:
    rig = make_engine(blocks=64, max_model_len=512, extra=VRAM_ONLY)
    for i in range(6):
        rig.ask(f"r{i}", text(150, seed=i), params=turn(f"job{i}"))
    assert rig.pins.held_blocks > 50

    longest = text(500, seed=99)
    rig.add("longest", longest)
    rig.step()
    assert rig.running() == ["longest"]
    rig.run()
    assert rig.outputs["longest"] == expected(longest, 4)
    assert rig.pins.held_blocks < 50, "youngest went, the oldest may stay"


def test_a_running_request_releases_pins_before_it_preempts(make_engine: MakeEngine) -> None:
    rig = make_engine(blocks=41, max_model_len=512, extra=VRAM_ONLY)
    for i in range(3):
        rig.ask(f"r{i}", text(150, seed=i), params=turn(f"job{i}"))  # 9 full blocks each
    assert rig.free_blocks < 23, "it cannot grow in what is free"
    rig.add("grows", text(60, seed=50), max_tokens=300)
    rig.step()
    rig.add("late", text(100, seed=51), max_tokens=100)
    rig.run()

    assert rig.outputs["grows"] == expected(text(60, seed=50), 300)
    assert rig.outputs["late"] == expected(text(100, seed=51), 100)
    assert rig.count("pins_ended_pressure") > 0
    assert rig.preemptions("grows") == 0


def test_no_more_pins_are_released_than_a_running_request_needs(make_engine: MakeEngine) -> None:
    rig = make_engine(blocks=41, max_model_len=512, extra=VRAM_ONLY)
    for i in range(3):
        rig.ask(f"r{i}", text(150, seed=i), params=turn(f"job{i}"))
    assert rig.ask("grows", text(60, seed=50), max_tokens=300)
    assert rig.count("pins_ended_pressure") > 0
    assert len(rig.pins) > 0


def test_an_aborted_turn_is_not_pinned(make_engine: MakeEngine) -> None:
    rig = make_engine(extra=VRAM_ONLY)
    rig.add("t1", text(100, seed=1), params=turn("job"), max_tokens=50)
    rig.step()
    rig.step()
    rig.abort("t1")
    rig.run()

    assert rig.count("pins") == 0
    rig.check_clean()
