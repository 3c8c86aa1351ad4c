"""Conformance of the page stores other than the segment store, including faulty ones."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.codecs.base import Bytes
from tiered_kv.keys import PageKey
from tiered_kv.orders import DemoteOrder, OrderId, PromoteOrder
from tiered_kv.page_group import CONTEXT
from tiered_kv.storage.io_thread import IoThread
from tiered_kv.testing.conformance.store import PAGE_FORMAT, StoreConformance, page_bytes, page_key
from tiered_kv.testing.memory_store import FaultyStore, MemoryStore, Pages, StoredPage
from tiered_kv.tiers import StoreId, TierId

SHARED = StoreId(TierId("shared"), CONTEXT)
KEYS = [page_key(name) for name in range(4)]


class TestMemoryStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def media(self) -> None:
        self.pages: dict[Path, Pages] = {}

    def make_store(self, root: Path) -> MemoryStore:
        return MemoryStore(self.pages.setdefault(root, {}))

    def damage(self, root: Path, key: PageKey) -> None:
        stored = self.pages[root][key]
        self.pages[root][key] = StoredPage(stored.data[:-1] + b"?", stored.digest)


class TestFaultyStoreWithoutFaults(TestMemoryStore):
    knowledge = FaultyStore.knowledge

    def make_store(self, root: Path) -> FaultyStore:
        return FaultyStore(self.pages.setdefault(root, {}))


class TestSlowStore(TestFaultyStoreWithoutFaults):
    def make_store(self, root: Path) -> FaultyStore:
        return FaultyStore(self.pages.setdefault(root, {}), latency_s=0.002)


# -- faults -----------------------------------------------------------------------


@pytest.fixture
def pages() -> Pages:
    """Return a medium that contains the pages of another engine."""
    medium: Pages = {}
    assert not FaultyStore(medium).put([(key, page_bytes(key)) for key in KEYS])
    return medium


def slots(count: int = len(KEYS)) -> list[tuple[PageKey, Bytes]]:
    return [(key, np.full(PAGE_FORMAT.page_bytes, 0xA5, np.uint8)) for key in KEYS[:count]]


def test_a_page_that_one_rank_lacks_is_absent_only_there(pages: Pages) -> None:
    lacking, whole = FaultyStore(pages, missing=KEYS[1:2]), FaultyStore(pages)
    assert lacking.exists(KEYS, 1.0) == lacking.get(slots()) == {1}
    assert whole.exists(KEYS, 1.0) == whole.get(slots()) == frozenset()


def test_wrong_bytes_are_detected_and_never_reach_the_slot(pages: Pages) -> None:
    store, wanted = FaultyStore(pages, corrupt=KEYS[2:]), slots()
    assert store.exists(KEYS, 1.0) == frozenset(), "the name is there"
    assert store.get(wanted) == {2, 3}
    assert all((wanted[i][1] == 0xA5).all() for i in (2, 3))
    assert np.array_equal(wanted[0][1], page_bytes(KEYS[0]))


def test_a_late_answer_is_ignored(pages: Pages) -> None:
    store = FaultyStore(pages, latency_s=60.0, timeout_s=0.01)
    began = time.monotonic()
    assert store.exists(KEYS, 0.01) == frozenset(range(4))
    assert store.get(slots()) == store.put(slots()) == frozenset(range(4))
    assert time.monotonic() - began < 30


def test_a_page_that_hangs_never_arrives_in_its_slot_later(pages: Pages) -> None:
    hang = threading.Event()
    store, wanted = FaultyStore(pages, hang=hang, timeout_s=0.01), slots()
    assert store.exists(KEYS, 0.01) == frozenset(range(4))
    assert store.get(wanted) == frozenset(range(4))
    hang.set()
    assert store.get(slots(1)) == frozenset()
    assert all((out == 0xA5).all() for _, out in wanted)


def test_a_reset_leaves_the_pages_of_other_engines(pages: Pages) -> None:
    store, own = FaultyStore(pages), page_key(99)
    store.put([(own, page_bytes(own))])
    store.clear()
    assert store.exists([*KEYS, own], 1.0) == {4}


# -- the I/O thread on such a store ---------------------------------------------------


def test_an_order_is_reported_once_its_store_has_answered_and_not_before(pages: Pages) -> None:
    """An order is not reported while its store hangs. Its slots stay reserved until the store
    answers, because pages may still arrive in them."""
    hang = threading.Event()
    memory = np.full((len(KEYS), PAGE_FORMAT.page_bytes), 0xA5, np.uint8)
    io = IoThread(FaultyStore(pages, hang=hang, timeout_s=300.0, missing=KEYS[3:]), memory)
    try:
        io.submit(PromoteOrder(OrderId(1), SHARED, tuple(KEYS), (0, 1, 2, 3), 0.0))
        assert not io.wait_idle(0.05)
        assert io.take_reports() == {}
        hang.set()
        assert io.wait_idle(300)
        assert io.take_reports()[OrderId(1)].failed == {3}
        assert all(np.array_equal(memory[i], page_bytes(KEYS[i])) for i in range(3))
    finally:
        hang.set()
        io.close()


def test_any_store_serves_the_io_thread() -> None:
    medium: Pages = {}
    memory = np.stack([page_bytes(key) for key in KEYS])
    io = IoThread(MemoryStore(medium), memory)
    io.submit(DemoteOrder(OrderId(1), SHARED, tuple(KEYS[:2]), (0, 1), 0.0))
    assert io.wait_idle(300)
    assert io.take_reports()[OrderId(1)].failed == frozenset()
    assert io.proposal is None
    assert io.close([(KEYS[2], 2)], budget_s=10.0) == 1
    assert list(medium) == KEYS[:3]
