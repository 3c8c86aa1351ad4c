"""New jobs that do not fit are held back in the engine's own queue."""

from __future__ import annotations

from typing import Any

from tests.runtime.stories.conftest import MakeEngine
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.rig import EngineRig

TOKENS = 300
"""Prompt tokens of a new job, which needs 19 of the 63 usable blocks. Three jobs fit and a fourth
does not."""


def holding(make_engine: MakeEngine, **settings: Any) -> EngineRig:
    return make_engine(blocks=64, extra={"cpu_gib": 0.0, "admission": "auto", **settings})


def begin(rig: EngineRig, name: str) -> None:
    """Add the only turn of a new job."""
    params = {"job_id": name, "is_last_step": True}
    rig.add(name, text(TOKENS, seed=ord(name)), max_tokens=40, params=params)


def test_a_job_waits_until_another_has_ended(make_engine: MakeEngine) -> None:
    rig = holding(make_engine)
    for name in "abcd":
        begin(rig, name)
        rig.step()
    for _ in range(5):
        rig.step()
    assert rig.held() == ["d"]
    assert sorted(rig.running()) == ["a", "b", "c"]
    rig.run()
    assert rig.outputs["d"] == expected(text(TOKENS, seed=ord("d")), 40)
    assert len(rig.gate.jobs) == 0, "every job said that it was over"
    rig.check_clean()


def test_without_admission_control_no_job_is_held(make_engine: MakeEngine) -> None:
    rig = holding(make_engine, admission="off")
    for name in "abcdefgh":
        begin(rig, name)
        rig.step()
    assert rig.held() == []
    rig.run()
    rig.check_clean()


def test_an_aborted_request_frees_space(make_engine: MakeEngine) -> None:
    rig = holding(make_engine)
    for name in "abcd":
        begin(rig, name)
        rig.step()
    rig.abort("a")
    rig.step()
    rig.step()
    assert "d" in rig.running()
    rig.run()
    rig.check_clean()
