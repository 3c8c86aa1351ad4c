"""Terms of a pin: its time, its part of a context, and its worth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.turn_ends import forecast_of
from tiered_kv.policies.base import Costs, Decision, Tier
from tiered_kv.policies.pins.release_order import (
    PROVISIONAL_S,
    PinState,
    pin_value,
    provisional_s,
    was_to_stay,
    within_budget,
)


@pytest.mark.parametrize(
    ("decided_s", "pinned_s"), [(0.0, PROVISIONAL_S), (60.0, PROVISIONAL_S), (0.5, 0.5)]
)
def test_a_turn_is_pinned_until_its_tool_call_is_read(decided_s: float, pinned_s: float) -> None:
    assert provisional_s(decided_s) == pinned_s


def test_a_pin_is_worth_what_it_is_expected_to_save() -> None:
    value = pin_value(forecast_of({1.0: 0.5}), Costs(recompute_s=6.0), 60.0)
    assert value.state is PinState.HELD
    assert value.saves_s == pytest.approx(3.0)
    assert value.saved_per_second > 0


def test_nobody_knows_what_a_pin_without_a_forecast_is_worth() -> None:
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


@pytest.mark.parametrize(
    ("decision", "pinned", "saved", "stays"),
    [
        (Decision(Tier.PIN, 10.0), True, False, True),
        (Decision(Tier.PIN, 4.0), True, False, False),
        (Decision(Tier.PIN, 4.0), True, True, True),
        (Decision(Tier.PIN, 10.0), False, False, False),
        (Decision(Tier.CPU), False, True, True),
        (Decision(Tier.CPU), False, False, False),
        (Decision(Tier.DROP), False, True, False),
    ],
    ids=["pinned", "expired", "expired, but saved", "refused", "saved", "lost", "dropped"],
)
def test_what_was_to_stay_for_five_seconds(
    decision: Decision, pinned: bool, saved: bool, stays: bool
) -> None:
    assert was_to_stay(decision, 5.0, pinned=pinned, saved=saved) is stays
