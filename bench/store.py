"""Share of the device's speed that the SSD store gets, and the time that it takes to open.

    python -m bench.store --json

Random pages are put in groups of 128 MiB, as the I/O thread does, and read back as they were
put, as contexts are, one at random after the other, with the ``raw`` codec: what is measured
is the store, not a codec. ``*_mbs`` is
MB of stored pages per second, beginning to end: finding, copying, hashing, new segments and
fdatasync included. ``device_*_mbs`` is what the file system gives without a store: O_DIRECT,
random order for reads, for writes new files with their room reserved (as segments are, but
with one fdatasync at the end), and the best of 1 to 8 threads and 128 KiB to 4 MiB blocks.
``device_rewrite_mbs`` is the same as ``device_write_mbs``, into files written before: some
disks, virtual ones above all, are faster where there was something.

All settings of the device are tried in turn, three times each; the best three then take
turns with the store, as much data each. A round is long enough for the store to begin and
seal a segment, and turns are short enough for a neighbour on the disk to hit everybody. A
``fraction`` is the median over the rounds of store over device in the same round, so that one
bad round decides nothing; the device is the one of the three with the best median.

``open_s`` is the median of three openings of a store of 100,000 pages, read from the disk and
not from the page cache. Its segments have headers and footers, and holes for the pages, of
which opening reads nothing.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from tiered_kv.bench.micro.device import (
    DEVICE_BLOCKS,
    ROUNDS,
    SLICES,
    SWEEP_BYTES,
    SWEEPS,
    Device,
    Tick,
    contest,
    finalists,
    huge_bytes,
)
from tiered_kv.bench.output import AsJson, progress, run_benchmark, show
from tiered_kv.codecs.base import Bytes, ElementType, PageFormat
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.codecs.registry import from_table
from tiered_kv.keys import PageKey
from tiered_kv.storage.io_thread import group_pages
from tiered_kv.storage.segment.format import FooterEntry, SegmentHeader, footer_bytes
from tiered_kv.storage.segment.headers import pack_footer, pack_segment_header
from tiered_kv.storage.store.options import StoreOptions, io_threads
from tiered_kv.storage.store.store import SegmentStore

OPEN_PAGES, OPEN_PAGE_BYTES, OPENINGS = 100_000, 64 << 10, 3
KEY_BYTES = 48
CAPACITY_BYTES = 64 << 30
"""Capacity at which nothing is evicted, and segments have their full size."""


class Contestant:
    """A store of random pages that lie in slots, as the CPU pool's do.

    Args:
        content: random bytes, from which pages are cut.
    """

    def __init__(self, root: Path, page_bytes: int, threads: int, content: Bytes) -> None:
        page_format = PageFormat(ElementType.OPAQUE, page_bytes, 16)
        options = StoreOptions(
            root, bytes(16), 0, 0, 1, page_format, CAPACITY_BYTES, io_threads=threads
        )
        self._store = SegmentStore(options, RawCodec(page_format), from_table)
        self._content = content
        self._page_bytes = page_bytes
        self._group = group_pages(page_bytes)
        self._slots = huge_bytes(self._group * page_bytes).reshape(self._group, page_bytes)
        self._random = np.random.default_rng(2)
        self._pages = 0

    @property
    def direct(self) -> bool:
        return self._store.direct

    def _page(self, name: int) -> Bytes:
        """Cut somewhere else for every page, so that no two are the same."""
        start = name * 1_000_003 % (self._content.nbytes - self._page_bytes)
        return self._content[start : start + self._page_bytes]

    def write(self, nbytes: int) -> float:
        """Put so many new pages; MB/s."""
        seconds = 0.0
        for _ in range(nbytes // self._slots.nbytes):
            names = range(self._pages, self._pages + self._group)
            self._pages += self._group
            for slot, name in zip(self._slots, names, strict=True):
                slot[:] = self._page(name)
            pages = list(zip(map(_key, names), self._slots, strict=True))
            began = time.perf_counter()
            failed = self._store.put(pages)
            seconds += time.perf_counter() - began
            if failed:
                raise RuntimeError(f"{len(failed)} pages were not stored")
        return nbytes / seconds / 1e6

    def read(self, nbytes: int) -> float:
        """Get so many pages, of random contexts; MB/s.

        Raises:
            RuntimeError: a page was lost, or another came back.
        """
        seconds = 0.0
        for _ in range(nbytes // self._slots.nbytes):
            first = int(self._random.integers(self._pages // self._group)) * self._group
            names = range(first, first + self._group)
            pages = list(zip(map(_key, names), self._slots, strict=True))
            began = time.perf_counter()
            failed = self._store.get(pages)
            seconds += time.perf_counter() - began
            one = int(self._random.integers(self._group))
            if failed or not np.array_equal(self._slots[one], self._page(names[one])):
                raise RuntimeError("a page did not come back as it was put")
        return nbytes / seconds / 1e6

    def close(self) -> None:
        self._store.close()


def _key(name: int) -> PageKey:
    return PageKey(name.to_bytes(KEY_BYTES, "big"))


def build_sparse(options: StoreOptions, pages: int) -> None:
    """The segments of a store of so many pages, all sealed, with holes for the pages."""
    record = FooterEntry(_key(0), 0, options.page_format.page_bytes, 0, 0).nbytes
    room = options.segment_bytes - footer_bytes(1, KEY_BYTES)
    per_segment = room // (record + footer_bytes(1, 0) // 32)
    options.folder.mkdir(parents=True)
    now = int(time.time())
    for number, first in enumerate(range(0, pages, per_segment), 1):
        header = SegmentHeader(
            fingerprint=options.fingerprint,
            nonce=number,
            number=number,
            created=now,
            page_format=options.page_format,
            codec_id=RawCodec.codec_id,
            rank=options.rank,
            ranks=options.ranks,
            replica=options.replica,
            table=b"",
        )
        entries = [
            FooterEntry(
                _key(name),
                header.header_bytes + i * record,
                options.page_format.page_bytes,
                0,
                now,
            )
            for i, name in enumerate(range(first, min(first + per_segment, pages)))
        ]
        end = header.header_bytes + len(entries) * record
        with (options.folder / f"{number:08}.seg").open("wb") as file:
            file.write(pack_segment_header(header))
            file.seek(end)
            file.write(pack_footer(header, end, entries))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_opening(root: Path, tick: Tick) -> list[float]:
    """Seconds each opening of a large store took.

    Raises:
        RuntimeError: pages are missing.
    """
    page_format = PageFormat(ElementType.OPAQUE, OPEN_PAGE_BYTES, 16)
    options = StoreOptions(root, bytes(16), 0, 0, 1, page_format, CAPACITY_BYTES)
    build_sparse(options, OPEN_PAGES)
    seconds = []
    for _ in range(OPENINGS):
        began = time.perf_counter()
        store = SegmentStore(options, RawCodec(page_format), from_table)
        seconds.append(time.perf_counter() - began)
        found = len(store)
        store.close()
        if found != OPEN_PAGES:
            raise RuntimeError(f"{found} of {OPEN_PAGES} pages were found")
        tick("opening")
    return seconds


@contextmanager
def contestants(
    folder: Path, nbytes: int, page_bytes: int, threads: int
) -> Iterator[tuple[Contestant, Device]]:
    """The store, empty, and the device, with a file of ``nbytes``."""
    content = huge_bytes(SWEEP_BYTES)
    content[:] = np.frombuffer(np.random.default_rng(0).bytes(content.nbytes), np.uint8)
    store = Contestant(folder / "store", page_bytes, threads, content)
    try:
        if not store.direct:
            raise RuntimeError(f"{folder} does not take O_DIRECT: give another --folder")
        (folder / "device").mkdir()
        device = Device(folder / "device", nbytes, content)
        try:
            yield store, device
        finally:
            device.close()
    finally:
        store.close()


def measure(
    folder: Path, mib: int, page_kib: int, threads: int, tick: Tick
) -> dict[str, float | int | str]:
    """All figures; see the module.

    Raises:
        RuntimeError: the store lost a page, or the file system has no O_DIRECT.
    """
    group = group_pages(page_kib << 10) * page_kib << 10
    slices = ROUNDS * SLICES
    chunk = max(1, (mib << 20) // slices // group) * group
    device_chunk = -(-chunk // max(DEVICE_BLOCKS)) * max(DEVICE_BLOCKS)
    file_bytes = -(-max(mib << 20, device_chunk) // SWEEP_BYTES) * SWEEP_BYTES
    with contestants(folder, file_bytes, page_kib << 10, threads) as (store, device):
        outcomes = {}
        for name, ours, theirs in (
            ("write", store.write, device.write),
            ("read", store.read, device.read),
        ):
            best = finalists(theirs, tick)
            passes = {one: partial(theirs, *one, device_chunk) for one in best}
            outcomes[name] = contest(partial(ours, chunk), passes, tick)
        read, write = outcomes["read"], outcomes["write"]
        again = [device.rewrite(write.threads, write.block, device_chunk) for _ in range(SWEEPS)]
    openings = time_opening(folder / "large", tick)
    return {
        "read_fraction": read.fraction,
        "write_fraction": write.fraction,
        "read_mbs": read.store_mbs,
        "write_mbs": write.store_mbs,
        "device_read_mbs": read.device_mbs,
        "device_write_mbs": write.device_mbs,
        "device_rewrite_mbs": statistics.median(again),
        "device_read_threads": read.threads,
        "device_read_block_kib": read.block >> 10,
        "device_write_threads": write.threads,
        "device_write_block_kib": write.block >> 10,
        "open_s": statistics.median(openings),
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
    mib: Annotated[int, typer.Option(help="Size of the pages that are put, MiB.")] = 2560,
    page_kib: Annotated[int, typer.Option(help="Size of a page, KiB.")] = 512,
    threads: Annotated[
        int | None, typer.Option(help="Threads of the store; as many as the connector's if none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the store beside its disk."""
    with (
        tempfile.TemporaryDirectory(dir=folder.resolve(), prefix=".bench-store-") as name,
        progress() as bar,
    ):
        bar.disable = not sys.stderr.isatty()
        task = bar.add_task("writing the device's file", total=2 * (SWEEPS + ROUNDS) + OPENINGS)
        result = measure(
            Path(name),
            mib,
            page_kib,
            threads or io_threads(len(os.sched_getaffinity(0))),
            lambda what: bar.update(task, advance=1, description=what),
        )
    show("The SSD store beside its device", result, as_json)


if __name__ == "__main__":
    run_benchmark(main, __doc__)
