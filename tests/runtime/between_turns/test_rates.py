"""Demand for VRAM and CPU memory: its rate, and its current level."""

from __future__ import annotations

import math

from tests.runtime.conftest import MakeRig
from tiered_kv.pages.cpu_index import STAY_EVERY_S
from tiered_kv.testing.checked_kv import text
from tiered_kv.testing.policies import FixedPin
from tiered_kv.testing.vllm.rig import Rig


def test_pins_do_not_count_as_demand(make_rig: MakeRig) -> None:
    """Two pins hold half of VRAM, but VRAM still costs nothing. Pins are released on demand, so
    only running and waiting requests make space scarce."""
    rig = make_rig(blocks=64, max_model_len=512, extra={"cpu_gib": 0.0})
    rig.policy = FixedPin(3600.0)
    for job in ("a", "b"):
        rig.ask(job, text(260, seed=ord(job)), params={"job_id": job})
    assert rig.pins.held_blocks == 32
    rig.gaps.costs.measure_demand()
    assert rig.costs(16).vram_price == 0.0


def saves(rig: Rig, number: int) -> None:
    """Save the twenty pages of another prompt."""
    rig.ask(f"r{number}", text(320, seed=number), max_tokens=1)


def test_the_rate_of_taken_slots_is_measured_every_five_seconds(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=128, extra={"cpu_gib": 40 * 16 * 8 / 2**30})
    index = rig.pages.index
    saves(rig, 0)
    assert index.stay_s() == math.inf, "there is room"
    for number in (1, 2):
        saves(rig, number)
    rig.now += 0.99 * STAY_EVERY_S
    assert index.stay_s() == math.inf
    rig.now = 1000.0 + STAY_EVERY_S
    per_s = 0.5 * 40 / STAY_EVERY_S
    assert index.stay_s() == 40 / per_s, "half of what was seen last"
    rig.now += 0.5 * STAY_EVERY_S
    saves(rig, 3)
    assert index.stay_s() == 40 / per_s
