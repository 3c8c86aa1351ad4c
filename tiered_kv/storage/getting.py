"""Getting pages: neighbours on disk in one read, each checked before it counts as read."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from tiered_kv.codecs.base import Bytes
from tiered_kv.keys import PageKey
from tiered_kv.storage.catalogue import Catalogue, Entry
from tiered_kv.storage.files import read_exactly
from tiered_kv.storage.records import decode_record
from tiered_kv.storage.segment_format import FooterEntry, FormatError
from tiered_kv.storage.store_means import Speed, StoreMeans

logger = logging.getLogger(__name__)

_READ_BYTES = (128 << 10, 9 << 19)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A page of a get."""

    index: int
    entry: Entry
    out: Bytes

    @property
    def place(self) -> FooterEntry:
        return self.entry.place


@dataclass(frozen=True, slots=True)
class _Bad:
    """A page that could not be read, and why."""

    item: _Wanted
    error: OSError | FormatError


class Getter:
    """Reads pages from whatever segments they are in, and drops those that are bad.

    Attributes:
        speed: of recent gets.
    """

    def __init__(self, means: StoreMeans, catalogue: Catalogue) -> None:
        self.speed = Speed()
        self._means = means
        self._catalogue = catalogue

    def get(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        """See ``SegmentStore.get``."""
        began = time.monotonic()
        wanted = [
            _Wanted(i, entry, out)
            for i, (key, out) in enumerate(pages)
            if (entry := self._catalogue.pages.get(key)) is not None
            and self._means.options.is_page(out)
        ]
        bad = self._read(wanted)
        failed = {found.item.index for found in bad}
        good = [item for item in wanted if item.index not in failed]
        nbytes = sum(item.place.stored_bytes for item in good)
        self._means.stats.pages_read += len(good)
        self._means.stats.bytes_read += nbytes
        self._drop(bad)
        self._catalogue.close_some()
        self.speed.add(nbytes, time.monotonic() - began)
        return frozenset(range(len(pages))).difference(item.index for item in good)

    def _read(self, wanted: Sequence[_Wanted]) -> list[_Bad]:
        bad: list[_Bad] = []
        reads: list[Future[list[_Bad]]] = []
        for run in _runs(wanted, self._means.options.io_threads):
            try:
                fd = self._catalogue.open(run[0].entry.segment)
            except OSError as error:
                bad += [_Bad(item, error) for item in run]
            else:
                reads.append(self._means.threads.submit(self._read_run, fd, run))
        for read in reads:
            bad += read.result()
        return bad

    def _read_run(self, fd: int, run: Sequence[_Wanted]) -> list[_Bad]:
        """Read pages that lie one behind the other; returns those that are bad."""
        means = self._means
        start = run[0].place.offset
        nbytes = run[-1].place.offset + run[-1].place.nbytes - start
        try:
            buffer = means.buffers.take(nbytes)
        except OSError as error:  # no memory
            return [_Bad(item, error) for item in run]
        try:
            view = buffer.data[:nbytes]
            read_exactly(means.files, fd, [view], start)
            if not means.direct:
                means.files.uncache(fd, start, nbytes)
            return [found for item in run if (found := _decode(item, view, start)) is not None]
        except OSError as error:
            if len(run) == 1:
                return [_Bad(run[0], error)]
        finally:
            means.buffers.give(buffer)
        # One page that cannot be read must not take its neighbours with it.
        return [found for item in run for found in self._read_run(fd, [item])]

    def _drop(self, bad: Sequence[_Bad]) -> None:
        for found in bad:
            self._means.stats.pages_bad += 1
            if isinstance(found.error, OSError):
                self._means.stats.read_errors += 1
            entry = found.item.entry
            logger.warning("a page in %s is dropped: %s", entry.segment.path, found.error)
            if self._catalogue.pages.get(entry.place.key) is entry:  # not dropped already
                self._catalogue.forget(entry.place.key)


def _runs(wanted: Sequence[_Wanted], threads: int) -> Iterator[list[_Wanted]]:
    """Pages that are read at once: neighbours on disk, in reads that are large, but not so
    large that a thread has none."""
    total = sum(item.place.nbytes for item in wanted)
    limit = min(max(total // (2 * threads), _READ_BYTES[0]), _READ_BYTES[1])
    run: list[_Wanted] = []
    for item in sorted(wanted, key=lambda item: (item.entry.segment.number, item.place.offset)):
        if run:
            last = run[-1]
            end = last.place.offset + last.place.nbytes
            if (
                item.entry.segment is not last.entry.segment
                or item.place.offset != end
                or end + item.place.nbytes - run[0].place.offset > limit
            ):
                yield run
                run = []
        run.append(item)
    if run:
        yield run


def _decode(item: _Wanted, view: memoryview, start: int) -> _Bad | None:
    """Check and decode one page of the bytes that begin at ``start`` in its segment."""
    segment, place = item.entry.segment, item.place
    record = view[place.offset - start : place.offset - start + place.nbytes]
    try:
        decode_record(segment.header, segment.table_id, segment.codec, place.key, record, item.out)
    except FormatError as error:
        return _Bad(item, error)
    return None
