"""The conformance suite of codecs in a segment store, and of the store with any codec."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiered_kv.codecs.base import Bytes, Codec, CodecError, EncodedPage, PageFormat
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.files import FileLayer, RealFiles
from tiered_kv.storage.segment.format import record_header_bytes
from tiered_kv.storage.store.locks import StoreBusyError, StoreError
from tiered_kv.storage.store.options import StoreOptions
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import (
    FINGERPRINT,
    PAGE_FORMAT,
    StoreBench,
    StoreConformance,
    page_bytes,
    page_key,
)

from .segments import SegmentFile


def store_options(root: Path, **changes: object) -> StoreOptions:
    """Return options for a small store: sixteen segments of about eight to thirty pages each."""
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
    """Stores even bytes as the plane and odd bytes as the frame. Training adds a shift to both."""

    page_format: PageFormat
    table: bytes = b""
    codec_id = 65000
    name = "toy"
    stores_in_place = False

    @classmethod
    def from_table(cls, page_format: PageFormat, table: bytes) -> Codec:
        return cls(page_format, table)

    @property
    def wants_training(self) -> bool:
        return not self.table

    def encode(self, page: Bytes) -> EncodedPage:
        return EncodedPage(page[::2] + self._shift, page[1::2] + self._shift)

    def decode(self, encoded: EncodedPage, out: Bytes) -> None:
        if encoded.nbytes != out.nbytes or encoded.plane.nbytes != encoded.frame.nbytes:
            raise CodecError("the page was not encoded by this codec")
        out[::2] = encoded.plane - self._shift
        out[1::2] = encoded.frame - self._shift

    def trained(self, pages: list[Bytes]) -> Codec:
        return ToyCodec(self.page_format, bytes([1 + len(pages) % 255]) * 5000)

    @property
    def _shift(self) -> np.uint8:
        return np.uint8(self.table[0] if self.table else 0)


@dataclass
class SegmentBench(StoreBench[SegmentStore]):
    """A segment store that can be reopened repeatedly, and the pages that it should contain."""

    options: StoreOptions = field(kw_only=True)
    files: FileLayer | None = None

    @classmethod
    def of(
        cls, suite: SegmentStoreConformance, options: StoreOptions, files: FileLayer | None = None
    ) -> SegmentBench:
        """Return a bench with a store of the suite's codec."""
        return cls(lambda: suite.open_store(options, files), options=options, files=files)

    def check(self) -> None:
        super().check()
        assert len(self.store) == len(self.expected)
        assert self.store.raw_bytes == len(self.expected) * PAGE_FORMAT.page_bytes

    def segments(self) -> list[Path]:
        """Return the store's segment files, oldest first."""
        return sorted(self.options.folder.glob("*.seg"))


