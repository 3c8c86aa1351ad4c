"""Opening a segment needs few reads, and no more memory than a segment can hold."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tiered_kv.codecs.base import ElementType, PageFormat
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.storage.disk.files import BLOCK, Access, Buffers, FileLayer, RealFiles
from tiered_kv.storage.segment.format import (
    SEGMENT_BYTES,
    TRAILER,
    TRAILER_MAGIC,
    FormatError,
    SegmentHeader,
    footer_bytes,
    most_segment_bytes,
)
from tiered_kv.storage.segment.headers import pack_segment_header
from tiered_kv.storage.segment.loader import LoadedSegment, load_segment
from tiered_kv.storage.store.store import SegmentStore
from tiered_kv.testing.conformance.store import FINGERPRINT, PAGE_FORMAT, page_bytes, page_key
from tiered_kv.testing.files import UnsafeFiles
from tiered_kv.testing.segment_store import store_options


class CountedFiles(UnsafeFiles):
    """Counts the reads, and the requested bytes."""

    def __init__(self) -> None:
        self.reads = 0
        self.asked = 0

    def pread(self, fd: int, buffers: Buffers, offset: int) -> int:
        self.reads += 1
        self.asked += sum(map(len, buffers))
        return super().pread(fd, buffers, offset)


@pytest.fixture
def files() -> CountedFiles:
    return CountedFiles()


def open_store(
    root: Path, page_format: PageFormat = PAGE_FORMAT, files: FileLayer | None = None
) -> SegmentStore:
    options = store_options(root, page_format=page_format, capacity_bytes=1 << 30)
    return SegmentStore(options, RawCodec(page_format), lambda i, t, f: RawCodec(f), files)


def unsealed(root: Path, count: int, page_format: PageFormat = PAGE_FORMAT) -> Path:
    """Write a segment of ``count`` pages, as a killed process leaves it. Returns its path."""
    store = open_store(root, page_format, UnsafeFiles())
    for first in range(0, count, 50):
        keys = [page_key(name) for name in range(first, min(count, first + 50))]
        pages = [(key, page_bytes(key, 0, page_format.page_bytes)) for key in keys]
        assert store.put(pages) == frozenset()
    (path,) = store.options.folder.glob("*.seg")
    copy = root / "killed"
    copy.write_bytes(path.read_bytes()[: (count + 9) * (page_format.page_bytes + BLOCK)])
    store.close()
    copy.rename(path)
    return path


def load(path: Path, files: FileLayer) -> LoadedSegment:
    fd = files.open(path, Access.READ, direct=False)
    try:
        return load_segment(files, fd)
    finally:
        files.close(fd)


def header_of(**changes: object) -> SegmentHeader:
    header = SegmentHeader(FINGERPRINT, 99, 61, 0, PAGE_FORMAT, 0, 0, 1, 0, b"")
    return replace(header, **changes)  # type: ignore[arg-type]


# -- few reads ---------------------------------------------------------------------------


def test_an_unsealed_segment_of_small_pages_is_read_in_large_reads(
    tmp_path: Path, files: CountedFiles
) -> None:
    path = unsealed(tmp_path, 1000)
    loaded = load(path, files)
    assert not loaded.sealed
    assert [entry.key for entry in loaded.entries] == [page_key(name) for name in range(1000)]
    # Reads of the start and of the end, and one read for each page of the last group.
    beside = 4 + 50
    assert files.reads <= beside + path.stat().st_size // (1 << 20) + 2
    assert files.asked < 2 * path.stat().st_size


def test_only_the_headers_of_large_pages_are_read(tmp_path: Path, files: CountedFiles) -> None:
    large = PageFormat(ElementType.BF16, page_bytes=256 << 10, tokens=16)
    path = unsealed(tmp_path, 120, large)
    loaded = load(path, files)
    assert len(loaded.entries) == 120
    last_group = 20 * (large.page_bytes + BLOCK)
    assert files.asked < last_group + (4 << 20)


def test_after_damaged_headers_nothing_is_read_twice(tmp_path: Path, files: CountedFiles) -> None:
    path = unsealed(tmp_path, 1000)
    content = bytearray(path.read_bytes())
    for name in range(0, 900, 2):
        content[BLOCK + name * 2 * BLOCK] ^= 0xFF
    path.write_bytes(content)
    loaded = load(path, files)
    expected = [name for name in range(1000) if name >= 900 or name % 2]
    assert [entry.key for entry in loaded.entries] == [page_key(name) for name in expected]
    assert files.asked < 2 * len(content)


# -- bounded memory ----------------------------------------------------------------------


def sparse(path: Path, header: SegmentHeader, nbytes: int, end: bytes = b"") -> None:
    path.write_bytes(pack_segment_header(header))
    os.truncate(path, nbytes)
    with path.open("r+b") as file:
        file.seek(nbytes - len(end))
        file.write(end)


def trailer(header: SegmentHeader, offset: int, count: int, key_bytes: int) -> bytes:
    """Return a valid trailer, as an attacker could create it."""
    fixed = TRAILER.pack(TRAILER_MAGIC, header.nonce, offset, count, key_bytes, bytes(16))
    return fixed + xxhash.xxh3_128_digest(fixed)


def test_a_file_longer_than_any_segment_is_refused(tmp_path: Path, files: CountedFiles) -> None:
    path = tmp_path / "00000061.seg"
    sparse(path, header_of(), 1 << 40)
    with pytest.raises(FormatError, match="longer than a segment can be"):
        load(path, files)
    assert files.asked < 1 << 20


def test_the_longest_segment_is_accepted(tmp_path: Path, files: CountedFiles) -> None:
    assert most_segment_bytes(PAGE_FORMAT) == SEGMENT_BYTES
    huge = PageFormat(ElementType.BF16, 1 << 30, 16)
    options = store_options(tmp_path, page_format=huge)
    assert most_segment_bytes(huge) == options.segment_bytes > 8 << 30
    path = tmp_path / "00000061.seg"
    header = header_of()
    end = trailer(header, SEGMENT_BYTES - BLOCK, 0, 0)
    sparse(path, header, SEGMENT_BYTES, end)
    with path.open("r+b") as file:
        file.seek(SEGMENT_BYTES - len(end))
        fixed = TRAILER.pack(
            TRAILER_MAGIC, 99, SEGMENT_BYTES - BLOCK, 0, 0, xxhash.xxh3_128_digest(b"")
        )
        file.write(fixed + xxhash.xxh3_128_digest(fixed))
    assert load(path, files).sealed
    os.truncate(path, SEGMENT_BYTES + BLOCK)
    with pytest.raises(FormatError, match="longer than a segment can be"):
        load(path, files)


def test_a_footer_with_too_many_entries_is_refused(tmp_path: Path, files: CountedFiles) -> None:
    """A footer that claims to fill the whole file is refused, and no more than 1 MiB is read at a
    time."""
    header, count = header_of(), 4_000_000
    offset = header.header_bytes
    nbytes = offset + footer_bytes(count, 0)
    assert nbytes < SEGMENT_BYTES
    path = tmp_path / "00000061.seg"
    sparse(path, header, nbytes, trailer(header, offset, count, 0))
    largest = 0

    class Watched(CountedFiles):
        def pread(self, fd: int, buffers: Buffers, offset: int) -> int:
            nonlocal largest
            largest = max(largest, sum(map(len, buffers)))
            return super().pread(fd, buffers, offset)

    loaded = load(path, Watched())
    assert (loaded.sealed, loaded.entries) == (False, [])
    assert largest <= 1 << 20


@pytest.mark.parametrize("page_bytes", [1 << 32, 1 << 44, (1 << 63) + 4096])
def test_pages_too_large_for_a_record_are_refused(
    tmp_path: Path, files: CountedFiles, page_bytes: int
) -> None:
    path = tmp_path / "00000061.seg"
    sparse(path, header_of(page_format=PageFormat(ElementType.BF16, page_bytes, 16)), 1 << 20)
    with pytest.raises(FormatError, match="impossible page size"):
        load(path, files)


@pytest.fixture
def little_memory() -> Iterator[None]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
def test_a_store_with_oversized_files_opens_and_serves(tmp_path: Path) -> None:
    store = open_store(tmp_path, files=UnsafeFiles())
    key = page_key(1)
    assert store.put([(key, page_bytes(key))]) == frozenset()
    folder = store.options.folder
    store.close()
    large = PageFormat(ElementType.BF16, 1 << 31, 16)  # a segment of such pages may have 16 GiB
    for number, header, nbytes in (
        (60, header_of(number=60), 1 << 40),
        (61, header_of(page_format=large), 16 << 30),
        (62, header_of(number=62, fingerprint=bytes(16)), SEGMENT_BYTES),
        (63, header_of(number=63), 512 << 20),
    ):
        sparse(folder / f"{number:08}.seg", header, nbytes)
    files = CountedFiles()
    store = open_store(tmp_path, files=files)
    assert store.keys() == [key]
    out = np.zeros(PAGE_FORMAT.page_bytes, np.uint8)
    assert store.get([(key, out)]) == frozenset()
    assert np.array_equal(out, page_bytes(key))
    assert files.asked <= SEGMENT_BYTES + (8 << 20), "one of them might be a segment"
    store.close()


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "link", "folder"):
        for access in (Access.READ, Access.WRITE):
            with pytest.raises(OSError, match=r"not a regular file|symbolic|directory"):
                RealFiles().open(tmp_path / name, access, direct=False)
    assert RealFiles().names(tmp_path) == []
    plain = RealFiles().open(tmp_path / "plain", Access.CREATE, direct=False)
    assert os.get_blocking(plain)
    RealFiles().close(plain)
    assert RealFiles().names(tmp_path) == ["plain"]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
