"""The conformance suite of codecs in a store, and of the store with any codec."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiered_kv.codecs.base import Bytes, Codec, CodecError, ElementType, EncodedPage, PageFormat
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.files import FileLayer, RealFiles
from tiered_kv.storage.store.locks import StoreBusyError, StoreError
from tiered_kv.storage.store.options import StoreOptions
from tiered_kv.storage.store.store import SegmentStore

FINGERPRINT = bytes(range(16))
PAGE_FORMAT = PageFormat(ElementType.BF16, page_bytes=4096, tokens=16)


def page_key(name: int, fingerprint: bytes = FINGERPRINT) -> PageKey:
    return PageKey(fingerprint + name.to_bytes(32, "big"))


def page_bytes(key: PageKey, version: int = 0, nbytes: int = PAGE_FORMAT.page_bytes) -> Bytes:
    """The page of a key: another one for each key and version."""
    seed = int.from_bytes(key, "big") * 1000 + version
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def store_options(root: Path, **changes: object) -> StoreOptions:
    """A small store: sixteen segments of about eight to thirty pages."""
    options = StoreOptions(
        root=root,
        fingerprint=FINGERPRINT,
        replica=0,
        rank=0,
        ranks=1,
        page_format=PAGE_FORMAT,
        capacity_bytes=4 << 20,
        io_threads=2,
    )
    return replace(options, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ToyCodec:
    """Keeps the even bytes as they are, calls the odd ones a frame, and adds what it learnt."""

    page_format: PageFormat
    table: bytes = b""
    codec_id = 65000
    name = "toy"

    @property
    def wants_training(self) -> bool:
        return not self.table

    def encode(self, page: Bytes) -> EncodedPage:
        return EncodedPage(page[::2] + self._shift, page[1::2] + self._shift)

    def decode(self, encoded: EncodedPage, out: Bytes) -> None:
        if encoded.nbytes != out.nbytes or encoded.plane.nbytes != encoded.frame.nbytes:
            raise CodecError("no page of this codec")
        out[::2] = encoded.plane - self._shift
        out[1::2] = encoded.frame - self._shift

    def trained(self, pages: list[Bytes]) -> Codec:
        return ToyCodec(self.page_format, bytes([1 + len(pages) % 255]) * 5000)

    @property
    def _shift(self) -> np.uint8:
        return np.uint8(self.table[0] if self.table else 0)


@dataclass
class StoreBench:
    """A store that is opened again and again, and what must be in it.

    Attributes:
        expected: pages put and not taken away.
    """

    suite: StoreConformance
    options: StoreOptions
    files: FileLayer | None = None
    expected: dict[PageKey, Bytes] = field(default_factory=dict)
    store: SegmentStore = field(init=False)

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.store = self.suite.make_store(self.options, self.files)

    def reopen(self) -> None:
        self.store.close()
        self.open()

    def put(self, *names: int, version: int = 0) -> list[PageKey]:
        """Store pages that must all be taken."""
        keys = [page_key(name) for name in names]
        pages = [(key, page_bytes(key, version)) for key in keys]
        assert self.store.put(pages) == frozenset()
        self.expected.update(pages)
        return keys

    def drop(self, keys: Iterable[PageKey]) -> None:
        keys = list(keys)
        self.store.drop(keys)
        for key in keys:
            self.expected.pop(key, None)

    def read(self, keys: Iterable[PageKey]) -> dict[PageKey, Bytes]:
        """Pages by key, those left out that cannot be read."""
        wanted = [(key, np.zeros(PAGE_FORMAT.page_bytes, np.uint8)) for key in keys]
        failed = self.store.get(wanted)
        return {key: out for i, (key, out) in enumerate(wanted) if i not in failed}

    def check(self) -> None:
        """Everything expected is there, in whole, and nothing else."""
        assert set(self.store.keys()) == set(self.expected)
        found = self.read(self.expected)
        assert found.keys() == self.expected.keys()
        for key, page in self.expected.items():
            assert np.array_equal(found[key], page), "a wrong page"
        assert len(self.store) == len(self.expected)
        assert self.store.raw_bytes == len(self.expected) * PAGE_FORMAT.page_bytes


class StoreConformance:
    """Subclass, name the subclass ``Test…`` and define ``make_codec`` and ``codec_from``."""

    def make_codec(self, page_format: PageFormat) -> Codec:
        """The codec of new pages."""
        raise NotImplementedError

    def codec_from(self, codec_id: int, table: bytes, page_format: PageFormat) -> Codec:
        """The codec of stored pages."""
        raise NotImplementedError

    def make_store(self, options: StoreOptions, files: FileLayer | None = None) -> SegmentStore:
        codec = self.make_codec(options.page_format)
        return SegmentStore(options, codec, self.codec_from, *([] if files is None else [files]))

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[StoreBench]:
        bench = StoreBench(self, store_options(tmp_path / "root"))
        yield bench
        bench.store.close()

    # -- pages come back ------------------------------------------------------------

    def test_pages_come_back_bit_for_bit(self, bench: StoreBench) -> None:
        bench.put(*range(40))
        bench.check()

    def test_pages_come_back_after_a_restart(self, bench: StoreBench) -> None:
        bench.put(*range(20))
        bench.put(*range(20, 45))
        bench.reopen()
        bench.check()
        bench.put(100)
        bench.reopen()
        bench.check()

    def test_a_page_alone_and_a_page_of_zeros_come_back(self, bench: StoreBench) -> None:
        (key,) = bench.put(1)
        zeros = np.zeros(PAGE_FORMAT.page_bytes, np.uint8)
        assert not bench.store.put([(page_key(2), zeros)])
        bench.expected[page_key(2)] = zeros
        bench.check()
        assert list(bench.read([key])) == [key]

    def test_pages_come_back_in_any_order_and_more_than_once(self, bench: StoreBench) -> None:
        keys = bench.put(*range(40))
        order = [keys[i] for i in (3, 3, 39, 0, 17, 16, 18, 3)]
        wanted = [(key, np.zeros(PAGE_FORMAT.page_bytes, np.uint8)) for key in order]

        assert bench.store.get(wanted) == frozenset()

        for key, out in wanted:
            assert np.array_equal(out, bench.expected[key])

    def test_an_absent_page_fails_and_the_others_do_not(self, bench: StoreBench) -> None:
        keys = bench.put(1, 2)
        pages = [keys[0], page_key(9), keys[1]]
        wanted = [(key, np.zeros(PAGE_FORMAT.page_bytes, np.uint8)) for key in pages]

        assert bench.store.get(wanted) == {1}

        assert np.array_equal(wanted[2][1], bench.expected[keys[1]])
        assert bench.store.stats.pages_bad == 0

    def test_the_newer_page_wins_also_after_a_restart(self, bench: StoreBench) -> None:
        bench.put(*range(10))
        bench.put(*range(5), version=1)
        bench.check()
        bench.reopen()
        bench.check()

    def test_of_a_key_given_twice_the_last_page_is_stored(self, bench: StoreBench) -> None:
        key = page_key(1)
        pages = [(key, page_bytes(key, version)) for version in range(3)]
        assert bench.store.put(pages) == frozenset()
        bench.expected[key] = pages[-1][1]
        bench.check()

    def test_keys_of_all_lengths_are_told_apart(self, bench: StoreBench) -> None:
        keys = [PageKey(FINGERPRINT + b"k" * n) for n in (0, 1, 32, 64, 239)]
        pages = [(key, page_bytes(key)) for key in keys]
        assert bench.store.put(pages) == frozenset()
        bench.expected.update(pages)
        bench.reopen()
        bench.check()

    def test_pages_of_other_fingerprints_share_a_store(self, bench: StoreBench) -> None:
        keys = [page_key(1), page_key(1, b"adapter" + bytes(9))]
        pages = [(key, page_bytes(key)) for key in keys]
        assert bench.store.put(pages) == frozenset()
        bench.expected.update(pages)
        bench.check()

    def test_what_is_no_page_and_no_key_is_refused(self, bench: StoreBench) -> None:
        good = page_bytes(page_key(1))
        pages: list[tuple[PageKey, Any]] = [
            (page_key(1), good),
            (page_key(2), good[:-1]),
            (page_key(3), good.view(np.bool_)),
            (PageKey(b"short"), good),
            (PageKey(b"l" * 256), good),
            (page_key(4), np.repeat(good, 2)[::2]),
        ]
        assert bench.store.put(pages) == {1, 2, 3, 4, 5}
        assert bench.store.stats.pages_refused == 5
        bench.expected[page_key(1)] = good
        bench.check()
        assert bench.store.get([(page_key(1), np.zeros(7, np.uint8))]) == {0}
        bench.check()

    def test_nothing_to_do_is_done(self, bench: StoreBench) -> None:
        assert bench.store.put([]) == frozenset()
        assert bench.store.get([]) == frozenset()
        bench.store.drop([page_key(1)])
        assert bench.store.reclaim(99, [page_key(1)]) == []
        assert bench.store.proposal() is None
        bench.check()

    def test_keys_are_listed_oldest_first(self, bench: StoreBench) -> None:
        keys = bench.put(*range(30))
        bench.put(3, version=1)
        order = [key for key in keys if key != keys[3]] + [keys[3]]
        assert bench.store.keys() == order
        bench.reopen()
        assert bench.store.keys() == order

    def test_what_happens_is_counted(self, bench: StoreBench) -> None:
        keys = bench.put(*range(20))
        bench.read(keys)
        stats = bench.store.stats
        assert stats.bytes_written == stats.bytes_read == bench.store.stored_bytes > 0
        assert (stats.write_errors, stats.read_errors, stats.pages_bad) == (0, 0, 0)
        assert (stats.pages_refused, stats.no_room) == (0, 0)

    # -- pages go -------------------------------------------------------------------

    def test_a_dropped_page_is_gone(self, bench: StoreBench) -> None:
        keys = bench.put(*range(10))
        bench.drop(keys[2:5])
        bench.check()
        assert bench.read(keys[2:5]) == {}

    def test_a_segment_without_a_live_page_is_deleted(self, bench: StoreBench) -> None:
        bench.drop(bench.put(*range(100)))
        assert len(list(bench.options.folder.glob("*.seg"))) <= 1
        bench.put(7)
        bench.reopen()
        assert page_key(7) in bench.store

    def test_a_reclaimed_segment_leaves_its_survivors(self, bench: StoreBench) -> None:
        proposal, name = bench.store.proposal(), 0
        while proposal is None:
            bench.put(*range(name, name + 5))
            name += 5
            proposal = bench.store.proposal()
        victim = bench.options.folder / f"{proposal.segment:08}.seg"
        assert victim.exists()
        assert set(proposal.keys) <= set(bench.expected)
        survivors = set(proposal.keys[::3])

        gone = bench.store.reclaim(proposal.segment, survivors)

        assert set(gone) == set(proposal.keys) - survivors
        for key in gone:
            del bench.expected[key]
        assert not victim.exists()
        bench.check()
        bench.reopen()
        bench.check()

    def test_reclaiming_makes_room_for_ever(self, bench: StoreBench) -> None:
        for name in range(0, 3000, 10):
            bench.put(*range(name, name + 10))
            while (proposal := bench.store.proposal()) is not None:
                for key in bench.store.reclaim(proposal.segment, proposal.keys[:2]):
                    del bench.expected[key]
        assert bench.store.stats.no_room == 0
        bench.check()
        bench.reopen()
        bench.check()

    def test_without_reclaiming_the_store_fills_up_and_says_so(self, bench: StoreBench) -> None:
        failed = frozenset[int]()
        for name in range(0, 2000, 10):
            pages = [(key, page_bytes(key)) for key in map(page_key, range(name, name + 10))]
            failed = bench.store.put(pages)
            bench.expected.update(p for i, p in enumerate(pages) if i not in failed)
        assert failed == set(range(10))
        assert bench.store.stats.no_room > 0
        assert bench.store.proposal() is not None
        bench.check()
        bench.reopen()
        bench.check()
        nbytes = sum(path.stat().st_size for path in bench.options.folder.glob("*.seg"))
        assert nbytes <= bench.options.capacity_bytes

    def test_a_cleared_store_is_empty_for_ever(self, bench: StoreBench) -> None:
        bench.put(*range(50))
        bench.store.clear()
        bench.expected.clear()
        bench.check()
        bench.put(1, version=1)
        bench.check()
        bench.reopen()
        bench.check()
        bench.store.clear()
        bench.expected.clear()
        bench.reopen()
        bench.check()

    # -- one store, one process --------------------------------------------------------

    def test_a_store_is_open_once(self, bench: StoreBench) -> None:
        with pytest.raises(StoreBusyError, match="in use by process"):
            self.make_store(bench.options)
        bench.put(1)
        bench.reopen()
        bench.check()

    def test_stores_of_other_ranks_and_fingerprints_are_apart(
        self, bench: StoreBench, tmp_path: Path
    ) -> None:
        keys = bench.put(*range(5))
        for changes in ({"rank": 1, "ranks": 2}, {"replica": 1}, {"fingerprint": bytes(16)}):
            other = self.make_store(store_options(tmp_path / "root", **changes))
            assert len(other) == 0
            assert other.get([(keys[0], np.zeros(PAGE_FORMAT.page_bytes, np.uint8))]) == {0}
            other.close()
        bench.check()

    def test_a_closed_store_does_nothing_and_leaves_no_thread(self, bench: StoreBench) -> None:
        (key,) = bench.put(1)
        bench.store.close()
        bench.store.close()
        names = [thread.name for thread in threading.enumerate()]
        assert not any(name.startswith("tiered-kv-ssd") for name in names)
        pages = [(key, page_bytes(key)), (page_key(2), page_bytes(page_key(2)))]
        assert bench.store.put(pages) == {0, 1}
        assert bench.store.stats.pages_refused == 2
        assert bench.store.get(pages) == {0, 1}
        assert bench.store.put([]) == bench.store.get([]) == frozenset()
        assert bench.store.reclaim(1, []) == []
        assert bench.store.proposal() is None
        bench.store.drop([key])
        with pytest.raises(StoreError, match="closed"):
            bench.store.clear()
        bench.open()
        bench.check()

    def test_a_closed_store_leaves_its_memory_at_once(self, tmp_path: Path) -> None:
        """Python looks for cycles when it likes, and one of them would hold every buffer."""
        options = store_options(tmp_path / "root")
        bench = StoreBench(self, options, RealFiles())
        part_of_it = weakref.ref(bench.files)
        gc.collect()
        gc.disable()
        try:
            keys, name = bench.put(*range(40)), 40
            while (proposal := bench.store.proposal()) is None:
                bench.put(*range(name, name + 8))
                name += 8
            bench.store.reclaim(proposal.segment, proposal.keys[:2])
            for path in options.folder.glob("*.seg"):
                with path.open("r+b") as damaged:
                    damaged.seek(path.stat().st_size // 2)
                    damaged.write(bytes(64))
            assert len(bench.read(bench.expected)) < len(bench.expected), "some are bad"
            bench.store.drop(keys)
            bench.store.clear()
            bench.put(*range(20))
            bench.store.close()
            del bench
            assert part_of_it() is None
        finally:
            gc.enable()

    def test_files_are_for_their_owner_alone(self, bench: StoreBench) -> None:
        bench.put(1)
        for path in bench.options.root.rglob("*"):
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
