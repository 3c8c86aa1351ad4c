"""The restore mode, sync or async, is the one with the lower total wait over all requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tiered_kv.orders import RestoreMode
from tiered_kv.policies.cache.restore_mode import (
    AlwaysRestore,
    FasterRestore,
    RestoreCost,
)

SECONDS = st.floats(0, 100, allow_nan=False)
COSTS = st.builds(RestoreCost, copy_s=SECONDS, step_s=SECONDS, others=st.integers(0, 512))
SYNC, ASYNC = RestoreMode.SYNC, RestoreMode.ASYNC


def choose(copy_s: float, step_s: float, others: int) -> RestoreMode:
    return FasterRestore().choose(RestoreCost(copy_s, step_s, others))


def test_a_single_request_delays_no_other() -> None:
    assert choose(copy_s=10.0, step_s=0.001, others=0) is SYNC


def test_a_short_copy_finishes_before_an_async_one_would_be_noticed() -> None:
    assert choose(copy_s=0.001, step_s=0.05, others=8) is SYNC


def test_a_long_copy_does_not_hold_up_a_full_batch() -> None:
    assert choose(copy_s=0.1, step_s=0.05, others=8) is ASYNC


def test_a_copy_that_costs_nothing_is_not_waited_for() -> None:
    assert choose(copy_s=0.0, step_s=0.05, others=500) is SYNC


@given(COSTS)
def test_the_mode_chosen_is_the_one_that_costs_less(cost: RestoreCost) -> None:
    assume(cost.others > 0)
    waits = {
        SYNC: cost.copy_s * (1 + cost.others),  # all requests wait for the copy
        ASYNC: max(cost.copy_s, 2 * cost.step_s),  # one request waits two steps, or for the copy
    }
    assert waits[FasterRestore().choose(cost)] == min(waits.values())


@given(COSTS, st.integers(0, 512))
def test_more_concurrent_requests_never_turn_async_into_sync(cost: RestoreCost, more: int) -> None:
    if FasterRestore().choose(cost) is ASYNC:
        busier = replace(cost, others=cost.others + more)
        assert FasterRestore().choose(busier) is ASYNC


@given(COSTS, SECONDS)
@example(cost=RestoreCost(copy_s=0.1, step_s=0.4, others=9), more=0.5)
def test_a_longer_copy_never_turns_async_into_sync(cost: RestoreCost, more: float) -> None:
    if FasterRestore().choose(cost) is ASYNC:
        longer = replace(cost, copy_s=cost.copy_s + more)
        assert FasterRestore().choose(longer) is ASYNC


@given(COSTS, SECONDS)
def test_longer_steps_never_turn_sync_into_async(cost: RestoreCost, more: float) -> None:
    if FasterRestore().choose(cost) is SYNC:
        slower = replace(cost, step_s=cost.step_s + more)
        assert FasterRestore().choose(slower) is SYNC


@pytest.mark.parametrize("mode", list(RestoreMode))
@given(cost=COSTS)
def test_always_restore_ignores_costs(mode: RestoreMode, cost: RestoreCost) -> None:
    assert AlwaysRestore(mode).choose(cost) is mode
