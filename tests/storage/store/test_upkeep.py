"""Maintenance of a store: it deletes leftovers, counts its bytes, waits only briefly, and trains
its codec once."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.codecs.base import Bytes, Codec, CodecError, EncodedPage, PageFormat
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.files import Access, Buffers, FileLayer, RealFiles
from tiered_kv.storage.segment.loader import load_segment
from tiered_kv.storage.store.capacity import Capacity
from tiered_kv.storage.store.locks import StoreBusyError, StoreError, StoreLock, root_locked
from tiered_kv.storage.store.options import StoreOptions
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import FINGERPRINT, PAGE_FORMAT, page_bytes, page_key
from tiered_kv.testing.files import FaultyFiles, UnsafeFiles
from tiered_kv.testing.segment_store import ToyCodec, store_options
from tiered_kv.testing.segments import SegmentFile

LEAST = store_options(Path(), capacity_bytes=0).segment_bytes


def codec_from(codec_id: int, table: bytes, page_format: PageFormat) -> Codec:
    return RawCodec(page_format) if codec_id == 0 else ToyCodec(page_format, table)


def open_store(
    options: StoreOptions, codec: Codec | None = None, files: FileLayer | None = None
) -> SegmentStore:
    return SegmentStore(options, codec or RawCodec(PAGE_FORMAT), codec_from, files)


def put(store: SegmentStore, *names: int, version: int = 0) -> None:
    keys = [page_key(name) for name in names]
    assert store.put([(key, page_bytes(key, version)) for key in keys]) == frozenset()


def segments_of(options: StoreOptions) -> list[Path]:
    return sorted(options.folder.glob("*.seg"))


@pytest.fixture
def options(tmp_path: Path) -> StoreOptions:
    return store_options(tmp_path / "root", capacity_bytes=16 * LEAST)


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Assert that a test leaves as many files open as before."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# -- cleaning up ---------------------------------------------------------------------------


def test_a_segment_is_deleted_once_all_its_pages_are_rewritten(options: StoreOptions) -> None:
    store = open_store(options)
    put(store, *range(12))
    first = SegmentFile(segments_of(options)[0])
    inside = len(first.entries)
    put(store, *range(100, 120))  # the first segment is full and sealed
    put(store, *range(min(inside, 12)), *range(100, 108), version=1)
    assert not first.path.exists()
    assert len(store) == 32
    store.close()


def test_clearing_deletes_unreadable_segments_too(options: StoreOptions) -> None:
    files = FaultyFiles(UnsafeFiles())
    store = open_store(options, files=files)
    put(store, *range(40))
    store.close()
    files.fail("size", errno.EIO)
    store = open_store(options, files=files)
    assert 0 < len(store) < 40
    store.clear()
    assert segments_of(options) == []
    store.close()
    store = open_store(options, files=files)
    assert len(store) == 0
    store.close()


@pytest.mark.usefixtures("descriptors")
def test_no_file_stays_open(options: StoreOptions) -> None:
    store = open_store(options)
    for first in range(0, 400, 10):
        put(store, *range(first, first + 10))
        while (proposal := store.proposal()) is not None:
            store.reclaim(proposal.segment, proposal.keys[:1])
    held = len(list(Path("/proc/self/fd").iterdir()))
    for first in range(400, 800, 10):
        put(store, *range(first, first + 10))
        while (proposal := store.proposal()) is not None:
            store.reclaim(proposal.segment, proposal.keys[:1])
    assert len(list(Path("/proc/self/fd").iterdir())) <= held + 1
    put(store, 1, 2, 3)
    killed = options.folder.with_name("killed")
    shutil.copytree(options.folder, killed)
    store.close()
    shutil.rmtree(options.folder)
    killed.rename(options.folder)
    open_store(options).close()  # seals the segment that the killed process left


@pytest.mark.usefixtures("descriptors")
def test_no_folder_stays_open_after_it_was_made_durable(tmp_path: Path) -> None:
    for _ in range(3):
        RealFiles().sync_folder(tmp_path)


def test_a_footer_fits_also_with_the_longest_keys(options: StoreOptions) -> None:
    # Many of these small pages fit into a segment.
    small = PageFormat(PAGE_FORMAT.element, 1024, 16)
    options = store_options(options.root, page_format=small, capacity_bytes=1 << 20)
    store = SegmentStore(options, RawCodec(small), codec_from)
    keys = [PageKey(FINGERPRINT + bytes([n]) * 239) for n in range(100)]
    assert store.put([(key, page_bytes(key, 0, 1024)) for key in keys]) == frozenset()
    store.close()
    assert len(segments_of(options)) > 1
    assert all(path.stat().st_size <= options.segment_bytes for path in segments_of(options))
    assert all(SegmentFile(path).sealed for path in segments_of(options))


def test_a_page_too_large_for_a_segment_costs_only_itself(options: StoreOptions) -> None:
    class Greedy(ToyCodec):
        wants_training = False

        def encode(self, page: Bytes) -> EncodedPage:
            if page[0] == 13:
                return EncodedPage(np.zeros(1 << 20, np.uint8), page[:0])
            return super().encode(page)

    store = open_store(options, Greedy(PAGE_FORMAT))
    pages = [(page_key(name), page_bytes(page_key(name))) for name in range(9)]
    for i, (_, page) in enumerate(pages):
        page[0] = 13 if i in (0, 4, 5) else 1
    assert store.put(pages) == {0, 4, 5}
    assert store.keys() == [page_key(name) for name in (1, 2, 3, 6, 7, 8)]
    store.close()


# -- counting -------------------------------------------------------------------------------


def test_unusable_segments_are_counted_and_deleted(options: StoreOptions) -> None:
    store = open_store(options, ToyCodec(PAGE_FORMAT))
    put(store, *range(20))
    store.close()
    (options.folder / "00000090.seg").write_bytes(b"junk" * 5000)

    def unknown(codec_id: int, table: bytes, page_format: PageFormat) -> Codec:
        raise CodecError("no such codec")

    count = len(segments_of(options))
    store = SegmentStore(options, RawCodec(PAGE_FORMAT), unknown)
    assert store.stats.segments_bad == count > 1
    assert len(store) == 0
    assert segments_of(options) == []
    store.close()


def test_a_store_with_too_little_space_reports_how_much_it_needs(tmp_path: Path) -> None:
    large = PageFormat(PAGE_FORMAT.element, 64 << 20, 16)
    options = store_options(tmp_path, page_format=large, capacity_bytes=1 << 20)
    needed = 2 * options.segment_bytes / (1 << 30)
    assert needed == pytest.approx(1.02, abs=0.02)
    with pytest.raises(StoreError, match=f"raise TIERED_KV_SSD_GIB to {needed:.2f} or more"):
        SegmentStore(options, RawCodec(large), codec_from)


# -- locks ----------------------------------------------------------------------------------


def test_a_lock_that_another_process_briefly_tests_is_acquired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looker = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(looker, fcntl.LOCK_SH)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        fcntl.flock(looker, fcntl.LOCK_UN)

    monkeypatch.setattr(time, "sleep", sleep)
    lock = StoreLock(tmp_path)
    assert len(slept) == 1
    with pytest.raises(StoreBusyError):
        StoreLock(tmp_path)
    lock.release()
    lock.release()
    os.close(looker)
    StoreLock(tmp_path).release()


def test_a_process_that_frees_space_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.open(tmp_path / "capacity.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        fcntl.flock(other, fcntl.LOCK_UN)

    monkeypatch.setattr(time, "sleep", sleep)
    with root_locked(tmp_path):
        assert len(slept) == 1
    os.close(other)


def test_the_last_use_is_noted_at_a_new_segment_and_at_the_end(options: StoreOptions) -> None:
    store = open_store(options)
    lock = options.folder / "lock"
    uses: list[Callable[[], None]] = [lambda: put(store, 1), store.close]
    for use in uses:
        os.utime(lock, (1e9, 1e9))
        use()
        assert lock.stat().st_mtime > 1.1e9


# -- space ------------------------------------------------------------------------------------


def test_no_more_of_an_unused_store_is_deleted_than_needed(options: StoreOptions) -> None:
    folders = [options.root / (bytes([n]) * 16).hex() / "0-0" for n in (1, 2)]
    for age, folder in enumerate(folders):
        folder.mkdir(parents=True)
        (folder / "lock").touch()
        os.utime(folder / "lock", (1e9 + age, 1e9 + age))
        for number in (1, 2):
            (folder / f"{number:08}.seg").write_bytes(bytes(8192))

    def left() -> list[int]:
        return [len(list(folder.glob("*.seg"))) for folder in folders]

    capacity = Capacity(UnsafeFiles(), options)
    assert capacity.delete_dead(8192)
    assert left() == [1, 2]
    assert capacity.delete_dead(8193)
    assert left() == [0, 1]
    assert capacity.delete_dead(1 << 30)
    assert left() == [0, 0]
    assert not capacity.delete_dead(1)


def test_a_share_is_used_to_the_last_byte_and_survivors_get_the_rest(
    options: StoreOptions,
) -> None:
    options.folder.mkdir(parents=True)
    capacity = Capacity(UnsafeFiles(), options)
    for number in range(17):
        usual = LEAST if number < 14 else None
        surviving = LEAST if number < 16 else None
        assert capacity.make_room(while_reclaiming=False) == usual
        assert capacity.make_room(while_reclaiming=True) == surviving
        segment = options.folder / f"{number:08}.seg"
        segment.touch()
        os.truncate(segment, LEAST)


def test_each_store_uses_its_share_to_the_last_segment(
    options: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.storage.store.capacity.FRESH_S", -1.0)
    both = [
        store_options(options.root, capacity_bytes=16 * LEAST, rank=rank, ranks=2)
        for rank in (0, 1)
    ]
    stores = [open_store(one, files=UnsafeFiles()) for one in both]
    for store in stores:
        name = 0
        while not store.put([(page_key(name), page_bytes(page_key(name)))]):
            name += 1
    assert [len(segments_of(one)) for one in both] == [7, 7], "of sixteen, two are kept free"
    for store in stores:
        store.close()


def test_nothing_is_proposed_while_there_is_space(
    options: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store proposes no segment for deletion while its open segment has space, even if other
    stores use the rest of the capacity. It proposes one once the open segment is full."""
    monkeypatch.setattr("tiered_kv.storage.store.capacity.FRESH_S", -1.0)
    store = open_store(options, files=UnsafeFiles())
    name = 0
    while len(segments_of(options)) < 2:
        assert store.proposal() is None
        put(store, name)
        name += 1
    assert store.proposal() is None
    while not store.put([(page_key(name), page_bytes(page_key(name)))]):
        name += 1
    newcomer = store_options(options.root, capacity_bytes=16 * LEAST, rank=1, ranks=2)
    new = open_store(newcomer, files=UnsafeFiles())
    put(new, 1)
    assert new.proposal() is None
    name = 2
    while not new.put([(page_key(name), page_bytes(page_key(name)))]):
        name += 1
    assert new.proposal() is not None
    given = store.proposal()
    assert given is not None
    store.reclaim(given.segment, ())
    put(new, name)  # in a second segment, while the other store still exceeds its share
    assert len(segments_of(newcomer)) == 2
    assert new.proposal() is None
    store.close()
    new.close()


