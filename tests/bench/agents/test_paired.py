"""A paired ratio, and how sure it is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.bench.agents.paired import PairedRatio

seconds = st.floats(0.1, 1e4)


@given(st.lists(st.tuples(seconds, seconds), min_size=2, max_size=6))
def test_the_interval_lies_around_the_ratio(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*pairs, strict=True)
    found = PairedRatio.of(ours, theirs)
    back = PairedRatio.of(theirs, ours)
    assert found.low is not None
    assert found.high is not None
    assert back.high is not None
    assert found.low <= found.value * (1 + 1e-9)
    assert found.value <= found.high * (1 + 1e-9)
    assert found.value * back.value == pytest.approx(1.0)
    assert found.low * back.high == pytest.approx(1.0)


def test_the_interval_is_students() -> None:
    found = PairedRatio.of([math.e, 1.0, 1.0], [1.0, 1.0, 1.0])
    assert found.value == pytest.approx(math.exp(1 / 3))
    assert found.high is not None
    assert found.high / found.value == pytest.approx(math.exp(4.3027 / 3), rel=1e-4)


def test_one_pair_has_a_ratio_and_no_interval() -> None:
    found = PairedRatio.of([3.0], [2.0])
    assert found.value == pytest.approx(1.5)
    assert found.low is found.high is None


def test_no_pair_is_an_error() -> None:
    with pytest.raises(ValueError, match="no pair"):
        PairedRatio.of([], [])
