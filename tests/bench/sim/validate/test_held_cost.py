"""The cost of held jobs, measured on engines in which they really are held."""

from __future__ import annotations

import pytest

from tiered_kv.bench.sim.validate.held_cost import Crowd, measure


def test_steps_are_timed_while_all_are_held() -> None:
    crowd = Crowd(held=20, shared_tokens=640, running=3, steps=10, pairs=2)
    found = measure(crowd)
    assert found["step_ratio"] == pytest.approx(found["held_step_ms"] / found["step_ms"])
    assert 0 < found["step_ratio"] < 10


def test_jobs_that_find_room_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.bench.sim.validate.held_cost.OWN_TOKENS", 32)
    with pytest.raises(RuntimeError, match="nothing was measured"):
        measure(Crowd(held=1, shared_tokens=16, running=3, steps=10, pairs=1))
