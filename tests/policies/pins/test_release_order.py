"""The pin that saves the least is released first, and only for requests that cannot wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.policies.base import JobKey
from tiered_kv.policies.pins.release_order import (
    WORTH_A_WAIT,
    WORTH_MAKING_OLDER_WAIT,
    PinState,
    PinValue,
    PinView,
    release_order,
)

VALUES = st.builds(
    PinValue,
    st.sampled_from(PinState),
    st.floats(0, 10, allow_nan=False),
    st.floats(0, 2, allow_nan=False),
)
PINS = st.dictionaries(
    st.builds(JobKey, st.just(""), st.sampled_from("abcdef")),
    st.builds(PinView, VALUES, st.integers(1, 9), st.floats(0, 9, allow_nan=False)),
)


def job(name: str) -> JobKey:
    return JobKey("", name)


def held(per_block_s: float, per_second: float, started_at: float = 0.0) -> PinView:
    return PinView(PinValue(PinState.HELD, 4 * per_block_s, per_second), 4, started_at)


def test_the_pin_that_saves_the_least_with_a_block_goes_first() -> None:
    pins = {job("a"): held(3, 1), job("b"): held(1, 1), job("c"): held(2, 1)}
    assert release_order(pins, None, None) == [job("b"), job("c"), job("a")]
    assert release_order(pins, job("b"), None) == [job("c"), job("a"), job("b")], "spared"


def test_of_pins_without_a_forecast_the_youngest_jobs_goes_first() -> None:
    unpriced = PinValue(PinState.UNPRICED)
    pins = {job(name): PinView(unpriced, 4, at) for name, at in (("old", 1.0), ("young", 2.0))}
    assert release_order(pins, None, None) == [job("young"), job("old")]


@pytest.mark.parametrize(
    ("state", "per_second", "for_older", "for_younger"),
    [
        (PinState.HELD, WORTH_A_WAIT - 0.01, True, True),
        (PinState.HELD, WORTH_A_WAIT, True, False),
        (PinState.HELD, WORTH_MAKING_OLDER_WAIT, False, False),
        (PinState.UNPRICED, 0.0, True, False),
        (PinState.ARRIVED, 0.0, False, False),
        (PinState.WORTHLESS, 0.0, True, True),
    ],
)
def test_which_requests_wait_for_a_pin(
    state: PinState, per_second: float, for_older: bool, for_younger: bool
) -> None:
    pins = {job("pinned"): PinView(PinValue(state, 1.0, per_second), 4, 5.0)}
    assert bool(release_order(pins, None, 4.0)) is for_older
    assert bool(release_order(pins, None, 6.0)) is for_younger
    assert release_order(pins, None, None), "there is no other source of blocks"


@given(PINS, st.none() | st.floats(0, 9, allow_nan=False))
def test_the_release_order_does_not_depend_on_the_waiter(
    pins: dict[JobKey, PinView], waiter: float | None
) -> None:
    everything = release_order(pins, None, None)
    assert sorted(everything) == sorted(pins)
    some = release_order(pins, None, waiter)
    assert some == [one for one in everything if one in some], "the order is the same"
