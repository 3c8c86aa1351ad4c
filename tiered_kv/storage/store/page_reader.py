"""Reads of pages. Adjacent pages are read together, and each page is checked before it counts as
read."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from itertools import accumulate, pairwise
from queue import SimpleQueue
from threading import Lock

from tiered_kv.codecs.base import Bytes
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.aligned import is_blocks
from tiered_kv.storage.disk.files import BLOCK, read_exactly
from tiered_kv.storage.segment.format import FormatError
from tiered_kv.storage.segment.record import check_page, decode_record

from .catalogue import Catalogue, Entry
from .options import StoreContext

logger = logging.getLogger(__name__)

_READ_BYTES = (128 << 10, 5 << 19)


@dataclass(slots=True)
class _Wanted:
    """A page that was requested in a call of ``get``.

    Attributes:
        index: position of the page in that call.
        entry: catalogue entry of the page.
        out: memory for the page.
        offset, nbytes: position and size of the page's record in the segment, bytes.
    """

    index: int
    entry: Entry
    out: Bytes
    offset: int
    nbytes: int

    @property
    def in_place(self) -> bool:
        """True if the disk can read into ``out`` directly, because the page is stored raw and is
        block-aligned."""
        place, out = self.entry.place, self.out
        return (
            self.entry.segment.codec.stores_in_place
            and place.frame_bytes == 0
            and place.plane_bytes == out.nbytes
            and is_blocks(out)
            and out.flags.writeable
        )


@dataclass(frozen=True, slots=True)
class _Bad:
    """A page that could not be read.

    Attributes:
        reason: text of the error. The error itself would keep this object and its buffer alive
            through its traceback.
        unread: True if the disk failed; False if the bytes that were read are not the page.
    """

    item: _Wanted
    reason: str
    unread: bool

    @classmethod
    def of(cls, item: _Wanted, error: OSError | FormatError) -> _Bad:
        return cls(item, str(error), isinstance(error, OSError))


@dataclass(frozen=True, slots=True)
class _Read:
    """Adjacent pages, and the memory into which they are read.

    Attributes:
        direct: for each page, True if the page is read directly into ``out``. In this case only the
            header of its record is in the buffer.
        sizes: bytes of the buffer for each page.
    """

    run: Sequence[_Wanted]
    direct: Sequence[bool]
    sizes: Sequence[int]
    buffer: Bytes

    def pieces(self) -> list[memoryview]:
        """Return the memory for the bytes on disk from the first page to the last, in pieces."""
        data, pieces = self.buffer.data, list[memoryview]()
        begin = end = 0
        for item, whole, size in zip(self.run, self.direct, self.sizes, strict=True):
            end += size
            if whole:
                pieces += (data[begin:end], item.out.data)
                begin = end
        return pieces if begin == end else [*pieces, data[begin:end]]

    def check(self) -> list[_Bad]:
        """Check every page, and decode it unless it was read in place. Returns the bad pages."""
        data, bad = self.buffer.data, list[_Bad]()
        ends = accumulate(self.sizes, initial=0)
        for item, whole, (begin, end) in zip(self.run, self.direct, pairwise(ends), strict=True):
            segment, key, out = item.entry.segment, item.entry.place.key, item.out
            header, record = segment.header, data[begin:end]
            try:
                if whole:
                    check_page(header, key, record, out)
                else:
                    decode_record(header, segment.codec, key, record, out)
            except FormatError as error:
                bad.append(_Bad.of(item, error))
        return bad


class PageReader:
    """Reads pages from all segments, and drops bad pages."""

    def __init__(self, context: StoreContext, catalogue: Catalogue) -> None:
        self._context = context
        self._catalogue = catalogue

    def get(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        """See ``SegmentStore.get``."""
        wanted = [
            _Wanted(i, entry, out, entry.place.offset, entry.place.nbytes)
            for i, (key, out) in enumerate(pages)
            if (entry := self._catalogue.pages.get(key)) is not None
            and self._context.options.is_page(out)
        ]
        bad = self._read(wanted)
        failed = {found.item.index for found in bad}
        good = [item for item in wanted if item.index not in failed]
        nbytes = sum(item.entry.place.stored_bytes for item in good)
        self._context.stats.bytes_read += nbytes
        self._drop(bad)
        self._catalogue.close_some()
        return frozenset(range(len(pages))).difference(item.index for item in good)

    def _read(self, wanted: Sequence[_Wanted]) -> list[_Bad]:
        threads = self._context.options.io_threads
        source, mutex = _runs(wanted, threads), Lock()
        read: SimpleQueue[_Read | None] = SimpleQueue()
        bad: list[_Bad] = []

        def work() -> None:
            """Take runs from ``source``, which all workers share, and read them until no run is
            left."""
            try:
                while True:
                    with mutex:
                        run = next(source, None)
                        if run is None:
                            return
                        try:
                            fd = self._catalogue.open(run[0].entry.segment)
                        except OSError as error:
                            bad.extend(_Bad.of(item, error) for item in run)
                            continue
                    self._read_run(fd, run, read, bad)
            finally:
                read.put(None)

        workers = [self._context.threads.submit(work) for _ in range(min(threads, len(wanted)))]
        try:
            for _ in workers:
                while (done := read.get()) is not None:
                    bad += self._checked(done)
        finally:
            wait(workers)  # otherwise the disk could still write to memory that the caller reuses
        for worker in workers:
            worker.result()
        return bad

    def _read_run(
        self,
        fd: int,
        run: Sequence[_Wanted],
        read: SimpleQueue[_Read | None],
        bad: list[_Bad],
        *,
        in_place: bool = True,
    ) -> None:
        """Read adjacent pages, and decode them on this thread if necessary.

        Raw pages are checked on the caller's thread: checking is little work, but on this thread it
        would keep the disk waiting.

        Args:
            in_place: True to read directly into ``out`` where possible.
        """
        context = self._context
        direct = [in_place and item.in_place for item in run]
        sizes = [BLOCK if whole else item.nbytes for item, whole in zip(run, direct, strict=True)]
        try:
            buffer = context.buffers.take(sum(sizes))
        except OSError as error:  # out of memory
            bad.extend(_Bad.of(item, error) for item in run)
            return
        done = _Read(run, direct, sizes, buffer)
        try:
            nbytes = run[-1].offset + run[-1].nbytes - run[0].offset
            read_exactly(context.files, fd, done.pieces(), run[0].offset)
            if not context.direct:
                context.files.uncache(fd, run[0].offset, nbytes)
        except OSError as error:
            context.buffers.give(buffer)
            if error.errno == errno.EFAULT and any(direct):  # direct I/O cannot write to ``out``
                self._read_run(fd, run, read, bad, in_place=False)
            elif len(run) == 1:
                bad.append(_Bad.of(run[0], error))
            else:  # one unreadable page must not fail the pages next to it
                for item in run:
                    self._read_run(fd, [item], read, bad, in_place=in_place)
        else:
            if all(direct):
                read.put(done)
            else:
                bad.extend(self._checked(done))

    def _checked(self, done: _Read) -> list[_Bad]:
        """Check and decode pages that were read. Returns the bad pages."""
        try:
            return done.check()
        finally:
            self._context.buffers.give(done.buffer)

    def _drop(self, bad: Sequence[_Bad]) -> None:
        for found in bad:
            self._context.stats.pages_bad += 1
            self._context.stats.read_errors += found.unread
            entry = found.item.entry
            logger.warning(
                "a page in %s is unusable and was dropped: %s", entry.segment.path, found.reason
            )
            if self._catalogue.pages.get(entry.place.key) is entry:  # not dropped already
                self._catalogue.forget(entry.place.key)


def _runs(wanted: Sequence[_Wanted], threads: int) -> Iterator[list[_Wanted]]:
    """Yield groups of adjacent pages, each for one read. Reads are large, but small enough that
    every thread has work."""
    total = sum(item.nbytes for item in wanted)
    limit = min(max(total // (2 * threads), _READ_BYTES[0]), _READ_BYTES[1])
    run: list[_Wanted] = []
    begin = end = 0
    for item in sorted(wanted, key=lambda item: (item.entry.segment.number, item.offset)):
        if run and (
            item.entry.segment is not run[0].entry.segment
            or item.offset != end
            or end + item.nbytes - begin > limit
        ):
            yield run
            run = []
        if not run:
            begin = item.offset
        run.append(item)
        end = item.offset + item.nbytes
    if run:
        yield run
