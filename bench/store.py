"""Speed of the SSD store as a fraction of the disk's speed, and the time to open a store.

    python -m bench.store --json

Random pages are written in groups of 128 MiB, as by the I/O thread, and the groups are read back in
random order, like contexts. The codec is ``raw``, so that the store is measured and not a codec.
``*_mbs`` is MB of stored pages per second, including lookups, copies, hashing, new segments and
fdatasync.

``device_*_mbs`` is the speed of the file system without a store. The same bytes move between the
same 128 MiB of memory and files, with O_DIRECT: reads in random order of groups, writes into new
preallocated files (like segments, but with a single fdatasync at the end). It is the best speed
over thread counts up to the store's, and over block sizes of 512 KiB to 4 MiB.
``device_rewrite_mbs`` is like ``device_write_mbs``, but into existing files, because some disks,
especially virtual ones, are faster when overwriting.

The store and all device settings alternate, with the same number of bytes each. A round is long
enough for the store to start and seal a segment, and slices are so short that other load on the
disk affects all of them. A ``fraction`` is the store's speed, divided by the device's speed in the
same round, as the median over rounds, so that a single bad round has little effect. For the device,
the setting with the best median counts.

``open_s`` is the median of three openings of a store of 100,000 pages, read from the disk and not
from the page cache. The store's segments have headers and footers, and holes in place of pages,
which opening does not read.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tiered_kv.bench.output import AsJson, Tick, benchmark, run_benchmark
from tiered_kv.codecs.base import Bytes, ElementType, PageFormat
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.codecs.registry import from_table
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.aligned import aligned_bytes
from tiered_kv.storage.disk.files import Buffers, FileLayer, RealFiles
from tiered_kv.storage.io_thread import group_pages
from tiered_kv.storage.store.options import StoreOptions, io_threads
from tiered_kv.storage.store.store import SegmentStore

BLOCKS = (512 << 10, 2 << 20, 4 << 20)
ROUNDS, SLICES = 5, 4
"""Number of rounds, over which medians are taken, and number of slices per round. Store and device
alternate after each slice."""
REWRITES = 3
KEEP_FILES = 8
"""Number of files that the device keeps before deleting them, so that a new file does not reuse the
previous file's space."""
CONTENT_BYTES = 64 << 20
OPEN_PAGES, OPEN_PAGE_BYTES, OPENINGS = 100_000, 64 << 10, 3
KEY_BYTES = 48
HOLE_BYTES = 1 << 20
"""Writes of at least this length contain pages and leave a hole. Headers and footers are shorter.
"""
CAPACITY_BYTES = 64 << 30
"""Capacity at which no page is evicted and segments have their full size."""

Setting = tuple[int, int]
"""Number of threads, and block size in bytes."""
Pass = Callable[[], float]
"""Reads or writes a group of pages, and returns the duration in seconds."""


def _key(name: int) -> PageKey:
    return PageKey(name.to_bytes(KEY_BYTES, "big"))


def options_of(root: Path, page_bytes: int, threads: int = 4) -> StoreOptions:
    """Return the options of a store of raw pages."""
    form = PageFormat(ElementType.OPAQUE, page_bytes, 16)
    return StoreOptions(root, bytes(16), 0, 0, 1, form, CAPACITY_BYTES, io_threads=threads)


def open_store(options: StoreOptions, files: FileLayer | None = None) -> SegmentStore:
    """Open a store of raw pages."""
    return SegmentStore(options, RawCodec(options.page_format), from_table, files)


class Slots:
    """Page slots in memory for a group of pages, as in the CPU pool, and random content for
    them.
    """

    def __init__(self, page_bytes: int) -> None:
        self.count = group_pages(page_bytes)
        self.bytes = aligned_bytes(self.count * page_bytes)[: self.count * page_bytes]
        self.pages = self.bytes.reshape(self.count, page_bytes)
        self._content = np.frombuffer(np.random.default_rng(0).bytes(CONTENT_BYTES), np.uint8)

    def page(self, name: int) -> Bytes:
        """Return the content of the page with number ``name``, which differs from that of all other
        pages.
        """
        page_bytes = self.pages.shape[1]
        start = name * 1_000_003 % (self._content.nbytes - page_bytes)
        return self._content[start : start + page_bytes]

    def fill(self, first: int) -> None:
        """Fill the slots with consecutive pages, starting with number ``first``."""
        for at, slot in enumerate(self.pages):
            slot[:] = self.page(first + at)

    def named(self, first: int) -> list[tuple[PageKey, Bytes]]:
        """Return the slots with the keys of consecutive pages, starting with number ``first``."""
        return [(_key(first + at), slot) for at, slot in enumerate(self.pages)]


