"""The conformance suite of page stores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import pytest

from tiered_kv.codecs.base import Bytes, Codec, CodedPage, ElementType, EncodedPage, PageFormat
from tiered_kv.codecs.raw import NOTHING, RawCodec
from tiered_kv.codecs.registry import parse
from tiered_kv.keys import PageKey
from tiered_kv.metrics import COUNTERS
from tiered_kv.storage.base import PageStore
from tiered_kv.tiers import Knowledge

FINGERPRINT = bytes(range(16))
PAGE_FORMAT = PageFormat(ElementType.BF16, page_bytes=4096, tokens=16)
ZSTD = parse("zstd")(PAGE_FORMAT)

S = TypeVar("S", bound=PageStore)


def page_key(name: int, fingerprint: bytes = FINGERPRINT) -> PageKey:
    return PageKey(fingerprint + name.to_bytes(32, "big"))


def page_bytes(key: PageKey, version: int = 0, nbytes: int = PAGE_FORMAT.page_bytes) -> Bytes:
    """Return the page of a key, of ``nbytes`` bytes. Each key and version has a different page."""
    seed = int.from_bytes(key, "big") * 1000 + version
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def coded_page(key: PageKey, codec: Codec | None, version: int = 0) -> CodedPage:
    """Return the page of a key, encoded by the codec, or the raw page if the codec is None."""
    page = page_bytes(key, version)
    return CodedPage(codec, EncodedPage(page, NOTHING) if codec is None else codec.encode(page))


@dataclass
class StoreBench(Generic[S]):
    """A store that can be reopened repeatedly, and the pages that it should contain.

    Attributes:
        make: opens the store.
        knowledge: the side that knows which pages the store has.
        expected: pages that were put and not removed, by key.
        store: the open store.
    """

    make: Callable[[], S]
    knowledge: Knowledge = Knowledge.KNOWN
    expected: dict[PageKey, Bytes] = field(default_factory=dict)
    store: S = field(init=False)

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.store = self.make()

    def reopen(self) -> None:
        self.store.close()
        self.open()

    def put(self, *names: int, version: int = 0) -> list[PageKey]:
        """Store pages, and return their keys. The store must accept all of them."""
        keys = [page_key(name) for name in names]
        pages = [(key, page_bytes(key, version)) for key in keys]
        assert self.store.put(pages) == frozenset()
        self.expected.update(pages)
        return keys

    def put_coded(self, *names: int, codecs: Sequence[Codec | None], version: int = 0) -> None:
        """Store encoded pages with alternating codecs. The store must accept all of them."""
        keys = [page_key(name) for name in names]
        by_turns = zip(keys, cycle(codecs), strict=False)
        pages = [(key, coded_page(key, codec, version)) for key, codec in by_turns]
        assert self.store.put_coded(pages) == frozenset()
        self.expected.update((key, page_bytes(key, version)) for key in keys)

    def drop(self, keys: Iterable[PageKey]) -> None:
        keys = list(keys)
        self.store.drop(keys)
        for key in keys:
            self.expected.pop(key, None)

    def read(self, keys: Iterable[PageKey]) -> dict[PageKey, Bytes]:
        """Return the readable pages, by key."""
        wanted = [(key, np.zeros(PAGE_FORMAT.page_bytes, np.uint8)) for key in keys]
        failed = self.store.get(wanted)
        return {key: out for i, (key, out) in enumerate(wanted) if i not in failed}

    def check(self) -> None:
        """Check that the store has all expected pages, complete, and no other pages."""
        found = self.read(self.expected)
        assert found.keys() == self.expected.keys()
        for key, page in self.expected.items():
            assert np.array_equal(found[key], page), "a wrong page"
        assert self.store.exists(list(self.expected), 60.0) == frozenset()
        known = set(self.expected) if self.knowledge is Knowledge.KNOWN else set()
        assert set(self.store.keys()) == known


class StoreConformance:
    """Conformance suite of page stores. Create a subclass, name it ``Test…`` and define
    ``make_store``.

    Attributes:
        knowledge: the side that knows which pages the store has.
        lasts: True if a store that is opened later finds the pages.
    """

    knowledge = Knowledge.KNOWN
    lasts = True

    def make_store(self, root: Path) -> PageStore:
        """Return the store under test, for pages of ``PAGE_FORMAT``.

        Stores with the same root share their pages. At most one of them is open.
        """
        raise NotImplementedError

    def damage(self, root: Path, key: PageKey) -> None:
        """Change a stored byte of a page while the store is open. The default implementation skips
        the test."""
        pytest.skip("tests cannot reach the stored bytes of this store")

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[StoreBench[PageStore]]:
        bench = StoreBench(lambda: self.make_store(tmp_path / "root"), self.knowledge)
        yield bench
        bench.store.close()

    # -- pages come back ------------------------------------------------------------

    def test_pages_come_back_bit_for_bit(self, bench: StoreBench[PageStore]) -> None:
        bench.put(*range(40))
        bench.check()

    def test_pages_come_back_after_a_restart(self, bench: StoreBench[PageStore]) -> None:
        if not self.lasts:
            pytest.skip("pages are lost when the store is closed")
        bench.put(*range(20))
        bench.put(*range(20, 45))
        bench.reopen()
        bench.check()
        bench.put(100)
        bench.reopen()
        bench.check()

    def test_a_page_alone_and_a_page_of_zeros_come_back(self, bench: StoreBench[PageStore]) -> None:
        (key,) = bench.put(1)
        zeros = np.zeros(PAGE_FORMAT.page_bytes, np.uint8)
        assert not bench.store.put([(page_key(2), zeros)])
        bench.expected[page_key(2)] = zeros
        bench.check()
        assert list(bench.read([key])) == [key]

    def test_pages_come_back_in_any_order_and_more_than_once(
        self, bench: StoreBench[PageStore]
    ) -> None:
        keys = bench.put(*range(40))
        order = [keys[i] for i in (3, 3, 39, 0, 17, 16, 18, 3)]
        wanted = [(key, np.zeros(PAGE_FORMAT.page_bytes, np.uint8)) for key in order]

        assert bench.store.get(wanted) == frozenset()

        for key, out in wanted:
            assert np.array_equal(out, bench.expected[key])

    def test_a_page_may_change_once_it_is_put(self, bench: StoreBench[PageStore]) -> None:
        """The caller may reuse the slots that contain the pages immediately after the put."""
        slots = np.stack([page_bytes(page_key(name)) for name in range(8)])
        assert not bench.store.put([(page_key(name), slots[name]) for name in range(8)])
        slots[:] = 0xA5
        bench.expected = {page_key(name): page_bytes(page_key(name)) for name in range(8)}
        bench.check()

    def test_a_get_writes_to_its_own_slots_alone(self, bench: StoreBench[PageStore]) -> None:
        keys = bench.put(*range(8))
        slots = np.full((10, PAGE_FORMAT.page_bytes), 0xA5, np.uint8)
        assert bench.store.get([(keys[i], slots[1 + i]) for i in range(8)]) == frozenset()
        assert (slots[[0, 9]] == 0xA5).all()
        assert all(np.array_equal(slots[1 + i], bench.expected[keys[i]]) for i in range(8))

    def test_an_absent_page_fails_and_the_others_do_not(self, bench: StoreBench[PageStore]) -> None:
        keys = bench.put(1, 2)
        pages = [keys[0], page_key(9), keys[1]]
        wanted = [(key, np.zeros(PAGE_FORMAT.page_bytes, np.uint8)) for key in pages]

        assert bench.store.get(wanted) == {1}

        assert np.array_equal(wanted[0][1], bench.expected[keys[0]])
        assert np.array_equal(wanted[2][1], bench.expected[keys[1]])

    def test_a_question_is_answered_page_by_page(self, bench: StoreBench[PageStore]) -> None:
        keys = bench.put(1, 2)
        asked = [page_key(9), keys[0], page_key(8), keys[1], keys[0]]
        assert bench.store.exists(asked, 60.0) == {0, 2}
        assert bench.store.exists([], 0.0) == frozenset()

    def test_a_damaged_page_is_never_served(
        self, bench: StoreBench[PageStore], tmp_path: Path
    ) -> None:
        keys = bench.put(*range(9))
        self.damage(tmp_path / "root", keys[4])
        del bench.expected[keys[4]]
        assert bench.read(keys).keys() == bench.expected.keys()
        bench.drop([keys[4]])
        bench.check()
        bench.put(4)
        bench.check()

    def test_the_newer_page_wins(self, bench: StoreBench[PageStore]) -> None:
        bench.put(*range(10))
        bench.put(*range(5), version=1)
        bench.check()
        if self.lasts:
            bench.reopen()
            bench.check()

    def test_of_a_key_given_twice_the_last_page_is_stored(
        self, bench: StoreBench[PageStore]
    ) -> None:
        key = page_key(1)
        pages = [(key, page_bytes(key, version)) for version in range(3)]
        assert bench.store.put(pages) == frozenset()
        bench.expected[key] = pages[-1][1]
        bench.check()

    def test_keys_of_all_lengths_are_told_apart(self, bench: StoreBench[PageStore]) -> None:
        keys = [PageKey(FINGERPRINT + b"k" * n) for n in (0, 1, 32, 64, 239)]
        pages = [(key, page_bytes(key)) for key in keys]
        assert bench.store.put(pages) == frozenset()
        bench.expected.update(pages)
        bench.check()

    def test_pages_of_other_fingerprints_share_a_store(self, bench: StoreBench[PageStore]) -> None:
        keys = [page_key(1), page_key(1, b"adapter" + bytes(9))]
        pages = [(key, page_bytes(key)) for key in keys]
        assert bench.store.put(pages) == frozenset()
        bench.expected.update(pages)
        bench.check()

    def test_nothing_to_do_is_done(self, bench: StoreBench[PageStore]) -> None:
        assert bench.store.put([]) == bench.store.put_coded([]) == frozenset()
        assert bench.store.get([]) == frozenset()
        bench.store.drop([page_key(1)])
        assert bench.store.proposal() is None
        bench.check()

    # -- pages that are encoded already ---------------------------------------------

    def test_coded_pages_come_back_bit_for_bit(self, bench: StoreBench[PageStore]) -> None:
        for at in (0, 100, 200):
            own = bench.store.codec_of_new_pages
            for i, codec in enumerate((own, RawCodec(PAGE_FORMAT), ZSTD, None)):
                bench.put_coded(*range(at + 10 * i, at + 10 * i + 10), codecs=[codec])
            mixed = [own, ZSTD, None, RawCodec(PAGE_FORMAT), own]
            bench.put_coded(*range(at + 40, at + 60), codecs=mixed)
            bench.check()
            bench.put(*range(at + 60, at + 80))
            bench.check()
            if self.lasts:
                bench.reopen()
        bench.check()

    def test_a_coded_page_that_cannot_be_decoded_fails_alone(
        self, bench: StoreBench[PageStore]
    ) -> None:
        bench.put(*range(20))
        torn = coded_page(page_key(32), ZSTD).page
        pages = [(key, coded_page(key, ZSTD)) for key in map(page_key, range(30, 35))]
        pages[2] = (pages[2][0], CodedPage(ZSTD, EncodedPage(torn.plane, torn.frame[:-9])))
        pages[4] = (page_key(7), CodedPage(ZSTD, EncodedPage(NOTHING, NOTHING)))

        assert bench.store.put_coded(pages) == {2, 4}

        good = [page_key(name) for name in (30, 31, 33)]
        bench.expected.update((key, page_bytes(key)) for key in good)
        bench.check()

    def test_of_a_coded_page_given_twice_the_last_one_is_stored(
        self, bench: StoreBench[PageStore]
    ) -> None:
        bench.put(*range(20))
        for name, codec in enumerate((bench.store.codec_of_new_pages, ZSTD, None)):
            key = page_key(name)
            pages = [(key, coded_page(key, codec, version)) for version in (1, 2, 3)]
            assert bench.store.put_coded(pages) == frozenset()
            bench.expected[key] = page_bytes(key, 3)
        bench.check()

    # -- the facts that others read -----------------------------------------------

    def test_keys_are_listed_oldest_first(self, bench: StoreBench[PageStore]) -> None:
        if self.knowledge is Knowledge.ASKED:
            pytest.skip("the store does not list its pages")
        keys = bench.put(*range(30))
        bench.put(3, version=1)
        order = [key for key in keys if key != keys[3]] + [keys[3]]
        assert list(bench.store.keys()) == order
        if self.lasts:
            bench.reopen()
            assert list(bench.store.keys()) == order

    def test_counters_are_known_and_rise(self, bench: StoreBench[PageStore]) -> None:
        before = dict(bench.store.counters())
        assert before.keys() <= COUNTERS.keys()
        bench.read(bench.put(*range(20)))
        after = bench.store.counters()
        assert after.keys() == before.keys()
        assert all(after[name] >= count for name, count in before.items())

    def test_a_group_has_room_for_a_page(self, bench: StoreBench[PageStore]) -> None:
        most = bench.store.group_bytes
        assert most is None or most >= PAGE_FORMAT.page_bytes
        assert bench.store.stored_bytes == 0
        bench.put(1)
        assert bench.store.stored_bytes >= 0

    # -- pages go -------------------------------------------------------------------

    def test_a_dropped_page_is_gone(self, bench: StoreBench[PageStore]) -> None:
        keys = bench.put(*range(10))
        bench.drop(keys[2:5])
        bench.check()
        assert bench.read(keys[2:5]) == {}
        assert bench.store.exists(keys, 60.0) == {2, 3, 4}

    def test_a_reclaimed_segment_leaves_its_survivors(self, bench: StoreBench[PageStore]) -> None:
        for name in range(0, 3000, 5):
            bench.put(*range(name, name + 5))
            if (proposal := bench.store.proposal()) is not None:
                break
        else:
            pytest.skip("this store proposes nothing")
        assert bench.store.proposal() == proposal, "proposing changes nothing"
        assert set(proposal.keys) <= set(bench.expected)
        survivors = set(proposal.keys[::3])

        gone = bench.store.reclaim(proposal.segment, survivors)

        assert set(gone) == set(proposal.keys) - survivors
        for key in gone:
            del bench.expected[key]
        bench.check()
        assert list(bench.store.reclaim(proposal.segment, [])) == [], (
            "the segment is already deleted"
        )
        if self.lasts:
            bench.reopen()
        bench.check()

    def test_a_cleared_store_is_empty_for_ever(self, bench: StoreBench[PageStore]) -> None:
        keys = bench.put(*range(50))
        bench.store.clear()
        bench.expected.clear()
        bench.check()
        assert bench.read(keys) == {}
        assert bench.store.exists(keys, 60.0) == frozenset(range(50))
        bench.put(1, version=1)
        bench.check()
        if self.lasts:
            bench.reopen()
            bench.check()
            assert bench.read(keys).keys() == {page_key(1)}

    # -- the end --------------------------------------------------------------------

    def test_a_closed_store_has_nothing_and_takes_nothing(
        self, bench: StoreBench[PageStore]
    ) -> None:
        (key,), own = bench.put(1), bench.store.codec_of_new_pages
        bench.store.close()
        bench.store.close()
        pages = [(key, page_bytes(key)), (page_key(2), page_bytes(page_key(2)))]
        assert bench.store.put(pages) == {0, 1}
        assert bench.store.get(pages) == {0, 1}
        assert bench.store.exists([key], 60.0) == {0}
        for codec in (own, ZSTD, None):
            coded = [(key, coded_page(key, codec)) for key, _ in pages]
            assert bench.store.put_coded(coded) == {0, 1}
        assert bench.store.put([]) == bench.store.get([]) == frozenset()
        assert list(bench.store.keys()) == []
        assert bench.store.proposal() is None
        bench.store.drop([key])
        bench.open()
        if self.lasts:
            bench.check()

    def test_a_closed_store_leaves_no_thread(self, bench: StoreBench[PageStore]) -> None:
        bench.store.close()
        before = set(threading.enumerate())
        bench.open()
        bench.read(bench.put(*range(20)))
        bench.store.close()
        assert set(threading.enumerate()) <= before
