"""Counters increase, and report what was added since the last report. Observations are reported
once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.metrics import (
    COUNTERS,
    DECIDED,
    GAP_CLASSES,
    GAUGES,
    HISTOGRAMS,
    MOST_OBSERVED,
    WOULD_HAVE_SAVED,
    Counters,
)
from tiered_kv.policies.base import GapClass, Tier
from tiered_kv.trace.turn_record import PinEnd


def test_take_returns_what_was_added_since_the_last_call() -> None:
    counters = Counters()
    counters.add("pins")
    counters.add("pins", 2)
    counters.add("turns", True)

    assert counters.take() == {"pins": 3, "turns": 1}
    assert counters.take() == {}
    counters.add("pins")
    assert counters.take() == {"pins": 1}
    assert counters.totals["pins"] == 4


def test_what_did_not_happen_is_not_reported() -> None:
    counters = Counters()
    counters.add("pins", 0)
    assert counters.take() == {}
    assert set(counters.totals) == set(COUNTERS)
    assert not any(counters.totals.values())


def test_a_counter_that_was_started_is_reported_from_zero() -> None:
    counters = Counters()
    counters.start(WOULD_HAVE_SAVED)
    counters.add("would_have_saved_cpu", 5)
    zeros = dict.fromkeys(WOULD_HAVE_SAVED, 0)
    assert counters.take() == {**zeros, "would_have_saved_cpu": 5}
    counters.add("would_have_saved_cpu", 2)
    assert counters.take() == {"would_have_saved_cpu": 2}
    assert counters.totals["would_have_saved_cpu"] == 7


def test_an_undeclared_counter_is_an_error() -> None:
    with pytest.raises(KeyError):
        Counters().add("pinz")


@given(st.lists(st.tuples(st.sampled_from(sorted(COUNTERS)), st.integers(0, 9), st.booleans())))
def test_the_differences_add_up_to_the_totals(events: list[tuple[str, int, bool]]) -> None:
    counters, taken = Counters(), dict.fromkeys(COUNTERS, 0.0)
    for name, amount, look in events:
        counters.add(name, amount)
        if look:
            for seen, added in counters.take().items():
                taken[seen] += added
    for seen, added in counters.take().items():
        taken[seen] += added
    assert taken == counters.totals


def test_observations_are_reported_once() -> None:
    counters = Counters()
    for seconds in (3.0, 1.0):
        counters.observe("hold_seconds", seconds)
    assert counters.take_observed() == {"hold_seconds": [3.0, 1.0]}
    assert counters.take_observed() == {}
    with pytest.raises(KeyError):
        counters.observe("held_for", 1.0)


def test_an_engine_whose_statistics_are_never_taken_keeps_the_latest_observations() -> None:
    counters = Counters()
    for at in range(3 * MOST_OBSERVED):
        counters.observe("gap_over_median", at)
    assert counters.take_observed()["gap_over_median"] == [
        *range(2 * MOST_OBSERVED, 3 * MOST_OBSERVED)
    ]


def test_every_metric_has_a_unique_name_and_a_description() -> None:
    whole = {**COUNTERS, **GAUGES, **HISTOGRAMS}
    assert len(whole) == len(COUNTERS) + len(GAUGES) + len(HISTOGRAMS)
    assert all(text.endswith(".") for text in whole.values())


def test_decisions_and_pins_are_counted_by_what_policies_and_pins_know() -> None:
    assert GAP_CLASSES[:-1] == tuple(one.value for one in GapClass)
    assert tuple(one.value for one in Tier) == DECIDED
    ends = {f"pins_ended_{one.value}" for one in PinEnd}
    assert ends == {name for name in COUNTERS if name.startswith("pins_ended_")}
