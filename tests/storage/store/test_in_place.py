"""Pages that are transferred between the caller's memory and the disk without a copy, and pages
that must be copied."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.codecs.base import Bytes
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.aligned import aligned_bytes
from tiered_kv.storage.disk.files import (
    BLOCK,
    Access,
    Buffers,
    RealFiles,
    read_exactly,
    write_exactly,
)
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import PAGE_FORMAT, page_bytes, page_key
from tiered_kv.testing.files import FaultyFiles, UnsafeFiles
from tiered_kv.testing.segment_store import store_options
from tiered_kv.testing.segments import SegmentFile


class WatchedFiles(FaultyFiles):
    """Records the memory addresses at which whole pages are read and written."""

    def __init__(self) -> None:
        super().__init__(UnsafeFiles())
        self.places: set[int] = set()

    def pread(self, fd: int, buffers: Buffers, offset: int) -> int:
        self._note(buffers)
        return super().pread(fd, buffers, offset)

    def pwrite(self, fd: int, buffers: Buffers, offset: int) -> int:
        self._note(buffers)
        return super().pwrite(fd, buffers, offset)

    def _note(self, buffers: Buffers) -> None:
        self.places.update(address(np.frombuffer(buffer, np.uint8)) for buffer in buffers)


def address(page: Bytes) -> int:
    return page.ctypes.data


@pytest.fixture
def files() -> WatchedFiles:
    return WatchedFiles()


@pytest.fixture
def store(tmp_path: Path, files: WatchedFiles) -> Iterator[SegmentStore]:
    options = store_options(tmp_path / "root")
    store = SegmentStore(options, RawCodec(PAGE_FORMAT), lambda i, t, f: RawCodec(f), files)
    yield store
    store.close()


def put(store: SegmentStore, names: range, kind: str = "aligned") -> list[PageKey]:
    """Put pages from this kind of memory, and return their keys."""
    keys = [page_key(name) for name in names]
    pages = list(zip(keys, memory(len(keys), kind), strict=True))
    for key, page in pages:
        page[:] = page_bytes(key)
    assert store.put(pages) == frozenset()
    return keys


def memory(count: int, kind: str) -> list[Bytes]:
    """Return pages in memory that a disk can use directly, in memory that it cannot, or
    alternating."""
    size = PAGE_FORMAT.page_bytes
    block = aligned_bytes((2 * count + 1) * size)
    shifts = {"aligned": [0, 0], "unaligned": [64, 64], "mixed": [0, 64]}[kind]
    starts = [2 * i * size + shifts[i % 2] for i in range(count)]
    return [block[start : start + size] for start in starts]


KINDS = ["aligned", "unaligned", "mixed"]


@pytest.mark.parametrize("most", [None, 4096, 4097, 12288, 10_000])
@pytest.mark.parametrize("read", KINDS)
@pytest.mark.parametrize("written", KINDS)
def test_pages_may_be_in_any_memory(
    store: SegmentStore, files: FaultyFiles, written: str, read: str, most: int | None
) -> None:
    files.most_bytes = most
    keys = put(store, range(30), written)
    outs = list(zip(keys, memory(30, read), strict=True))
    assert store.get(outs[::-1]) == frozenset()
    for key, out in outs:
        assert np.array_equal(out, page_bytes(key))
    for segment in store.options.folder.glob("*.seg"):
        found = SegmentFile(segment)
        for entry in found.entries:
            page = found.read(entry, RawCodec(PAGE_FORMAT))
            assert np.array_equal(page, page_bytes(entry.key))
    assert (files.struck > 0) is (most is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_in_memory_that_the_disk_can_use_are_not_copied(
    store: SegmentStore, files: WatchedFiles, kind: str
) -> None:
    pages = [(page_key(i), page) for i, page in enumerate(memory(10, kind))]
    for key, page in pages:
        page[:] = page_bytes(key)
    assert store.put(pages) == frozenset()
    in_place = {address(page) for _, page in pages if address(page) % BLOCK == 0}
    # One write either copies all of its pages or none.
    assert files.places & in_place == (in_place if kind == "aligned" else set())
    outs = [(key, out) for (key, _), out in zip(pages, memory(10, kind), strict=True)]
    in_place = {address(out) for _, out in outs if address(out) % BLOCK == 0}
    assert len(in_place) == {"aligned": 10, "unaligned": 0, "mixed": 5}[kind]
    assert store.get(outs) == frozenset()
    assert files.places >= in_place


@pytest.mark.parametrize("most", [None, 4096])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 20, 90, 100, BLOCK, 5000, 2 * BLOCK - 1])
def test_every_flipped_bit_is_detected(
    store: SegmentStore, files: FaultyFiles, kind: str, most: int | None, at: int
) -> None:
    (key,) = put(store, range(1))
    files.most_bytes = most
    if most:  # short reads report their size, and the flip has to hit the right one of them
        files.flip(8 * (at % most) + 1, after=at // most)
    else:
        files.flip(8 * at + 1)
    assert store.get([(key, memory(1, kind)[0])]) == {0}
    assert key not in store
    assert store.stats.pages_bad == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_flipped_among_neighbours_costs_one_of_them(
    store: SegmentStore, files: FaultyFiles, kind: str
) -> None:
    keys = put(store, range(8))
    outs = list(zip(keys, memory(8, kind), strict=True))
    files.flip(8 * (2 * BLOCK + 5000))  # in the second page of a run
    (lost,) = store.get(outs)
    for i, (key, out) in enumerate(outs):
        assert (key in store) is (i != lost)
        assert i == lost or np.array_equal(out, page_bytes(key))


@pytest.mark.parametrize("operation", ["pread", "pwrite"])
def test_memory_that_no_disk_can_use_is_copied_through_buffers(
    store: SegmentStore, files: FaultyFiles, operation: str
) -> None:
    put(store, range(1))  # creates the segment
    if operation == "pwrite":
        files.fail("pwrite", errno.EFAULT)
    keys = put(store, range(100, 105))
    if operation == "pread":
        files.fail("pread", errno.EFAULT)
    outs = list(zip(keys, memory(5, "aligned"), strict=True))
    assert store.get(outs) == frozenset()
    assert files.struck == 1
    for key, out in outs:
        assert np.array_equal(out, page_bytes(key))


def test_memory_that_cannot_be_written_is_not_filled(store: SegmentStore) -> None:
    (key,) = put(store, range(1))
    (out,) = memory(1, "aligned")
    out.flags.writeable = False
    assert store.get([(key, out)]) == {0}
    assert not out.any()


def test_more_buffers_than_a_system_call_accepts_are_transferred(tmp_path: Path) -> None:
    files = RealFiles()
    fd = files.open(tmp_path / "file", Access.CREATE, direct=False)
    try:
        pieces = [bytes([i % 251]) * BLOCK for i in range(2500)]
        write_exactly(files, fd, [memoryview(piece) for piece in pieces], BLOCK)
        found = [bytearray(BLOCK) for _ in pieces]
        read_exactly(files, fd, [memoryview(piece) for piece in found], BLOCK)
        assert found == pieces
        with pytest.raises(OSError, match="ended"):
            read_exactly(files, fd, [memoryview(bytearray(BLOCK))], 3000 * BLOCK)
    finally:
        files.close(fd)
