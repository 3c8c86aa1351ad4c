"""Pages that wait for a demotion order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.connectors.runtime.lower_tiers.demotion import Backlog, Waiting
from tiered_kv.keys import PageKey


def pages(*numbers: int) -> list[PageKey]:
    return [PageKey(number.to_bytes(4, "big")) for number in numbers]


def test_pages_of_one_context_come_first_and_the_rest_of_it_before_the_next() -> None:
    backlog = Backlog()
    runs = dict.fromkeys(pages(1, 2, 3), pages(1)[0])
    backlog.add(Waiting(pages(1, 2, 3), runs))
    backlog.add(Waiting(pages(7), {}))
    assert backlog.take(2) == (pages(1, 2), runs)
    assert len(backlog) == 2
    assert backlog.take(2) == (pages(3), runs)
    assert backlog.take(2) == (pages(7), {})
    assert not backlog


def test_a_context_without_pages_adds_nothing() -> None:
    backlog = Backlog()
    backlog.add(Waiting([], {}))
    with pytest.raises(IndexError):
        backlog.take(1)


def test_cleared_pages_no_longer_wait() -> None:
    backlog = Backlog()
    backlog.add(Waiting(pages(1, 2), {}))
    backlog.clear()
    assert len(backlog) == 0
    backlog.add(Waiting(pages(3), {}))
    assert backlog.take(9).keys == pages(3)


@given(st.lists(st.lists(st.integers(0, 9), max_size=9)), st.lists(st.integers(1, 4), min_size=1))
def test_every_page_is_taken_once_in_order(contexts: list[list[int]], most: list[int]) -> None:
    backlog = Backlog()
    for context in contexts:
        backlog.add(Waiting(pages(*context), {}))
    came: list[PageKey] = []
    while backlog:
        before = len(backlog)
        keys: Sequence[PageKey] = backlog.take(most[len(came) % len(most)]).keys
        assert len(backlog) == before - len(keys)
        came += keys
    assert came == pages(*(number for context in contexts for number in context))
