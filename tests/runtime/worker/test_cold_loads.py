"""A restore in two parts ends once both are over, as if it had been one."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.connectors.runtime.worker.compressor import ColdLoads
from tiered_kv.keys import PageKey
from tiered_kv.orders import LoadOrder, OrderId, RestoreMode
from tiered_kv.transfer.base import CopyJob, CopyResult, Direction

NONE = frozenset[int]()


def order(*slots: int, number: int = 7) -> LoadOrder:
    """A restore of pages in these places, below 0 for cold ones, to blocks 100 and on."""
    blocks = tuple(range(100, 100 + len(slots)))
    cold = tuple(PageKey(b"page %d" % i) for i, slot in enumerate(slots) if slot < 0)
    number_ = OrderId(number)
    return LoadOrder(number_, 3, "request", blocks, slots, RestoreMode.ASYNC, cold=cold)


def result(failed: Collection[int], nbytes: int, seconds: float, number: int = 7) -> CopyResult:
    return CopyResult(number, frozenset(failed), nbytes, seconds)


def test_the_raw_part_is_a_copy_of_its_own() -> None:
    job = ColdLoads().split(order(-1, 5, -1, 6, -9, 0))
    assert job == CopyJob(OrderId(7), Direction.LOAD, [101, 103, 105], [5, 6, 0], 3)


def test_a_restore_of_cold_pages_alone_has_one_part() -> None:
    loads = ColdLoads()
    assert loads.split(order(-1, -1, -4)) is None
    whole = result({1}, 20, 1.0)
    assert loads.on_cold(whole) is whole


def test_copies_that_are_no_part_of_anything_are_whole() -> None:
    loads = ColdLoads()
    loads.split(order(-1, 5))
    other = result({0}, 10, 1.0, number=8)
    assert loads.on_raw(other) is other


@pytest.mark.parametrize("raw_first", [False, True])
@pytest.mark.parametrize(
    ("raw", "cold", "failed"),
    [
        ((), (), ()),
        ({0}, (), {1}),
        ({2}, (), {5}),
        ((), {0, 4}, {0, 4}),
        ({0, 1, 2}, {2}, {1, 2, 3, 5}),
        ({0, 1, 2}, {0, 2, 4}, {0, 1, 2, 3, 4, 5}),
    ],
)
def test_either_part_may_fail_and_either_may_be_first(
    raw_first: bool, raw: Collection[int], cold: Collection[int], failed: Collection[int]
) -> None:
    """The raw part counts its own pages, the other those of the order."""
    loads = ColdLoads()
    loads.split(order(-1, 5, -1, 6, -9, 0))
    parts = [(loads.on_raw, result(raw, 300, 0.5)), (loads.on_cold, result(cold, 40, 2.0))]
    (take, first), (take_other, second) = parts if raw_first else parts[::-1]
    assert take(first) is None
    assert take_other(second) == CopyResult(7, frozenset(failed), 340, 2.0)
    assert loads.on_raw(again := result((), 1, 1.0)) is again, "nothing is left of it"


def test_a_raw_part_that_is_refused_fails_its_own_pages() -> None:
    loads = ColdLoads()
    job = loads.split(order(4, -1, 5))
    assert job is not None
    assert loads.on_raw(CopyResult.refusal(job)) is None
    assert loads.on_cold(result((), 10, 1.0)) == CopyResult(7, frozenset({0, 2}), 10, 1.0)


@given(st.data())
def test_restores_under_way_at_once_are_told_apart(data: st.DataObject) -> None:
    loads, events = ColdLoads(), list[tuple[str, int]]()
    slots = data.draw(
        st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=6), min_size=1, max_size=4)
    )
    expected = dict[int, frozenset[int]]()
    failures = dict[tuple[str, int], frozenset[int]]()
    for number, places in enumerate(slots):
        loads_job = loads.split(order(*places, number=number))
        raw = [i for i, slot in enumerate(places) if slot >= 0]
        cold = [i for i, slot in enumerate(places) if slot < 0]
        if not cold:  # never split in the product
            loads.on_cold(result((), 0, 0.0, number))
        bad = data.draw(st.frozensets(st.sampled_from(range(len(places)))))
        expected[number] = bad
        assert (loads_job is None) == (not raw)
        if raw:
            events.append(("raw", number))
            failures["raw", number] = frozenset(raw.index(i) for i in bad & set(raw))
        if cold:
            events.append(("cold", number))
            failures["cold", number] = bad & set(cold)
    ended = dict[int, frozenset[int]]()
    for kind, number in data.draw(st.permutations(events)):
        take = loads.on_raw if kind == "raw" else loads.on_cold
        whole = take(result(failures[kind, number], 1, 1.0, number))
        if whole is not None:
            assert number not in ended
            ended[number] = whole.failed
    assert ended == expected
