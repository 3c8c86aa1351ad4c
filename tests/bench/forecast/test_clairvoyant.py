"""The bound of all policies."""

from __future__ import annotations

import pytest

from tests.policies.turn_ends import turn_end
from tiered_kv.bench.forecast.clairvoyant import Clairvoyant
from tiered_kv.policies.base import Costs, Decision, Tier


@pytest.mark.parametrize(
    ("gap_s", "price", "made"),
    [
        (3.0, 1.0, Decision(Tier.PIN, 3.0)),
        (11.0, 1.0, Decision(Tier.DROP)),
        (3.0, 4.0, Decision(Tier.DROP)),
    ],
)
def test_the_clairvoyant_pins_for_just_the_gap(gap_s: float, price: float, made: Decision) -> None:
    policy = Clairvoyant()
    policy.gap_s = gap_s
    assert policy.decide(turn_end(), Costs(recompute_s=10.0, vram_price=price)) == made
