"""Jobs that a client leaves open, or misdeclares, do not delay other jobs for long."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.admission.admitting import TOKENS
from tests.runtime.conftest import MakeRig
from tiered_kv.policies.base import JobKey
from tiered_kv.policies.pins.release_order import PinState, PinValue
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.vllm.rig import Rig

OPEN = 8
"""Number of contexts that a client leaves open. Each has 19 blocks, so together they fit neither
into VRAM (127 blocks) nor into CPU memory (100)."""


def served(make_rig: MakeRig) -> Rig:
    """Create a rig with the ``occupancy`` policy. VRAM and CPU memory together hold all contexts
    that one client leaves open, and more."""
    return make_rig(
        blocks=128,
        max_model_len=2048,
        extra={
            "cpu_gib": 100 * 16 * 8 / 2**30,
            "admission": "auto",
            "policy": "occupancy",
            "pin_fraction": 0,
        },
        in_job_order=True,
    )


def leaves_open(rig: Rig, said: dict[str, Any], jobs: int = OPEN) -> None:
    """Start jobs of one client that never continue, and then a request of that client that keeps
    decoding."""
    for n in range(jobs):
        params = {"job_id": f"open{n}", "is_last_step": False, **said}
        rig.add(f"open{n}", text(TOKENS, seed=n), params=params, salt="one")
        rig.run()
    rig.add("busy", text(20, seed=99), max_tokens=1900, params={"job_id": "busy"}, salt="one")
    rig.step()


def waits_s(rig: Rig, name: str) -> float:
    """Add a new job of another client, and return for how many seconds it is held back."""
    params = {"job_id": name, "is_last_step": True}
    rig.add(name, text(TOKENS, seed=sum(name.encode())), params=params, salt=f"salt {name}")
    began = rig.now
    while name in rig.held():
        rig.now += 0.5
        rig.step()
        assert "busy" not in rig.finished
    return rig.now - began


@pytest.mark.parametrize(
    "said",
    [
        {"tool_name": "bash", "expected_tool_s": 1.0},
        {"tool_name": "bash", "expected_tool_s": 604_800},
        {"tool_name": "bash", "tool_command": "sleep 86400"},
    ],
    ids=["a second", "a week", "sleeps for a day"],
)
def test_jobs_left_open_hold_others_no_longer_than_their_chance_to_return(
    make_rig: MakeRig, said: dict[str, Any]
) -> None:
    rig = served(make_rig)
    leaves_open(rig, said)
    rig.now += 10.0
    for name in ("first", "second", "third"):
        assert waits_s(rig, name) <= 5.0
        rig.step()
    rig.abort("busy")
    rig.run()


def test_a_late_return_does_not_affect_other_jobs(make_rig: MakeRig) -> None:
    rig = served(make_rig)
    rig.ask("late", text(TOKENS, seed=50), params={"job_id": "late"}, salt="one")
    rig.now += 8 * 3600.0
    context = rig.prompts["late"] + rig.outputs["late"]
    rig.ask("late2", context, params={"job_id": "late"}, salt="one")
    leaves_open(rig, {"tool_name": "bash", "expected_tool_s": 1.0})
    rig.now += 60.0
    assert waits_s(rig, "other") <= 1.0
    rig.abort("busy")
    rig.run()


def test_a_pin_of_a_job_unlikely_to_return_is_released_for_any_request(make_rig: MakeRig) -> None:
    """The pin is valued highly while a return of its job is likely. Twenty seconds later, a return
    is unlikely, and the pin is released for a new job of another client."""
    rig = make_rig(
        blocks=64,
        max_model_len=1024,
        extra={"cpu_gib": 0.0, "admission": "auto", "policy": "occupancy"},
        in_job_order=True,
    )
    said = {"job_id": "open", "is_last_step": False, "tool_name": "bash", "expected_tool_s": 1.0}
    for turn in range(1, 41):  # the forecast becomes certain that the job returns after a second
        rig.ask(f"open{turn}", text(TOKENS, seed=1), params=said, salt="one")
        rig.now += 1.0
    rig.ask("open0", text(700, seed=2), params={**said, "job_id": "gone"}, salt="one")
    key = JobKey("one", "gone")
    worth_everybodys_wait = PinValue(PinState.HELD, 100.0, 100.0)
    rig.pins.revise(key, rig.now + 3600.0, worth_everybodys_wait)
    assert key in rig.pins
    rig.add("busy", text(20, seed=99), max_tokens=600, params={"job_id": "busy"}, salt="one")
    rig.step()
    rig.now += 20.0
    rig.add("new", text(700, seed=3), params={"job_id": "new", "is_last_step": True}, salt="other")
    rig.step()
    rig.step()
    assert "new" not in rig.held()
    assert key not in rig.pins
    rig.abort("busy")
    rig.run()


def test_a_context_shared_by_ended_jobs_needs_no_space(make_rig: MakeRig) -> None:
    """A client that uses a new job name in every request leaves many jobs with a common context.
    Once they are unlikely to return, hardly any space is reserved for them."""
    rig = served(make_rig)
    shared = text(TOKENS, seed=7)
    said = {"tool_name": "bash", "expected_tool_s": 1.0, "is_last_step": False}
    for n in range(OPEN):
        params = {**said, "job_id": f"named anew {n}"}
        rig.ask(f"r{n}", shared + text(20 * n, seed=8), params=params, salt="one")
    before = rig.gate.jobs.peak()
    rig.now += 20.0
    assert rig.gate.jobs.peak() < 0.3 * before
