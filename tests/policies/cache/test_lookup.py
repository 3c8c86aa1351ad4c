"""A store is queried for a context in parts, and its answer is not awaited if recomputing is
faster."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.connectors.runtime.pages.lookups import (
    FIRST_LOOKUP,
    LATER_LOOKUP,
    LOOKUP_S,
    LOOKUP_SHARE,
    LOOKUPS,
    answer_wait_s,
    pages_asked,
)


def test_a_store_without_the_first_pages_is_not_queried_for_the_rest() -> None:
    assert pages_asked(0, 8192) == FIRST_LOOKUP
    assert pages_asked(1, 8192 - FIRST_LOOKUP) == 8192 - FIRST_LOOKUP
    assert pages_asked(0, 5) == 5


@given(st.integers(0, 8), st.integers(0, 100_000))
def test_no_store_is_queried_for_known_pages_or_without_end(lookups: int, unknown: int) -> None:
    asked = pages_asked(lookups, unknown)
    assert 0 <= asked <= min(unknown, LATER_LOOKUP)
    assert asked > 0 or not unknown or lookups >= LOOKUPS


def test_an_answer_is_not_waited_for_longer_than_computing_takes() -> None:
    assert answer_wait_s(LOOKUP_S / 2, measured=True) == LOOKUP_S / 2
    assert answer_wait_s(0.5, measured=True) == LOOKUP_S
    assert answer_wait_s(10.0, measured=True) == LOOKUP_SHARE * 10.0


def test_an_estimate_can_only_lengthen_the_wait() -> None:
    assert answer_wait_s(0.0, measured=False) == LOOKUP_S
    assert answer_wait_s(LOOKUP_S / 2, measured=False) == LOOKUP_S
    assert answer_wait_s(10.0, measured=False) == LOOKUP_SHARE * 10.0
