"""Async scheduling, as on GPUs: a step is scheduled before the previous one has finished."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime.turn import PressureState
from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import AlwaysRestore
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.policies import FixedPin
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.transfer.base import Direction


def test_a_turn_restored_from_cpu_memory_gives_the_same_answer(make_rig: MakeRig) -> None:
    rig = make_rig(ahead=True)
    prompt = text(300, seed=1)
    said = rig.ask("first", prompt, max_tokens=40)
    assert said == expected(prompt, 40)
    rig.fill()

    longer = prompt + said + text(50, seed=2)
    assert rig.ask("second", longer, max_tokens=40) == expected(longer, 40)
    assert rig.count("prompt_tokens_cpu") == 339, "all but the token that was sampled last"
    rig.check_clean()


def test_every_restore_is_async_because_vllm_cannot_undo_a_sync_one(make_rig: MakeRig) -> None:
    rig = make_rig(ahead=True)
    rig.pages.restores.policy = AlwaysRestore(RestoreMode.SYNC)
    faulty = rig.inject(FaultyTransfer)
    prompt = text(300, seed=1)
    rig.ask("first", prompt)
    rig.fill()

    faulty.fail_next(Direction.LOAD, {1})
    assert rig.ask("again", prompt, max_tokens=20) == expected(prompt, 20)
    assert rig.count("restore_failures") == 1
    assert (rig.count("restores_async"), rig.count("restores_sync")) == (1, 0)
    rig.check_clean()


def test_a_turn_that_stops_while_its_next_token_is_computed_keeps_only_its_answer(
    make_rig: MakeRig,
) -> None:
    """A step that was scheduled in advance writes the KV of one more token. The next turn finds
    only the prompt and the answer, without the answer's last token."""
    rig = make_rig(ahead=True)
    prompt = text(90, seed=3)
    whole = expected(prompt, 30)
    said = rig.ask("stops", prompt, max_tokens=30, stop_ids=[whole[11]])
    assert said == whole[: whole.index(whole[11]) + 1]
    rig.fill()

    other = [*prompt, *said, *text(40, seed=4)]
    assert rig.ask("goes on", other) == expected(other, 4)
    assert rig.count("prompt_tokens_cpu") == len(prompt) + len(said) - 1
    rig.check_clean()


@pytest.mark.parametrize("in_job_order", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_no_pin_is_released_for_blocks_that_are_free_a_step_later(
    make_rig: MakeRig, in_job_order: bool, saved: bool
) -> None:
    """vLLM frees a turn's blocks once the step that was scheduled before its end has finished. A
    request that needs these blocks waits for that step, and no pin is released for it."""
    prompt = text(260, seed=3)
    rig = tight(make_rig, in_job_order, saved=prompt if saved else ())
    before = rig.count("pins_ended_pressure")
    one_that_stops(rig)
    run_until_it_stops(rig)
    rig.add("waits", prompt, params={"job_id": "new"})
    rig.run()

    assert rig.outputs["waits"] == expected(prompt, 4)
    assert rig.count("restores_async") == saved
    assert rig.count("pins_ended_pressure") == before
    rig.half.release_all()
    rig.check_clean()


def test_a_running_request_waits_a_step_before_a_pin_is_released(
    make_rig: MakeRig,
) -> None:
    rig = tight(make_rig, in_job_order=False)
    one_that_stops(rig)
    run_until_it_stops(rig)
    assert rig.half.release_for_running(), "vLLM need not preempt"
    assert rig.count("pins_ended_pressure") == 0
    rig.step()
    assert rig.half.release_for_running()
    assert rig.count("pins_ended_pressure") == 1, "now they are there, and were not enough"
    rig.run()


def test_a_restored_request_waits_a_step_before_a_pin_is_released(
    make_rig: MakeRig,
) -> None:
    """Blocks that vLLM frees a step late count as free during that step. A pin is released only if
    the request still lacks blocks in the following step."""
    rig = tight(make_rig, in_job_order=False)
    room = rig.admission.pressure
    request = SimpleNamespace(num_tokens=300, num_computed_tokens=0)
    pressure = PressureState()
    turn: Any = SimpleNamespace(request=request, request_id="restored", pressure=pressure)
    short = 19 - rig.pool.get_num_free_blocks()
    taken = rig.pool.get_new_blocks(rig.pool.get_num_free_blocks() - 10)
    room.freed_late(short + 30, step=7)
    room.for_restored([turn], 7, idle=False)
    assert rig.count("pins_ended_pressure") == 0
    room.for_restored([turn], 8, idle=False)
    assert rig.count("pins_ended_pressure") == 1
    rig.pool.free_blocks(taken)


def tight(make_rig: MakeRig, in_job_order: bool, saved: Sequence[int] = ()) -> Rig:
    """Create a rig on which a job between turns has pinned a quarter of the blocks. The KV of the
    prompt ``saved`` is in CPU memory."""
    rig = make_rig(
        blocks=41,
        max_model_len=512,
        ahead=True,
        in_job_order=in_job_order,
        extra={"cpu_gib": 0.001 if saved else 0, "pin_fraction": 1},
    )
    if saved:
        rig.ask("saves", saved)
        rig.fill()
    rig.policy = FixedPin(3600.0)
    rig.ask("pinned", text(150, seed=1), params={"job_id": "away"})
    assert len(rig.pins) == 1
    return rig


def one_that_stops(rig: Rig) -> None:
    prompt = text(250, seed=2)
    rig.add("stops", prompt, max_tokens=100, stop_ids=[expected(prompt, 6)[-1]])


def run_until_it_stops(rig: Rig) -> None:
    """Step until the request's end is known. The step scheduled in advance is then still running.
    Waits for saves before each step, because pending saves would delay the release of blocks
    further."""
    while "stops" not in rig.finished:
        rig.wait_for_worker()
        rig.step()
