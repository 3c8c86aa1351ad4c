"""Counters count up, and hand over what was added."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.metrics import COUNTERS, GAUGES, Counters


def test_take_hands_over_what_was_added_since_the_last_time() -> None:
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


def test_a_counter_nobody_declared_is_an_error() -> None:
    with pytest.raises(KeyError):
        Counters().add("pinz")


@given(st.lists(st.tuples(st.sampled_from(sorted(COUNTERS)), st.integers(0, 9), st.booleans())))
def test_the_differences_add_up_to_the_totals(events: list[tuple[str, int, bool]]) -> None:
    counters, taken = Counters(), dict.fromkeys(COUNTERS, 0)
    for name, amount, look in events:
        counters.add(name, amount)
        if look:
            for seen, added in counters.take().items():
                taken[seen] += added
    for seen, added in counters.take().items():
        taken[seen] += added
    assert taken == counters.totals


def test_every_metric_has_a_name_for_prometheus_and_a_sentence() -> None:
    assert not set(COUNTERS) & set(GAUGES)
    for name, text in {**COUNTERS, **GAUGES}.items():
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", name)
        assert text.endswith(".")
