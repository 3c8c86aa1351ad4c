"""The I/O thread executes orders when they are due, promotions first, whatever fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiered_kv.codecs.base import Bytes, ElementType, PageFormat
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.keys import PageKey
from tiered_kv.orders import DemoteOrder, LookupOrder, OrderId, OrderReport, PromoteOrder
from tiered_kv.remote import breaker
from tiered_kv.storage import io_thread
from tiered_kv.storage.io_thread import IoThread
from tiered_kv.storage.store.options import StoreOptions
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.stores import SSD

FORMAT = PageFormat(ElementType.OPAQUE, page_bytes=8192, tokens=16)
SLOTS = 100
GROUP = 32


def key(n: int) -> PageKey:
    return PageKey(b"fingerprint-of-m" + n.to_bytes(32, "big"))


class Watched(SegmentStore):
    """A real store that records its calls, and blocks or fails on request."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.log: list[tuple[str, int]] = []
        self.gate: threading.Event | None = None
        self.fail = False

    def put(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        if self.gate is not None:
            assert self.gate.wait(300)
        if self.fail:
            raise RuntimeError("injected")
        self.log.append(("put", len(pages)))
        return super().put(pages)

    def get(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        self.log.append(("get", len(pages)))
        return super().get(pages)


class Bench:
    """An I/O thread over a store in a folder, with slots whose bytes identify the slot."""

    store_type = Watched

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 100.0
        rng = np.random.default_rng(5)
        self.slots = rng.integers(0, 256, (SLOTS, FORMAT.page_bytes)).astype(np.uint8)
        self.store = self.open(b"f" * 16)
        self.io = IoThread(self.store, self.slots, lambda: self.now)
        self.orders = 0

    def open(self, fingerprint: bytes) -> Watched:
        options = StoreOptions(self.root, fingerprint, 0, 0, 1, FORMAT, 64 << 20, 2)
        return self.store_type(options, RawCodec(FORMAT), lambda *_: RawCodec(FORMAT))

    def demote(self, pages: range, due: float = 0.0) -> DemoteOrder:
        """Submit an order to demote each page ``n`` from slot ``n``."""
        self.orders += 1
        order = DemoteOrder(OrderId(self.orders), SSD, tuple(map(key, pages)), tuple(pages), due)
        self.io.submit(order)
        return order

    def promote(self, pages: range, into: range, due: float = 0.0) -> PromoteOrder:
        self.orders += 1
        order = PromoteOrder(OrderId(self.orders), SSD, tuple(map(key, pages)), tuple(into), due)
        self.io.submit(order)
        return order

    def reports(self) -> dict[OrderId, OrderReport]:
        assert self.io.wait_idle(30)
        return self.io.take_reports()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(io_thread, "GROUP_BYTES", GROUP * FORMAT.page_bytes)
    made = Bench(tmp_path / "ssd")
    yield made
    if made.store.gate is not None:
        made.store.gate.set()
    made.io.close()


def test_a_page_is_demoted_and_promoted_into_another_slot(bench: Bench) -> None:
    down = bench.demote(range(3))
    assert bench.reports()[down.order_id].failed == frozenset()

    up = bench.promote(range(3), into=range(50, 53))
    report = bench.reports()[up.order_id]
    assert (report.ranks, report.failed, report.nbytes) == (1, frozenset(), 3 * FORMAT.page_bytes)
    assert report.seconds > 0
    assert (bench.slots[50:53] == bench.slots[:3]).all()
    assert bench.io.take_reports() == {}, "a report is given once"


class Stalled(Watched):
    """A store that refuses everything ``refusals`` times, and then accepts all."""

    refusals = 3

    def put(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        if self.refusals:
            self.refusals -= 1
            return frozenset(range(len(pages)))
        return super().put(pages)

    @property
    def retry_s(self) -> float:
        return 0.001


@pytest.mark.parametrize("patience_s", [300.0, 0.0])
def test_pages_refused_by_a_stalled_store_are_retried_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    monkeypatch.setattr(breaker, "PATIENCE_S", patience_s)
    monkeypatch.setattr(Bench, "store_type", Stalled)
    bench = Bench(tmp_path / "ssd")
    order = bench.demote(range(40))
    failed = bench.reports()[order.order_id].failed
    bench.io.close()
    assert failed == (frozenset() if patience_s else frozenset(range(40)))


class InGroups(Watched):
    """A store that receives its pages in groups, and that must be queried for its pages."""

    @property
    def group_bytes(self) -> int:
        return 8 * FORMAT.page_bytes

    def exists(self, keys: Sequence[PageKey], deadline_s: float) -> frozenset[int]:
        self.log.append(("exists", len(keys)))
        return super().exists(keys, deadline_s)


@pytest.fixture
def grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(Bench, "store_type", InGroups)
    made = Bench(tmp_path / "ssd")
    yield made
    made.io.close()


def test_a_lookup_runs_between_two_groups_of_a_promotion(grouped: Bench) -> None:
    grouped.demote(range(40))
    grouped.reports()
    grouped.store.log.clear()
    asked, get = threading.Event(), grouped.store.get

    def slow(pages: Any) -> frozenset[int]:
        found = get(pages)
        assert asked.wait(300)
        return found

    grouped.store.get = slow  # type: ignore[method-assign]
    up = grouped.promote(range(40), into=range(50, 90))
    while not grouped.store.log:
        pass  # until the first group is being read
    grouped.io.look_up(LookupOrder(OrderId(99), SSD, tuple(map(key, range(39, 42))), 60.0))
    asked.set()
    reports = grouped.reports()
    assert grouped.store.log == [("get", 8), ("exists", 3), *[("get", 8)] * 4]
    assert reports[OrderId(99)].failed == {1, 2}
    assert reports[up.order_id].failed == frozenset()
    assert reports[up.order_id].nbytes == 40 * FORMAT.page_bytes
    assert (grouped.slots[50:90] == grouped.slots[:40]).all()


def test_a_promotion_ends_with_the_first_group_that_fails_completely(grouped: Bench) -> None:
    grouped.demote(range(12))
    grouped.reports()
    up = grouped.promote(range(40), into=range(50, 90))
    assert grouped.reports()[up.order_id].failed == frozenset(range(12, 40))
    assert grouped.store.log.count(("get", 8)) == 3, "a group with a missing page continues"


def test_a_demotion_ends_with_the_first_group_that_fails_completely(grouped: Bench) -> None:
    """The first group of a demotion is stored, and the second fails completely. The other groups
    fail without being tried: an engine waits for its orders, and each group that a store does not
    answer takes seconds."""
    puts: list[int] = []
    put = grouped.store.put

    def put_first_only(pages: Any) -> frozenset[int]:
        puts.append(len(pages))
        return put(pages) if len(puts) == 1 else frozenset(range(len(pages)))

    grouped.store.put = put_first_only  # type: ignore[method-assign]
    down = grouped.demote(range(40))
    report = grouped.reports()[down.order_id]
    assert report.failed == frozenset(range(8, 40))
    assert report.nbytes == 8 * FORMAT.page_bytes
    assert puts == [8, 8], "the other three groups were not tried"


def test_a_reset_fails_the_rest_of_a_promotion(grouped: Bench) -> None:
    grouped.demote(range(40))
    grouped.reports()
    first, go_on, get = threading.Event(), threading.Event(), grouped.store.get

    def slow(pages: Any) -> frozenset[int]:
        first.set()
        assert go_on.wait(300)
        return get(pages)

    grouped.store.get = slow  # type: ignore[method-assign]
    up = grouped.promote(range(40), into=range(50, 90))
    assert first.wait(300)
    grouped.io.replace_store(lambda: grouped.open(b"g" * 16))
    go_on.set()
    assert grouped.reports()[up.order_id].failed == frozenset(range(40))
    assert grouped.store.log.count(("get", 8)) == 1


def test_a_missing_page_is_reported_as_failed(bench: Bench) -> None:
    bench.demote(range(1))
    bench.reports()
    up = bench.promote(range(2), into=range(50, 52))
    assert bench.reports()[up.order_id].failed == {1}


def test_an_order_waits_until_it_is_due_and_then_runs_by_itself(bench: Bench) -> None:
    bench.demote(range(3))
    bench.reports()
    up = bench.promote(range(3), into=range(50, 53), due=200.0)
    assert bench.reports() == {}
    assert ("get", 3) not in bench.store.log

    bench.now = 200.0
    bench.demote(range(1))  # any order wakes the thread; the test's clock does not
    assert up.order_id in bench.reports()


def test_a_real_clock_wakes_the_thread_by_itself(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    store, written = SegmentStore(*_other(tmp_path)), threading.Event()
    put = store.put

    def told(pages: Any) -> frozenset[int]:
        written.set()
        return put(pages)

    monkeypatch.setattr(store, "put", told)
    io = IoThread(store, bench.slots)
    try:
        order = DemoteOrder(OrderId(1), SSD, (key(1),), (1,), due=time.monotonic() + 0.05)
        io.submit(order)
        assert written.wait(300)
        assert time.monotonic() >= order.due
    finally:
        io.close()


def _other(folder: Path) -> tuple[StoreOptions, RawCodec, Callable[..., RawCodec]]:
    options = StoreOptions(folder / "other", b"g" * 16, 0, 0, 1, FORMAT, 64 << 20, 1)
    return options, RawCodec(FORMAT), lambda *_: RawCodec(FORMAT)


def test_a_promotion_does_not_wait_for_a_long_demotion(bench: Bench) -> None:
    bench.demote(range(1))
    bench.reports()
    bench.store.log.clear()
    bench.store.gate = threading.Event()
    long = bench.demote(range(2, 2 + 3 * GROUP))
    up = bench.promote(range(1), into=range(99, 100))
    bench.store.gate.set()
    reports = bench.reports()

    assert reports[long.order_id].failed == reports[up.order_id].failed == frozenset()
    got = bench.store.log.index(("get", 1))
    assert got <= 1, f"it came behind the whole demotion: {bench.store.log}"
    assert [n for what, n in bench.store.log if what == "put"] == [GROUP] * 3


def test_the_thread_survives_failures(bench: Bench) -> None:
    bench.store.fail = True
    bad = bench.demote(range(2))
    assert bench.reports()[bad.order_id].failed == {0, 1}
    assert bench.io.failures == 1
    bench.store.fail = False
    good = bench.demote(range(2))
    assert bench.reports()[good.order_id].failed == frozenset()


def test_each_error_is_logged_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """One error occurs three times, and then another one occurs. Each is logged once, because the
    first error may not be the important one."""

    def fails(why: str) -> SegmentStore:
        raise OSError(why)

    bench.store.fail = True
    for _ in range(3):
        bench.demote(range(2))
        bench.reports()
    bench.io.replace_store(lambda: fails("no store can be made"))
    bench.reports()
    assert bench.io.failures == 4
    assert caplog.text.count("RuntimeError: injected") == 1
    assert caplog.text.count("OSError: no store can be made") == 1


def test_a_reset_empties_the_disk_and_fails_pending_orders(bench: Bench) -> None:
    bench.demote(range(2))
    bench.reports()
    bench.store.gate = threading.Event()
    running = bench.demote(range(10, 10 + 2 * GROUP))
    waiting = bench.demote(range(2))
    later = bench.promote(range(2), into=range(50, 52), due=1e9)
    bench.io.replace_store(lambda: bench.open(b"n" * 16))
    bench.store.gate.set()
    reports = bench.reports()

    for order in (running, waiting, later):
        assert reports[order.order_id].failed == frozenset(range(len(order.keys)))
    assert not bench.io.store.keys()
    assert bench.io.store is not bench.store
    old = bench.open(b"f" * 16)
    assert len(old) == 0, "what was on disk is invalid"
    old.close()
    fresh = bench.demote(range(2))
    assert bench.reports()[fresh.order_id].failed == frozenset()


def test_the_last_flush_writes_what_the_time_allows(bench: Bench) -> None:
    assert bench.io.close([(key(n), n) for n in range(5)], budget_s=10.0) == 5
    assert bench.io.close([(key(9), 9)], budget_s=10.0) == 0, "closing twice does nothing"
    again = bench.open(b"f" * 16)
    assert again.keys() == [key(n) for n in range(5)]
    again.close()


def test_a_last_flush_that_fails_still_closes_the_store(bench: Bench) -> None:
    bench.store.fail = True
    assert bench.io.close([(key(0), 0)], budget_s=10.0) == 0
    bench.open(b"f" * 16).close()


def test_without_time_nothing_is_flushed(bench: Bench) -> None:
    assert bench.io.close([(key(0), 0)], budget_s=0.0) == 0


def test_a_last_flush_to_a_slow_disk_stays_within_its_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_thread, "LEAST_BYTES", 2 * FORMAT.page_bytes)
    put = bench.store.put

    def slowly(pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        bench.now += 0.08 * len(pages)
        return put(pages)

    monkeypatch.setattr(bench.store, "put", slowly)
    began = bench.now
    written = bench.io.close([(key(n), n) for n in range(SLOTS)], budget_s=3.0)
    assert 3.0 <= bench.now - began < 3.2, "two pages more at most, not a group"
    assert written == pytest.approx((bench.now - began) / 0.08)
    again = bench.open(b"f" * 16)
    assert again.keys() == [key(n) for n in range(written)]
    again.close()


def test_a_last_flush_writes_groups_once_the_disk_is_known_to_be_fast(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_thread, "LEAST_BYTES", 2 * FORMAT.page_bytes)
    assert bench.io.close([(key(n), n) for n in range(SLOTS)], budget_s=3.0) == SLOTS
    assert [n for _, n in bench.store.log] == [2, GROUP, GROUP, GROUP, 2]


def test_a_store_that_no_later_engine_can_use_is_emptied(bench: Bench) -> None:
    bench.demote(range(2))
    bench.reports()
    bench.io.close(discard=True)
    again = bench.open(b"f" * 16)
    assert len(again) == 0
    again.close()