class Store:
    """The SSD store that is measured. It is initially empty."""

    def __init__(self, root: Path, slots: Slots, threads: int) -> None:
        self._store = open_store(options_of(root, slots.pages.shape[1], threads))
        self._slots = slots
        self._random = np.random.default_rng(2)
        self._groups = 0
        self.direct = self._store.direct
        self.close = self._store.close

    def write(self) -> float:
        """Write a group of new pages. Returns the duration, seconds.

        Raises:
            RuntimeError: pages were not stored.
        """
        first = self._groups * self._slots.count
        self._groups += 1
        self._slots.fill(first)
        pages = self._slots.named(first)
        began = time.perf_counter()
        failed = self._store.put(pages)
        seconds = time.perf_counter() - began
        if failed:
            raise RuntimeError(f"{len(failed)} pages were not stored")
        return seconds

    def read(self) -> float:
        """Read a random group. Returns the duration, seconds.

        Raises:
            RuntimeError: a page was lost or has wrong contents.
        """
        first = int(self._random.integers(self._groups)) * self._slots.count
        pages = self._slots.named(first)
        began = time.perf_counter()
        failed = self._store.get(pages)
        seconds = time.perf_counter() - began
        at = int(self._random.integers(self._slots.count))
        if failed or not np.array_equal(self._slots.pages[at], self._slots.page(first + at)):
            raise RuntimeError("a page read back differs from the page written")
        return seconds


