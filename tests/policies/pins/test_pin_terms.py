"""Terms of a pin: its worth, and how much of the context it covers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.turn_ends import forecast_of
from tiered_kv.policies.base import Costs
from tiered_kv.policies.pins.release_order import (
    PinState,
    pin_value,
    within_budget,
)


def test_a_pin_is_worth_what_it_is_expected_to_save() -> None:
    value = pin_value(forecast_of({1.0: 0.5}), Costs(recompute_s=6.0), 60.0)
    assert value.state is PinState.HELD
    assert value.saves_s == pytest.approx(3.0)
    assert value.saved_per_second > 0


def test_the_worth_of_a_pin_without_a_forecast_is_unknown() -> None:
    assert pin_value(None, Costs(recompute_s=6.0), 60.0).state is PinState.UNPRICED


def test_a_context_over_budget_is_pinned_from_its_start() -> None:
    assert within_budget([False] * 5, 3) == 3
    assert within_budget([True, False, True, True, False], 1) == 4, "what is held costs nothing"
    assert within_budget([True, False], 0) == 1


@given(st.lists(st.booleans()), st.integers(0, 20))
def test_as_much_is_pinned_as_the_budget_allows(held: list[bool], room: int) -> None:
    count = within_budget(held, room)
    assert held[:count].count(False) <= room
    if count < len(held):
        assert held[:count].count(False) == room
        assert not held[count]
