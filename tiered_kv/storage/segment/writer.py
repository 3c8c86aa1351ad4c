"""Appending to a segment: groups of records that become durable together, and finally a footer."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from tiered_kv.codecs.base import Bytes
from tiered_kv.storage.disk.aligned import BufferPool, write_content
from tiered_kv.storage.disk.files import FileLayer, write_exactly

from .format import FooterEntry, SegmentHeader, footer_bytes
from .headers import pack_footer, pack_segment_header
from .packing import PackedRecord, finish_headers

WORTH_CUTTING = 64
"""A segment is truncated only if more than one part in ``WORTH_CUTTING`` of it is unused.
Truncating takes a file system as long as writing several MiB."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Result of committing a group of records.

    Attributes:
        durable: locations of the durable records, in segment order.
        indices: indices of these records' pages in the call of ``put``.
        error: error that made the other records fail. The segment must then be sealed.
    """

    durable: list[FooterEntry]
    indices: list[int]
    error: OSError | None


@dataclass(frozen=True, slots=True)
class _Flight:
    """Adjacent records being written to disk."""

    records: Sequence[PackedRecord]
    places: list[FooterEntry]
    future: Future[None]


class SegmentWriter:
    """Appends records to a segment. One thread calls the methods; the threads that are passed to
    ``append`` write to the disk.

    Args:
        fd: descriptor of a new segment of ``size`` zeros.
        named: future that is done once the file's name is durable.

    Attributes:
        end: offset of the next record.
    """

    def __init__(
        self,
        files: FileLayer,
        fd: int,
        header: SegmentHeader,
        size: int,
        buffers: BufferPool,
        named: Future[None],
    ) -> None:
        self.end = header.header_bytes
        self._files = files
        self._fd = fd
        self._header = header
        self._size = size
        self._buffers = buffers
        self._named = named
        self._count = 0
        self._key_bytes = 0
        self._group = 0
        self._flights: list[_Flight] = []

    @property
    def empty(self) -> bool:
        """True if no record was appended."""
        return self._count == 0

    @property
    def room(self) -> int:
        """Number of bytes left after the last record."""
        return self._size - self.end

    def begin(self) -> None:
        """Write the segment's own header. The first commit makes it durable.

        Raises:
            OSError: the disk failed.
        """
        write_content(self._files, self._fd, pack_segment_header(self._header), 0, self._buffers)

    def fitting(self, records: Sequence[PackedRecord]) -> int:
        """Return the number of leading records that fit into the segment together with its
        footer."""
        end, keys = self.end, self._key_bytes
        for i, record in enumerate(records):
            end += record.nbytes
            keys += len(record.key)
            if end + footer_bytes(self._count + i + 1, keys) > self._size:
                return i
        return len(records)

    def append(
        self, buffer: Bytes, records: Sequence[PackedRecord], threads: Executor, in_flight: int
    ) -> Future[None]:
        """Start writing adjacent records that fit. The buffer is in use until the result is done.
        Waits while ``in_flight`` writes are in progress."""
        waiting = [flight for flight in self._flights if not flight.future.done()]
        if len(waiting) >= in_flight:
            waiting[0].future.exception()
        future = threads.submit(self._write, buffer, records, self.end, self._count, self._group)
        # Places are computed while the disk is busy. Once the disk is done, nothing should delay
        # the lookup of a page.
        self._flights.append(_Flight(records, list(_places(records, self.end)), future))
        self.end += sum(record.nbytes for record in records)
        self._count += len(records)
        self._key_bytes += sum(len(record.key) for record in records)
        return future

    def _write(
        self,
        buffer: Bytes,
        records: Sequence[PackedRecord],
        offset: int,
        ordinal: int,
        group: int,
    ) -> None:
        pieces = finish_headers(buffer, self._header, records, ordinal, group)
        try:
            write_exactly(self._files, self._fd, pieces, offset)
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            # Direct I/O cannot read from this memory, so the bytes are copied.
            write_content(self._files, self._fd, b"".join(pieces), offset, self._buffers)

    def commit(self) -> Commit:
        """Make all records that were appended since the last commit durable. Returns the durable
        records, and the error that made other records fail."""
        flights, self._flights = self._flights, []
        errors = [flight.future.exception() for flight in flights]
        whole = next((i for i, error in enumerate(errors) if error is not None), len(flights))
        error = errors[whole] if whole < len(flights) else None
        if error is not None and not isinstance(error, OSError):
            raise error
        if whole:
            try:
                self._files.fdatasync(self._fd)
                self._named.result()
            except OSError as failure:
                # The data may or may not be on disk, and a second fdatasync would not show which.
                whole, error = 0, failure
            else:
                start = flights[0].places[0].offset
                self._files.uncache(self._fd, start, self.end - start)
        if whole < len(flights):
            self.end = flights[whole].places[0].offset
        self._group = self._count
        durable = flights[:whole]
        return Commit(
            [place for flight in durable for place in flight.places],
            [record.index for flight in durable for record in flight.records],
            error,
        )


def _places(records: Sequence[PackedRecord], offset: int) -> Iterator[FooterEntry]:
    for record in records:
        yield FooterEntry(
            record.key, offset, record.plane_bytes, record.frame_bytes, record.written
        )
        offset += record.nbytes


def write_footer(
    files: FileLayer,
    fd: int,
    header: SegmentHeader,
    end: int,
    entries: Sequence[FooterEntry],
    buffers: BufferPool,
) -> None:
    """Seal a segment with a footer. The footer need not be durable, because a segment without a
    footer is scanned.

    Args:
        end: end of the last record, bytes. The footer is at the end of the file unless this
            position would leave a large gap. In that case the footer starts at ``end``, and the
            file is truncated after the footer.

    Raises:
        OSError: the disk failed. The segment is unchanged, or ends in garbage.
    """
    size = files.size(fd)
    nbytes = footer_bytes(len(entries), sum(len(entry.key) for entry in entries))
    gap = size - nbytes - end
    at_the_end = 0 <= gap <= size // WORTH_CUTTING
    offset = size - nbytes if at_the_end else end
    write_content(files, fd, pack_footer(header, offset, entries), offset, buffers)
    if not at_the_end:
        files.truncate(fd, end + nbytes)