class Device:
    """Files of the size of a group, written from the slots and read into them without the page
    cache.

    Args:
        folder: folder to create for the files.
        files: number of files to read.
        threads: maximum number of threads.
    """

    def __init__(self, folder: Path, files: int, slots: Slots, threads: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._slots = slots
        self._random = np.random.default_rng(1)
        self._written = 0
        self._threads = ThreadPoolExecutor(threads, "bench-device")
        slots.fill(0)
        self._files = [self._create(f"read-{number}") for number in range(files)]
        for fd in self._files:
            self._move(os.pwrite, fd, (threads, max(BLOCKS)))

    def _create(self, name: str) -> int:
        fd = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(fd, 0, self._slots.bytes.nbytes)
        os.fsync(fd)
        return fd

    def _move(
        self, call: Callable[[int, memoryview, int], int], fd: int, setting: Setting
    ) -> float:
        """Move a group between slots and file, block by block. Returns the duration, seconds."""
        memory, (threads, block) = self._slots.bytes.data, setting

        def work(thread: int) -> None:
            for offset in range(thread * block, len(memory), threads * block):
                piece = memory[offset : offset + block]
                if call(fd, piece, offset) != len(piece):
                    raise OSError("the disk transferred fewer bytes than requested")

        began = time.perf_counter()
        list(self._threads.map(work, range(threads)))
        if call is os.pwrite:
            os.fdatasync(fd)
        return time.perf_counter() - began

    def write(self, setting: Setting, *, again: bool = False) -> float:
        """Fill a new file. Returns the duration, seconds. With ``again``, fill the file twice, and
        return the duration of the second time.
        """
        self._slots.fill(self._written)
        fd = self._create(f"{self._written % KEEP_FILES}")
        try:
            for _ in range(1 + again):
                seconds = self._move(os.pwrite, fd, setting)
        finally:
            os.close(fd)
        self._written += 1
        (self._folder / f"{self._written % KEEP_FILES}").unlink(missing_ok=True)
        return seconds

    def read(self, setting: Setting) -> float:
        """Read a random file. Returns the duration, seconds."""
        return self._move(_read, int(self._random.choice(self._files)), setting)

    def close(self) -> None:
        """Close the files and stop the threads."""
        self._threads.shutdown()
        for fd in self._files:
            os.close(fd)


def _read(fd: int, piece: memoryview, offset: int) -> int:
    return os.preadv(fd, [piece], offset)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a comparison.

    Attributes:
        fraction: the store's speed, divided by the device's speed, as the median over the rounds.
        store_s, device_s: median seconds per round.
        best: the device's best setting.
    """

    fraction: float
    store_s: float
    device_s: float
    best: Setting


def contest(store: Pass, device: Mapping[Setting, Pass], groups: int, tick: Tick) -> Outcome:
    """Compare store and device, which run alternately. The order changes from slice to slice. The
    device counts with its best setting over all rounds.

    Args:
        groups: number of groups per slice.
    """
    everyone = [store, *device.values()]
    seconds = np.zeros((ROUNDS, len(everyone)))
    for number in range(ROUNDS):
        for turn in range(SLICES):
            for at in range(turn, turn + len(everyone)):
                move = everyone[at % len(everyone)]
                seconds[number, at % len(everyone)] += sum(move() for _ in range(groups))
        tick("store and device in turn")
    best = 1 + int(np.argmin(np.median(seconds[:, 1:], axis=0)))
    return Outcome(
        fraction=float(np.median(seconds[:, best] / seconds[:, 0])),
        store_s=float(np.median(seconds[:, 0])),
        device_s=float(np.median(seconds[:, best])),
        best=[*device][best - 1],
    )


class Holes(RealFiles):
    """Files with holes in place of pages: writes of long buffers and preallocation are skipped."""

    def preallocate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def pwrite(self, fd: int, buffers: Buffers, offset: int) -> int:
        nbytes = sum(map(len, buffers))
        return nbytes if nbytes >= HOLE_BYTES else super().pwrite(fd, buffers, offset)


def build_sparse(options: StoreOptions, pages: int) -> None:
    """Create a store of ``pages`` pages, with holes in place of their content, and drop its files
    from the page cache.

    Raises:
        RuntimeError: pages were not stored.
    """
    slots = Slots(options.page_format.page_bytes)
    with closing(open_store(options, Holes())) as store:
        for first in range(0, pages, slots.count):
            if failed := store.put(slots.named(first)[: pages - first]):
                raise RuntimeError(f"{len(failed)} pages were not stored")
    for path in options.folder.glob("*.seg"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_opening(root: Path, tick: Tick) -> float:
    """Return the median time to open a large store, seconds.

    Raises:
        RuntimeError: pages are missing.
    """
    options, seconds = options_of(root, OPEN_PAGE_BYTES), list[float]()
    build_sparse(options, OPEN_PAGES)
    for _ in range(OPENINGS):
        began = time.perf_counter()
        with closing(open_store(options)) as store:
            seconds.append(time.perf_counter() - began)
            if len(store) != OPEN_PAGES:
                raise RuntimeError(f"only {len(store)} of {OPEN_PAGES} pages were found")
        tick("opening")
    return statistics.median(seconds)


def measure(folder: Path, mib: int, page_kib: int, threads: int, tick: Tick) -> dict[str, Any]:
    """Measure all figures; see the module docstring.

    Args:
        mib: amount of pages to write, MiB.

    Raises:
        RuntimeError: the store lost a page, or the file system does not support O_DIRECT.
    """
    slots = Slots(page_kib << 10)
    groups = max(1, (mib << 20) // (ROUNDS * SLICES) // slots.bytes.nbytes)
    depths = [depth for depth in sorted({1, 2, 4, threads}) if depth <= threads]
    settings = [(depth, block) for depth in depths for block in BLOCKS]
    with closing(Store(folder / "store", slots, threads)) as store:
        if not store.direct:
            raise RuntimeError(f"{folder} does not support O_DIRECT: choose another --folder")
        with closing(Device(folder / "device", ROUNDS * SLICES * groups, slots, threads)) as device:
            write, read = (
                contest(ours, {one: partial(theirs, one) for one in settings}, groups, tick)
                for ours, theirs in ((store.write, device.write), (store.read, device.read))
            )
            again = [
                sum(device.write(write.best, again=True) for _ in range(groups))
                for _ in range(REWRITES)
            ]
    mb = groups * slots.bytes.nbytes / 1e6
    return {
        "read_fraction": read.fraction,
        "write_fraction": write.fraction,
        "read_mbs": SLICES * mb / read.store_s,
        "write_mbs": SLICES * mb / write.store_s,
        "device_read_mbs": SLICES * mb / read.device_s,
        "device_write_mbs": SLICES * mb / write.device_s,
        "device_rewrite_mbs": mb / statistics.median(again),
        "device_read_threads": read.best[0],
        "device_read_block_kib": read.best[1] >> 10,
        "device_write_threads": write.best[0],
        "device_write_block_kib": write.best[1] >> 10,
        "open_s": time_opening(folder / "large", tick),
        "open_pages": OPEN_PAGES,
        "open_page_kib": OPEN_PAGE_BYTES >> 10,
        "page_kib": page_kib,
        "mib": mib,
        "rounds": ROUNDS,
        "threads": threads,
        "codec": "raw",
    }


def main(
    folder: Annotated[Path, typer.Option(help="Folder on the disk to measure.")] = Path(),
    mib: Annotated[int, typer.Option(help="Total size of the pages to write, MiB.")] = 2560,
    page_kib: Annotated[int, typer.Option(help="Size of a page, KiB.")] = 512,
    threads: Annotated[
        int | None,
        typer.Option(help="Number of store threads. Defaults to the connector's setting."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the store with its disk."""
    threads = threads or io_threads(len(os.sched_getaffinity(0)))
    with (
        tempfile.TemporaryDirectory(dir=folder.resolve(), prefix=".bench-store-") as name,
        benchmark("The SSD store and its disk", 2 * ROUNDS + OPENINGS, as_json=as_json) as run,
    ):
        run.result = measure(Path(name), mib, page_kib, threads, run.tick)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