class SegmentStoreConformance(StoreConformance):
    """Conformance suite of segment stores with a codec. Create a subclass, name it ``Test…`` and
    define ``make_codec`` and ``codec_from``.
    """

    def make_codec(self, page_format: PageFormat) -> Codec:
        """Return the codec of new pages."""
        raise NotImplementedError

    def codec_from(self, codec_id: int, table: bytes, page_format: PageFormat) -> Codec:
        """Return the codec of stored pages."""
        raise NotImplementedError

    def open_store(self, options: StoreOptions, files: FileLayer | None = None) -> SegmentStore:
        return SegmentStore(options, self.make_codec(options.page_format), self.codec_from, files)

    def make_store(self, root: Path) -> SegmentStore:
        return self.open_store(store_options(root))

    def damage(self, root: Path, key: PageKey) -> None:
        for path in store_options(root).folder.glob("*.seg"):
            for entry in SegmentFile(path).entries:
                if entry.key == key:
                    with path.open("r+b") as segment:
                        header = record_header_bytes(len(key), entry.stored_bytes)
                        at = entry.offset + header + entry.stored_bytes // 2
                        segment.seek(at)
                        (byte,) = segment.read(1)
                        segment.seek(at)
                        segment.write(bytes([byte ^ 0xFF]))

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[SegmentBench]:
        bench = SegmentBench.of(self, store_options(tmp_path / "root"))
        yield bench
        bench.store.close()

    # -- pages ----------------------------------------------------------------------

    def test_what_is_no_page_and_no_key_is_refused(self, bench: SegmentBench) -> None:
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

    def test_an_absent_page_is_not_a_bad_one(self, bench: SegmentBench) -> None:
        bench.read([*bench.put(1, 2), page_key(9)])
        assert bench.store.stats.pages_bad == 0

    def test_what_happens_is_counted(self, bench: SegmentBench) -> None:
        keys = bench.put(*range(20))
        bench.read(keys)
        stats = bench.store.stats
        assert stats.bytes_written == stats.bytes_read == bench.store.stored_bytes > 0
        assert (stats.write_errors, stats.read_errors, stats.pages_bad) == (0, 0, 0)
        assert (stats.pages_refused, stats.no_room) == (0, 0)
        counted = bench.store.counters()
        assert counted["ssd_bytes_written"] == stats.bytes_written
        assert counted["ssd_errors"] == 0

    # -- segments -------------------------------------------------------------------

    def test_a_segment_without_a_live_page_is_deleted(self, bench: SegmentBench) -> None:
        bench.drop(bench.put(*range(100)))
        assert len(bench.segments()) <= 1
        bench.put(7)
        bench.reopen()
        assert page_key(7) in bench.store

    def test_a_reclaimed_segment_has_no_file(self, bench: SegmentBench) -> None:
        assert bench.store.reclaim(99, [page_key(1)]) == []
        name = 0
        while (proposal := bench.store.proposal()) is None:
            bench.put(*range(name, name + 5))
            name += 5
        victim = bench.options.folder / f"{proposal.segment:08}.seg"
        assert victim in bench.segments()
        bench.store.reclaim(proposal.segment, proposal.keys[::3])
        assert victim not in bench.segments()

    def test_reclaiming_makes_room_for_ever(self, bench: SegmentBench) -> None:
        for name in range(0, 3000, 10):
            bench.put(*range(name, name + 10))
            while (proposal := bench.store.proposal()) is not None:
                for key in bench.store.reclaim(proposal.segment, proposal.keys[:2]):
                    del bench.expected[key]
        assert bench.store.stats.no_room == 0
        bench.check()
        bench.reopen()
        bench.check()

    def test_without_reclaiming_the_store_fills_up_and_says_so(self, bench: SegmentBench) -> None:
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
        nbytes = sum(path.stat().st_size for path in bench.segments())
        assert nbytes <= bench.options.capacity_bytes

    def test_a_store_cleared_after_a_restart_is_empty(self, bench: SegmentBench) -> None:
        bench.put(*range(50))
        bench.reopen()
        bench.store.clear()
        bench.expected.clear()
        bench.reopen()
        bench.check()

    # -- one store, one process --------------------------------------------------------

    def test_a_store_is_open_once(self, bench: SegmentBench) -> None:
        with pytest.raises(StoreBusyError, match="in use by process"):
            self.open_store(bench.options)
        bench.put(1)
        bench.reopen()
        bench.check()

    def test_stores_of_other_ranks_and_fingerprints_are_apart(
        self, bench: SegmentBench, tmp_path: Path
    ) -> None:
        keys = bench.put(*range(5))
        for changes in ({"rank": 1, "ranks": 2}, {"replica": 1}, {"fingerprint": bytes(16)}):
            other = self.open_store(store_options(tmp_path / "root", **changes))
            assert len(other) == 0
            assert other.get([(keys[0], np.zeros(PAGE_FORMAT.page_bytes, np.uint8))]) == {0}
            other.close()
        bench.check()

    def test_a_closed_store_refuses_and_leaves_no_thread_of_its_own(
        self, bench: SegmentBench
    ) -> None:
        (key,) = bench.put(1)
        bench.store.close()
        names = [thread.name for thread in threading.enumerate()]
        assert not any(name.startswith("tiered-kv-ssd") for name in names)
        assert bench.store.put([(key, page_bytes(key))]) == {0}
        assert bench.store.stats.pages_refused == 1
        assert bench.store.reclaim(1, []) == []
        with pytest.raises(StoreError, match="closed"):
            bench.store.clear()
        bench.open()
        bench.check()

    def test_a_closed_store_leaves_its_memory_at_once(self, tmp_path: Path) -> None:
        """A reference cycle would keep every buffer until Python's next garbage collection."""
        options = store_options(tmp_path / "root")
        files: FileLayer | None = RealFiles()
        bench: SegmentBench | None = SegmentBench.of(self, options, files)
        assert bench is not None
        part_of_it = weakref.ref(files)
        files = None
        gc.collect()
        gc.disable()
        try:
            keys, name = bench.put(*range(40)), 40
            while (proposal := bench.store.proposal()) is None:
                bench.put(*range(name, name + 8))
                name += 8
            bench.store.reclaim(proposal.segment, proposal.keys[:2])
            for path in bench.segments():
                with path.open("r+b") as damaged:
                    damaged.seek(path.stat().st_size // 2)
                    damaged.write(bytes(64))
            assert len(bench.read(bench.expected)) < len(bench.expected), "some pages are bad"
            bench.store.drop(keys)
            bench.store.clear()
            bench.put(*range(20))
            bench.store.close()
            bench = None
            assert part_of_it() is None
        finally:
            gc.enable()

    def test_files_are_for_their_owner_alone(self, bench: SegmentBench) -> None:
        bench.put(1)
        for path in bench.options.root.rglob("*"):
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
