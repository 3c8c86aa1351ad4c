"""The final flush: pages that exist only in slots and bundles are written under their own key, or
not at all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tiered_kv.codecs.base import Bytes, ElementType, PageFormat
from tiered_kv.codecs.registry import parse
from tiered_kv.connectors.runtime.worker.tier_worker import TierWorker
from tiered_kv.keys import PageKey
from tiered_kv.messages import TierOrders
from tiered_kv.orders import OrderId, OrderReport, PackOrder, SaveOrder
from tiered_kv.page_group import CONTEXT
from tiered_kv.pages.base import PageState
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.policies.cache.lru import LeastRecentlyUsed
from tiered_kv.storage.base import PageStore
from tiered_kv.storage.bundles import Bundles
from tiered_kv.testing.memory_store import MemoryStore, StoredPage
from tiered_kv.tiers import TierId, TierSpec

FORMAT = PageFormat(ElementType.OPAQUE, page_bytes=256, tokens=16)
SLOT_BYTES = 300
NUM_SLOTS = 12


def key(n: int) -> PageKey:
    return PageKey(b"fingerprint-of-m" + n.to_bytes(32, "big"))


def page(name: PageKey) -> Bytes:
    """Return the only right page of a key. Two of three pages can be compressed to less than half
    their size."""
    rng = np.random.default_rng(list(name))
    made = np.full(FORMAT.page_bytes, name[-1], np.uint8)
    noisy = FORMAT.page_bytes if name[-1] % 3 == 0 else FORMAT.page_bytes // 4
    made[:noisy] = rng.integers(0, 256, noisy, dtype=np.uint8)
    return made


class Tier:
    """A tier whose medium the test can read."""

    spec = TierSpec(TierId("ssd"))
    bandwidth = 1e9

    def __init__(self) -> None:
        self.pages: dict[PageKey, StoredPage] = {}

    def open(self, site: Any) -> PageStore:
        return MemoryStore(self.pages)


class Worker:
    """One rank: slots, bundles, and the tier below them, without copy threads."""

    def __init__(self, group: int = CONTEXT) -> None:
        self.slots: NDArray[np.uint8] = np.full((NUM_SLOTS, SLOT_BYTES), 0xEE, np.uint8)
        self.bundles = Bundles(self.slots, parse("zstd")(FORMAT))
        self.medium = Tier()
        facts: Any = SimpleNamespace(
            groups=[SimpleNamespace(page_format=FORMAT, page_bytes=FORMAT.page_bytes)] * 2,
            ranks=1,
            replica=0,
        )
        fingerprint: Any = SimpleNamespace(digest=lambda: b"f" * 16, lasting=True)
        pool: Any = SimpleNamespace(slots=self.slots)
        self.tier = TierWorker(
            self.medium, group, facts, 0, fingerprint, pool, self.bundles, lambda: 0.0
        )
        self.orders = 0

    def number(self) -> OrderId:
        self.orders += 1
        return OrderId(self.orders)

    def overwrite(self, *slots: int) -> None:
        """Announce that the slots will be reused, then overwrite them."""
        self.tier.forget_slots(slots)
        self.slots[list(slots)] = 0xDD

    def save(self, pages: dict[int, int], wrong: bool = False, failed: frozenset[int] = frozenset()
             ) -> SaveOrder:  # fmt: skip
        """Save page ``n`` to slot ``pages[n]``."""
        keys, slots = tuple(map(key, pages)), tuple(pages.values())
        order = SaveOrder(self.number(), CONTEXT, slots, slots, keys)
        self.copy(order, wrong, failed)
        return order

    def copy(self, order: SaveOrder, wrong: bool, failed: frozenset[int]) -> None:
        self.overwrite(*order.slots)
        for i, (name, slot) in enumerate(zip(order.keys, order.slots, strict=True)):
            if i not in failed:
                self.slots[slot, : FORMAT.page_bytes] = page(name) ^ wrong
        self.tier.saved(order, failed)

    def pack(self, pages: dict[int, int], group: int = CONTEXT) -> int:
        """Compress page ``n`` in slot ``pages[n]``. Returns the number of slots that the bundle
        occupies."""
        order = PackOrder(self.number(), group, tuple(pages.values()), tuple(map(key, pages)))
        self.tier.packed(order)
        return self.compress(order)

    def compress(self, order: PackOrder) -> int:
        if order.group != CONTEXT:
            self.slots[list(order.slots)] = 0xCC
            return len(order.slots)
        return self.bundles.pack(order.keys, order.slots, map)

    def invalidate(self, *orders: SaveOrder) -> None:
        self.tier.carry_out(TierOrders(invalidated=tuple(one.order_id for one in orders)))

    def flushed(self) -> set[int]:
        """Close the worker, and return the pages in the tier. Asserts that all of them are
        right."""
        self.tier.close()
        for name, stored in self.medium.pages.items():
            assert stored.data == page(name).tobytes(), "garbage under a key"
        return {name[-1] for name in self.medium.pages}


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.tier.close()


def test_a_save_invalidated_before_its_copy_is_not_flushed(worker: Worker) -> None:
    """The worker keeps no record of an invalidated save, because an engine that runs for months has
    many of them."""
    for _ in range(100):
        late = SaveOrder(worker.number(), CONTEXT, (3,), (3,), (key(1),))
        worker.save({4: 5})
        worker.invalidate(late)
        worker.copy(late, wrong=True, failed=frozenset())
    worker.save({7: 1})
    kept = [one for one in vars(worker.tier).values() if isinstance(one, set | list | dict)]
    assert max(map(len, kept)) <= NUM_SLOTS
    assert worker.flushed() == {4, 7}


def test_pages_in_the_tier_are_not_written_again(worker: Worker) -> None:
    worker.save({1: 3, 2: 4, 4: 5})
    worker.pack({1: 3, 2: 4})
    worker.medium.pages[key(1)] = StoredPage.of(page(key(1)).tobytes())
    before = worker.medium.pages[key(1)]
    assert worker.flushed() == {1, 2, 4}
    assert worker.medium.pages[key(1)] is before


def test_a_promoted_page_is_not_flushed_from_its_bundle(worker: Worker) -> None:
    """A promoted page is compressed together with a saved one. It is not written at the end,
    because the lower tier has it already or has dropped it since."""
    worker.save({1: 3})
    worker.overwrite(4)
    worker.slots[4, : FORMAT.page_bytes] = page(key(2))
    worker.pack({1: 3, 2: 4})
    assert worker.flushed() == {1}


def test_saves_invalidated_before_they_end_are_not_flushed(worker: Worker) -> None:
    wrong = SaveOrder(worker.number(), CONTEXT, (2, 3), (2, 3), (key(4), key(5)))
    worker.invalidate(wrong)
    worker.copy(wrong, wrong=True, failed=frozenset())
    worker.save({1: 0})
    worker.pack({1: 0, 4: 2, 5: 3})
    assert worker.flushed() == {1}


def test_slots_of_another_group_are_not_flushed_under_our_keys(worker: Worker) -> None:
    """Groups share the pool, so a bundle of another group may use the slots of an earlier bundle.
    Its bytes are not written under the earlier keys."""
    pages = {1: 0, 2: 1, 4: 2, 5: 3}
    worker.save(pages)
    worker.pack(pages)
    worker.save({10: 7})
    worker.tier.forget_slots((0, 1, 2, 3))
    worker.pack({20: 0, 21: 1, 22: 7}, group=1)
    assert worker.flushed() == set()


def test_pages_from_before_a_reset_are_not_flushed(worker: Worker) -> None:
    worker.save({1: 0, 2: 1})
    worker.pack({1: 0, 2: 1})
    worker.tier.carry_out(TierOrders(fingerprint=b"g" * 16))
    assert worker.tier.io.wait_idle(300)
    worker.save({4: 5, 5: 6})
    worker.pack({4: 5, 5: 6})
    assert worker.flushed() == set(), "nobody would find them"


@pytest.mark.parametrize("seed", range(25))
def test_random_orders_flush_no_garbage_and_lose_no_page(seed: int) -> None:
    script = _Script(random.Random(seed))
    try:
        for _ in range(150):
            script.act()
        script.end()
    finally:
        script.worker.tier.close()


class _Script:
    """A scheduler that acts at random, and a worker that executes its orders."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.worker = rng, Worker()
        self.index = PageIndex(NUM_SLOTS, LeastRecentlyUsed())
        self.book = OrderBook(self.index, 1, [FORMAT.page_bytes], 1e9)
        self.packing: list[PackOrder] = []
        self.wrong: dict[OrderId, tuple[PageKey, ...]] = {}

    def act(self) -> None:
        acts = [self.save] * 4 + [self.pack] * 3 + [self.end_pack] * 3
        self.rng.choice([*acts, self.forget, self.read, self.invalidate])()

    def save(self) -> None:
        keys = [key(n) for n in self.rng.sample(range(20), self.rng.randint(1, 5))]
        order = self.book.plan_save(dict.fromkeys(keys, 0))
        if order is None:
            return
        wrong = self.rng.random() < 0.2
        bad = range(len(order.keys)) if self.rng.random() < 0.2 else ()
        failed = frozenset(i for i in bad if self.rng.random() < 0.5)
        self.worker.copy(order, wrong, failed)
        if wrong:
            self.wrong[order.order_id] = order.keys
        self.book.settle({order.order_id: OrderReport(1, failed, 0, 0.0)})

    def idle(self) -> list[PageKey]:
        return [k for k in map(key, range(20)) if self.index.state(k) is PageState.RESIDENT]

    def pack(self) -> None:
        idle = self.idle()
        keys = self.rng.sample(idle, min(len(idle), self.rng.randint(2, 6)))
        if keys:
            order = self.book.plan_pack(keys, CONTEXT)
            self.worker.tier.packed(order)
            self.packing.append(order)

    def end_pack(self) -> None:
        if not self.packing:
            return
        order = self.packing.pop(0)
        if self.rng.random() < 0.15:
            self.worker.slots[list(order.slots)] = 0xBB
            report = OrderReport(1, frozenset(range(len(order.keys))), 0, 0.0)
        else:
            report = OrderReport(1, frozenset(), 0, 0.0, self.worker.compress(order))
        self.book.settle({order.order_id: report})

    def forget(self) -> None:
        self.index.forget(key(self.rng.randrange(20)))

    def read(self) -> None:
        name = key(self.rng.randrange(20))
        if self.index.readable(name):
            self.index.release(name, self.index.acquire(name))

    def invalidate(self) -> None:
        if self.wrong:
            order_id = self.rng.choice(list(self.wrong))
            for name in self.wrong.pop(order_id):
                self.index.forget(name)
            self.worker.tier.carry_out(TierOrders(invalidated=(order_id,)))

    def end(self) -> None:
        """Close the worker. Every page that is still readable must be flushed, and no wrong
        page."""
        while self.packing:
            self.end_pack()
        while self.wrong:
            self.invalidate()
        self.index.check_integrity()
        readable = {n for n in range(20) if self.index.readable(key(n))}
        assert readable <= self.worker.flushed()
