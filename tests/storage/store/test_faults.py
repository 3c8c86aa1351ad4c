"""A failing disk: pages are refused or lost, nothing raises, and a counter increases."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.codecs.base import Bytes, Codec
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.keys import PageKey
from tiered_kv.storage.store.locks import StoreError
from tiered_kv.storage.store.options import StoreOptions
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import PAGE_FORMAT, page_bytes, page_key
from tiered_kv.testing.files import FaultyFiles, UnsafeFiles
from tiered_kv.testing.segment_store import store_options
from tiered_kv.testing.segments import SegmentFile

FOREVER = float("inf")


@dataclass
class Bench:
    """A store on a disk that can fail, and the pages that it acknowledged."""

    options: StoreOptions
    files: FaultyFiles = field(default_factory=lambda: FaultyFiles(UnsafeFiles()))
    stored: dict[PageKey, Bytes] = field(default_factory=dict)
    next_name: int = 0
    store: SegmentStore = field(init=False)

    def __post_init__(self) -> None:
        self.open()

    def open(self, codec_from: Callable[..., Codec] = lambda i, t, f: RawCodec(f)) -> None:
        self.store = SegmentStore(self.options, RawCodec(PAGE_FORMAT), codec_from, self.files)

    def put(self, count: int) -> frozenset[int]:
        keys = [page_key(self.next_name + i) for i in range(count)]
        self.next_name += count
        pages = [(key, page_bytes(key)) for key in keys]
        failed = self.store.put(pages)
        self.stored.update(page for i, page in enumerate(pages) if i not in failed)
        return failed

    def get(self) -> set[PageKey]:
        """Read all pages. Asserts that returned pages are correct, and that failed pages are
        removed from the store. Returns the keys of the failed pages."""
        keys = list(self.stored)
        wanted = [(key, np.zeros(PAGE_FORMAT.page_bytes, np.uint8)) for key in keys]
        failed = self.store.get(wanted)
        for i, (key, out) in enumerate(wanted):
            assert i in failed or np.array_equal(out, self.stored[key]), "a wrong page"
            assert (key in self.store) is (i not in failed)
        return {keys[i] for i in failed}

    def make_room(self) -> None:
        while (proposal := self.store.proposal()) is not None:
            for key in self.store.reclaim(proposal.segment, proposal.keys[:3]):
                del self.stored[key]

    def check(self) -> None:
        """Assert that the store works normally again once the disk has recovered."""
        self.files.heal()
        for key in self.get():
            del self.stored[key]
        self.make_room()
        assert self.put(5) == frozenset()
        assert self.get() == set()
        self.store.close()
        self.open()
        missing = self.stored.keys() - set(self.store.keys())
        assert not missing, "durable pages are lost"
        assert self.get() == set()

    @property
    def errors(self) -> int:
        stats = self.store.stats
        return stats.write_errors + stats.read_errors + stats.pages_bad


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    segment = store_options(tmp_path, capacity_bytes=0).segment_bytes
    bench = Bench(store_options(tmp_path / "root", capacity_bytes=6 * segment))
    yield bench
    bench.store.close()


WRITES = ["create", "preallocate", "pwrite", "fdatasync", "sync_folder"]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("operation", [*WRITES, "truncate", "unlink"])
def test_a_write_that_fails_at_any_time_costs_pages_and_nothing_else(
    tmp_path: Path, operation: str, error: int
) -> None:
    segment = store_options(tmp_path, capacity_bytes=0).segment_bytes
    struck = 0
    for after in range(0, 15, 3):
        options = store_options(tmp_path / f"{after}", capacity_bytes=6 * segment)
        bench = Bench(options)
        bench.files.fail(operation, error, after=after)
        for _ in range(20):
            bench.put(7)
            bench.get()
            bench.make_room()
        struck += bench.files.struck
        assert bench.errors == bench.files.struck
        bench.check()
        bench.store.close()
    assert struck > 0


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_stops_accepting_writes_still_serves(bench: Bench, error: int) -> None:
    bench.put(30)
    bench.files.fail_writing(error)
    for _ in range(3):
        failed = bench.put(40)
        assert failed
    assert bench.get() == set()
    victim = bench.store.proposal()
    # A full disk has space after a deletion. A failing disk keeps its segments.
    assert (victim is not None) is (error in (errno.ENOSPC, errno.EDQUOT))
    if victim is not None:
        bench.store.reclaim(victim.segment, victim.keys)
        bench.stored = {k: v for k, v in bench.stored.items() if k in bench.store}
    bench.store.drop([page_key(0)])
    bench.stored.pop(page_key(0), None)
    assert bench.store.stats.write_errors > 0
    bench.check()


def test_a_failed_put_leaves_what_was_stored_under_its_keys(bench: Bench) -> None:
    bench.put(5)
    bench.files.fail("pwrite", errno.EIO, times=FOREVER)
    keys = list(bench.stored)
    assert bench.store.put([(key, page_bytes(key, 1)) for key in keys]) == set(range(5))
    bench.files.heal()
    assert bench.get() == set()
    bench.check()


@pytest.mark.parametrize("operation", ["pwrite", "fdatasync"])
def test_nothing_is_appended_after_a_possibly_torn_record(bench: Bench, operation: str) -> None:
    bench.put(4)
    (path,) = bench.options.folder.glob("*.seg")
    bench.files.fail(operation, errno.EIO)
    assert bench.put(4) == {0, 1, 2, 3}
    bench.put(4)
    segment = SegmentFile(path)
    assert segment.sealed
    last = segment.entries[-1]
    assert len(segment.entries) == 4
    assert path.stat().st_size == last.offset + last.nbytes + 4096
    assert len(list(bench.options.folder.glob("*.seg"))) == 2
    bench.check()


@pytest.mark.parametrize("operation", ["preallocate", "pwrite", "sync_folder"])
def test_a_segment_that_cannot_be_created_leaves_no_file(bench: Bench, operation: str) -> None:
    bench.files.fail(operation, errno.ENOSPC)
    assert bench.put(4) == {0, 1, 2, 3}
    assert list(bench.options.folder.glob("*.seg")) == []
    bench.check()


@pytest.mark.parametrize("most", [4096, 4097, 12288, 10_000])
def test_short_reads_and_writes_are_continued(bench: Bench, most: int) -> None:
    bench.files.most_bytes = most
    assert bench.put(30) == frozenset()
    assert bench.get() == set()
    bench.store.close()
    bench.open()
    assert len(bench.store) == 30
    assert bench.get() == set()
    assert bench.files.struck > 0
    bench.check()


def test_a_disk_that_writes_less_than_a_block_fails_and_does_not_hang(bench: Bench) -> None:
    bench.put(10)
    bench.files.most_bytes = 100
    assert bench.put(3) == {0, 1, 2}
    assert len(bench.get()) == 10
    assert bench.store.stats.write_errors > 0
    assert bench.store.stats.read_errors == 10
    bench.stored.clear()
    bench.check()


def test_a_read_error_costs_only_the_affected_pages(bench: Bench) -> None:
    bench.put(30)
    # Fail a read of several neighbouring pages, then a read of one of them.
    bench.files.fail("pread", errno.EIO, times=2)
    assert len(bench.get()) <= 2
    assert bench.store.stats.read_errors <= 2
    assert bench.files.struck == 2
    bench.check()


def test_a_bit_flipped_by_a_read_costs_one_page(bench: Bench) -> None:
    bench.put(30)
    bench.files.flip(8 * 5000 + 3)  # after the header
    (lost,) = bench.get()
    assert bench.store.stats.pages_bad == 1
    assert bench.store.stats.read_errors == 0
    del bench.stored[lost]
    bench.check()


def test_bits_flipped_during_recovery_cost_pages_and_serve_none_that_is_wrong(
    tmp_path: Path,
) -> None:
    segment = store_options(tmp_path, capacity_bytes=0).segment_bytes
    for bit in range(0, 8 * 9000, 997):
        bench = Bench(store_options(tmp_path / f"{bit}", capacity_bytes=6 * segment))
        bench.put(25)
        bench.store.close()
        bench.files.flip(bit, after=bit % 7)
        bench.open()
        bench.get()
        bench.stored = {k: v for k, v in bench.stored.items() if k in bench.store}
        bench.check()
        bench.store.close()


@pytest.mark.parametrize("operation", ["open", "pread", "size"])
@pytest.mark.parametrize("after", range(3))
def test_a_segment_unreadable_at_startup_may_be_readable_the_next_time(
    bench: Bench, operation: str, after: int
) -> None:
    bench.put(40)
    bench.store.close()
    bench.files.fail(operation, errno.EIO, after=after)
    bench.open()
    assert bench.files.struck == 1
    bench.get()
    bench.store.close()
    bench.open()
    assert bench.get() == set()
    bench.check()


def test_a_segment_without_its_codec_may_be_readable_the_next_time(bench: Bench) -> None:
    """A store is opened while memory is too short for the codec, and finds no pages. Opened again
    with enough memory, it finds all 40."""
    bench.put(40)
    bench.store.close()

    def no_memory(*_: object) -> Codec:
        raise MemoryError

    bench.open(no_memory)
    assert len(bench.store) == 0
    assert bench.store.stats.segments_bad > 0
    bench.store.close()
    bench.open()
    assert len(bench.store) == 40
    bench.check()


def test_unreadable_segments_are_eventually_deleted_for_space(bench: Bench) -> None:
    bench.put(60)
    bench.store.close()
    bench.files.fail("size", errno.EIO, times=FOREVER)
    bench.open()
    bench.files.heal()
    assert len(bench.store) == 0
    bench.stored.clear()
    for _ in range(20):
        assert bench.put(7) == frozenset()
        bench.make_room()


def test_pages_of_a_deleted_folder_are_missing(bench: Bench) -> None:
    bench.put(30)
    shutil.rmtree(bench.options.root)
    for _ in range(5):
        bench.put(30)
        bench.get()
        bench.make_room()
    assert bench.put(30) == set(range(30))
    assert bench.store.stats.write_errors > 0
    bench.store.drop(bench.store.keys())
    bench.store.close()
    bench.open()
    bench.stored.clear()
    bench.check()


def test_a_store_whose_lock_was_removed_does_not_overwrite_its_successor(bench: Bench) -> None:
    bench.put(5)
    shutil.rmtree(bench.options.folder)
    successor = Bench(bench.options)
    successor.put(3)
    bench.store.drop(bench.store.keys())
    bench.put(30)
    bench.store.close()
    successor.check()
    successor.store.close()
    bench.open()


@pytest.mark.parametrize("operation", ["unlink", "sync_folder"])
def test_a_reset_that_does_not_reach_the_disk_raises(bench: Bench, operation: str) -> None:
    bench.put(40)
    bench.files.fail(operation, errno.EIO, times=FOREVER)
    with pytest.raises(StoreError, match="remove the folder"):
        bench.store.clear()
    assert len(bench.store) == 0
    bench.files.heal()
    bench.store.clear()
    bench.stored.clear()
    bench.store.close()
    bench.open()
    assert len(bench.store) == 0
    bench.check()


@pytest.mark.parametrize("operation", ["make_folders", "names"])
def test_a_store_that_cannot_be_opened_is_reported_and_holds_nothing(
    bench: Bench, operation: str
) -> None:
    bench.store.close()
    bench.files.fail(operation, errno.EACCES)
    with pytest.raises(StoreError, match="check the folder's permissions"):
        bench.open()
    bench.open()


def test_a_segment_that_cannot_be_sealed_on_opening_is_served_unsealed(bench: Bench) -> None:
    """A killed process has left a segment without a footer, and the disk accepts no more writes.
    The store opens, and serves all pages of the segment."""
    bench.put(7)
    killed = bench.options.folder.with_name("killed")
    shutil.copytree(bench.options.folder, killed)
    bench.store.close()
    shutil.rmtree(bench.options.folder)
    killed.rename(bench.options.folder)
    bench.files.fail("open_to_write", errno.EROFS)
    bench.open()
    assert bench.files.struck == 1
    assert bench.get() == set()
    bench.check()