# -- training ---------------------------------------------------------------------------------


def test_a_codec_that_was_never_trained_is_trained_by_the_next_process(
    options: StoreOptions,
) -> None:
    store = open_store(options, ToyCodec(PAGE_FORMAT))
    put(store, *range(5))
    store.close()
    store = open_store(options, ToyCodec(PAGE_FORMAT))
    put(store, *range(5, 30))
    tables = [SegmentFile(path).header.table for path in segments_of(options)]
    assert tables[0] == b""
    assert tables[-1] != b""
    store.close()


def test_training_pages_are_not_kept(options: StoreOptions) -> None:
    seen: list[weakref.ref[Bytes]] = []

    class Curious(ToyCodec):
        def trained(self, pages: list[Bytes]) -> Codec:
            seen.extend(weakref.ref(page) for page in pages)
            return super().trained(pages)

    store = open_store(options, Curious(PAGE_FORMAT))
    for name in range(16):
        put(store, name)
    gc.collect()
    assert len(seen) == 16
    assert [page for page in seen if page() is not None] == []
    store.close()


# -- direct I/O, footers ------------------------------------------------------------------------


class RefusesWrites(RealFiles):
    """A file system that opens a file for direct I/O, and fails the first write."""

    def pwrite(self, fd: int, buffers: Buffers, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return super().pwrite(fd, buffers, offset)


@pytest.mark.usefixtures("descriptors")
def test_a_probe_file_left_by_a_killed_process_does_no_harm(options: StoreOptions) -> None:
    options.folder.mkdir(parents=True)
    (options.folder / "probe").write_bytes(bytes(4096))
    store = open_store(options, files=RefusesWrites())
    assert store.direct is False
    assert not (options.folder / "probe").exists()
    put(store, *range(10))
    store.close()


def test_a_footer_longer_than_the_first_read_is_read_completely(
    options: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.storage.segment.loader.END_BYTES", 4096)
    large = store_options(options.root, capacity_bytes=64 << 20)
    store = open_store(large, files=UnsafeFiles())
    put(store, *range(200))
    store.close()
    (path,) = segments_of(large)
    fd = RealFiles().open(path, Access.READ, direct=False)
    try:
        loaded = load_segment(RealFiles(), fd)
    finally:
        RealFiles().close(fd)
    assert loaded.sealed
    assert [entry.key for entry in loaded.entries] == [page_key(name) for name in range(200)]
