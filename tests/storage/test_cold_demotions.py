"""Compressed pages are demoted like others, and fail individually."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tiered_kv.codecs.base import Bytes, CodedPage, ElementType, EncodedPage, PageFormat
from tiered_kv.codecs.raw import NOTHING
from tiered_kv.codecs.registry import parse
from tiered_kv.keys import PageKey
from tiered_kv.orders import DemoteOrder, OrderId, OrderReport
from tiered_kv.pages.cold_pages import cold_place
from tiered_kv.storage import io_thread
from tiered_kv.storage.base import Pages
from tiered_kv.storage.io_thread import IoThread
from tiered_kv.testing.memory_store import MemoryStore
from tiered_kv.testing.stores import SSD

FORMAT = PageFormat(ElementType.OPAQUE, page_bytes=512, tokens=16)
ZSTD = parse("zstd")(FORMAT)
GROUP = 4


def key(n: int) -> PageKey:
    return PageKey(b"fingerprint-of-m" + n.to_bytes(32, "big"))


def page(n: int) -> Bytes:
    return np.random.default_rng(n).integers(0, 256, FORMAT.page_bytes, dtype=np.uint8)


class Store(MemoryStore):
    """A store that fails for chosen pages or calls."""

    def __init__(self) -> None:
        super().__init__({})
        self.refused = set[PageKey]()
        self.raises: str | None = None
        self.calls: list[str] = []
        self.gate: threading.Event | None = None

    def put(self, pages: Pages) -> frozenset[int]:
        self._begin("put", len(pages))
        return self._refuse(pages, super().put)

    def put_coded(self, pages: Sequence[tuple[PageKey, CodedPage]]) -> frozenset[int]:
        self._begin("put_coded", len(pages))
        decoded = list[tuple[PageKey, Bytes]]()
        for name, coded in pages:
            out = np.empty(FORMAT.page_bytes, np.uint8)
            coded.decode(out)
            decoded.append((name, out))
        return self._refuse(decoded, super().put)

    def _begin(self, call: str, count: int) -> None:
        if self.gate is not None:
            assert self.gate.wait(300)
        self.calls.append(f"{call} {count}")
        if self.raises == call:
            raise RuntimeError("injected")

    def _refuse(self, pages: Pages, put: Any) -> frozenset[int]:
        assert not put([one for one in pages if one[0] not in self.refused])
        return frozenset(i for i, (name, _) in enumerate(pages) if name in self.refused)

    def holds(self, n: int) -> bool:
        """Return True if the page exists. Asserts that it has the correct bytes."""
        out = np.zeros(FORMAT.page_bytes, np.uint8)
        if self.get([(key(n), out)]):
            return False
        assert np.array_equal(out, page(n)), "a wrong page"
        return True


class Bench:
    """An I/O thread over a store. Page ``n`` is in slot ``n``, or in a bundle that starts there."""

    def __init__(self) -> None:
        self.now = 100.0
        self.store = Store()
        self.slots = np.stack([page(n) for n in range(32)])
        self.cold: dict[tuple[PageKey, int], CodedPage | Exception | None] = {}
        self.io = IoThread(self.store, self.slots, lambda: self.now, self.find)
        self.orders = 0

    def find(self, name: PageKey, place: int) -> CodedPage | None:
        found = self.cold.get((name, place))
        if isinstance(found, Exception):
            raise found
        return found

    def place(self, n: int, what: str) -> int:
        """Put page ``n`` into its place, and return the place. The page is raw, or in a bundle that
        has it encoded, has it "as it is" (not encoded), lacks it or raises an error."""
        if what == "raw":
            return n
        self.slots[n] = 0xEE
        place = cold_place(n)
        if what == "coded":
            self.cold[key(n), place] = CodedPage(ZSTD, ZSTD.encode(page(n)))
        elif what == "as it is":
            self.cold[key(n), place] = CodedPage(None, EncodedPage(page(n), NOTHING))
        elif what == "raises":
            self.cold[key(n), place] = MemoryError()
        return place

    def demote(self, *whats: str) -> OrderReport:
        self.orders += 1
        places = tuple(self.place(n, what) for n, what in enumerate(whats))
        keys = tuple(map(key, range(len(whats))))
        order = DemoteOrder(OrderId(self.orders), SSD, keys, places, 0.0)
        self.io.submit(order)
        assert self.io.wait_idle(300)
        return self.io.take_reports()[order.order_id]

    def last(self, *whats: str) -> list[tuple[PageKey, int]]:
        return [(key(n), self.place(n, what)) for n, what in enumerate(whats)]

    def stored(self, count: int) -> list[int]:
        return [n for n in range(count) if self.store.holds(n)]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(io_thread, "GROUP_BYTES", GROUP * FORMAT.page_bytes)
    made = Bench()
    # The medium is also read after the thread has ended.
    made.store.close = lambda: None  # type: ignore[method-assign]
    yield made
    made.io.close()


def test_raw_and_compressed_pages_of_one_order_are_demoted_together(bench: Bench) -> None:
    report = bench.demote("coded", "raw", "as it is", "raw", "raw", "coded", "coded", "coded")
    assert report.failed == frozenset()
    assert report.nbytes == 8 * FORMAT.page_bytes
    assert bench.stored(8) == list(range(8))
    assert bench.store.calls == ["put 2", "put_coded 2", "put 1", "put_coded 3"]


def test_an_order_of_only_compressed_pages_needs_no_other_call(bench: Bench) -> None:
    assert bench.demote("coded", "coded").failed == frozenset()
    assert bench.store.calls == ["put_coded 2"]


def test_a_missing_compressed_page_fails_alone(bench: Bench) -> None:
    report = bench.demote("missing", "raw", "coded", "missing", "coded", "missing", "raw")
    assert report.failed == {0, 3, 5}
    assert report.nbytes == 4 * FORMAT.page_bytes
    assert bench.stored(7) == [1, 2, 4, 6]


def test_an_order_of_only_missing_pages_does_not_call_the_store(bench: Bench) -> None:
    assert bench.demote("missing", "missing").failed == {0, 1}
    assert bench.store.calls == []


def test_refused_pages_are_reported_by_their_position_in_the_order(bench: Bench) -> None:
    bench.store.refused = {key(1), key(4), key(6), key(7)}
    report = bench.demote(
        "coded", "coded", "raw", "missing", "raw", "raw", "coded", "as it is", "coded"
    )
    assert report.failed == {1, 3, 4, 6, 7}
    assert bench.stored(9) == [0, 2, 5, 8]


@pytest.mark.parametrize("call", ["put", "put_coded"])
def test_a_group_whose_call_fails_is_failed_and_the_next_one_is_not(
    bench: Bench, call: str
) -> None:
    bench.store.raises = call
    rest = ("raw", "raw") if call == "put_coded" else ("coded", "coded")
    assert bench.demote("raw", "coded", "raw", "coded", *rest).failed == {0, 1, 2, 3}
    assert bench.io.failures == 1
    bench.store.raises = None
    assert bench.demote("raw", "coded", "raw", "coded").failed == frozenset()


def test_a_failing_source_of_compressed_pages_fails_its_group(bench: Bench) -> None:
    report = bench.demote("raw", "raises", "raw", "raw", "coded", "raw")
    assert report.failed == {0, 1, 2, 3}
    assert bench.io.failures == 1


def test_a_reset_under_way_fails_cold_pages_too(bench: Bench) -> None:
    bench.store.gate = threading.Event()
    places = tuple(bench.place(n, "coded") for n in range(6))
    order = DemoteOrder(OrderId(1), SSD, tuple(map(key, range(6))), places, 0.0)
    bench.io.submit(order)
    fresh = Store()
    bench.io.replace_store(lambda: fresh)
    bench.store.gate.set()
    assert bench.io.wait_idle(300)
    assert bench.io.take_reports()[order.order_id].failed == frozenset(range(6))
    assert fresh.calls == []


# -- the last flush ---------------------------------------------------------------------


def test_the_last_flush_writes_cold_pages_too(bench: Bench) -> None:
    last = bench.last("coded", "raw", "missing", "coded", "as it is", "raw", "coded")
    assert bench.io.close(last, budget_s=10.0) == 6
    assert bench.stored(7) == [0, 1, 3, 4, 5, 6]


def test_a_last_flush_does_not_stop_at_a_missing_bundle(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last flush has five missing pages and two others. Both are stored, because missing pages
    do not count as failures of the store."""
    monkeypatch.setattr(io_thread, "LEAST_BYTES", FORMAT.page_bytes)
    last = bench.last("missing", "missing", "coded", "missing", "missing", "missing", "raw")
    assert bench.io.close(last, budget_s=10.0) == 2
    assert bench.stored(7) == [2, 6]


def test_a_last_flush_stops_if_the_store_accepts_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_thread, "LEAST_BYTES", 2 * FORMAT.page_bytes)
    bench.store.refused = set(map(key, range(32)))
    last = bench.last(*["missing", "missing", "coded", "missing"], *["raw"] * 8)
    assert bench.io.close(last, budget_s=10.0) == 0
    assert bench.store.calls == ["put_coded 1"]


def test_a_last_flush_stays_within_its_time_despite_missing_pages(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last flush to a slow disk begins with missing pages. It exceeds its time by one page at
    most, because missing pages do not count when the disk's speed is measured."""
    monkeypatch.setattr(io_thread, "LEAST_BYTES", FORMAT.page_bytes)
    put = bench.store.put

    def slowly(pages: Pages) -> frozenset[int]:
        bench.now += len(pages)
        return put(pages)

    monkeypatch.setattr(bench.store, "put", slowly)
    last = bench.last(*["missing"] * 4, *["raw"] * 20)
    began = bench.now
    assert bench.io.close(last, budget_s=3.0) >= 3
    assert bench.now - began <= 4.0, "one page more at most, not a group"
