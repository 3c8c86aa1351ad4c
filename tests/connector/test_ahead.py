"""Asynchronous scheduling, as vLLM does on GPUs: steps are scheduled before the one before them
is over."""

from __future__ import annotations

from typing import Any

import pytest

from tests.connector.conftest import MakeRig
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.restore import AlwaysRestore
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.vllm_rig import Rig, expected, text
from tiered_kv.transfer.base import Direction


def test_a_turn_comes_back_from_cpu_memory_and_says_the_same(make_rig: MakeRig) -> None:
    rig = make_rig(ahead=True)
    prompt = text(300, seed=1)
    said = rig.ask("first", prompt, max_tokens=40)
    assert said == expected(prompt, 40)
    rig.fill()

    longer = prompt + said + text(50, seed=2)
    assert rig.ask("second", longer, max_tokens=40) == expected(longer, 40)
    assert rig.count("prompt_tokens_cpu") == 339, "all but the token that was sampled last"
    rig.check_clean()


def test_every_restore_is_async_as_vllm_cannot_go_back_on_a_sync_one(make_rig: MakeRig) -> None:
    rig = make_rig(ahead=True)
    rig.half.restores.policy = AlwaysRestore(RestoreMode.SYNC)
    faulty = rig.inject(FaultyTransfer)
    prompt = text(300, seed=1)
    rig.ask("first", prompt)
    rig.fill()

    faulty.fail_next(Direction.LOAD, {1})
    assert rig.ask("again", prompt, max_tokens=20) == expected(prompt, 20)
    assert rig.count("restore_failures") == 1
    assert (rig.count("restores_async"), rig.count("restores_sync")) == (1, 0)
    rig.check_clean()


def test_a_turn_that_stops_while_its_next_token_is_computed_keeps_no_more_than_it_said(
    make_rig: MakeRig,
) -> None:
    """The step that was scheduled ahead writes the KV of one token more."""
    rig = make_rig(ahead=True)
    prompt = text(90, seed=3)
    whole = expected(prompt, 30)
    said = rig.ask("stops", prompt, max_tokens=30, stop_ids=[whole[11]])
    assert said == whole[: whole.index(whole[11]) + 1]
    rig.fill()

    other = [*prompt, *said, *text(40, seed=4)]
    assert rig.ask("goes on", other) == expected(other, 4)
    rig.check_clean()


@pytest.mark.parametrize("in_job_order", [False, True])
def test_blocks_that_are_free_a_step_later_cost_no_pin(
    make_rig: MakeRig, in_job_order: bool
) -> None:
    """vLLM gives a turn's blocks back once the step that was scheduled ahead of its end is over;
    who waits for them waits that step."""
    rig = make_rig(
        blocks=41,
        max_model_len=512,
        ahead=True,
        in_job_order=in_job_order,
        extra={"cpu_gib": 0, "pin_fraction": 1},
    )
    rig.half.pins._budget = rig.half.pins.job_share = 10_000
    pinned = text(150, seed=1)
    rig.ask("pinned", pinned, params={"job_id": "away"})
    assert len(rig.half.pins) == 1
    stops = expected(text(250, seed=2), 6)[-1]
    rig.add("stops", text(250, seed=2), max_tokens=100, stop_ids=[stops])
    waits(rig)
    rig.run()

    assert rig.outputs["waits"] == expected(text(260, seed=3), 4)
    assert rig.count("pins_released") == 0
    rig.now += 100
    rig.half.let_go()
    rig.check_clean()


def waits(rig: Rig) -> Any:
    """A request arrives in the step in which another stops."""
    while "stops" not in rig.finished:
        rig.step()
    return rig.add("waits", text(260, seed=3), params={"job_id": "new"})
