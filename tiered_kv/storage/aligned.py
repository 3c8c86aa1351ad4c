"""Records laid out in aligned buffers, and appended to a segment from there.

Encoding, copying and hashing happen on any thread, before anybody knows where in which
segment a record will lie; the headers are filled in once that is decided.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import numpy as np
import xxhash

from tiered_kv.codecs.base import Bytes, Codec
from tiered_kv.keys import PageKey
from tiered_kv.storage.files import FileLayer, write_exactly
from tiered_kv.storage.segment_format import (
    FooterEntry,
    RecordHeader,
    SegmentHeader,
    aligned,
    footer_bytes,
    pack_footer,
    pack_record_header,
    pack_segment_header,
    record_bytes,
    record_header_bytes,
)

logger = logging.getLogger(__name__)


def aligned_bytes(nbytes: int) -> Bytes:
    """At least so many bytes, from the beginning of a page of memory on."""
    return np.frombuffer(mmap.mmap(-1, max(aligned(nbytes), mmap.PAGESIZE)), dtype=np.uint8)


class BufferPool:
    """Aligned buffers that are used again, since fresh memory costs a fault per page.

    Safe to use from several threads.

    Args:
        nbytes: of a usual buffer; larger ones are made when asked for.
        keep: how many to keep at rest.
    """

    def __init__(self, nbytes: int, keep: int) -> None:
        self._nbytes = nbytes
        self._keep = keep
        self._rest: list[Bytes] = []

    def take(self, nbytes: int) -> Bytes:
        """A buffer of at least so many bytes, holding anything."""
        try:
            buffer = self._rest.pop()
        except IndexError:
            return aligned_bytes(max(nbytes, self._nbytes))
        return buffer if buffer.nbytes >= nbytes else aligned_bytes(nbytes)

    def give(self, buffer: Bytes) -> None:
        """The buffer may be handed out again."""
        if len(self._rest) < self._keep:
            self._rest.append(buffer)


@dataclass(frozen=True, slots=True)
class PageToWrite:
    """A page of a put.

    Attributes:
        index: of the page in the put.
        written: when it was first written, in seconds since 1970.
    """

    index: int
    key: PageKey
    page: Bytes
    written: int


@dataclass(frozen=True, slots=True)
class PackedRecord:
    """A record in a batch: all but its header is in place.

    Attributes:
        start: offset of the record in the buffer, a multiple of a block.
        nbytes: length of the record there and on disk.
    """

    index: int
    key: PageKey
    written: int
    start: int
    nbytes: int
    plane_bytes: int
    frame_bytes: int
    digest: bytes


@dataclass(slots=True)
class Batch:
    """Encoded pages, one record behind the other.

    Attributes:
        failed: indices of the pages that the codec refused.
    """

    buffer: Bytes
    records: list[PackedRecord] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)


def pack_batch(codec: Codec, pages: Sequence[PageToWrite], buffers: BufferPool) -> Batch:
    """Encode the pages into a buffer of the pool, to be given back by whoever wrote it."""
    room = sum(record_bytes(len(item.key), item.page.nbytes) for item in pages)
    batch = Batch(buffers.take(room))
    start = 0
    for item in pages:
        try:
            encoded = codec.encode(item.page)
        except Exception:
            # Whatever a codec thinks of one page, the others must not suffer from it.
            logger.exception("a page could not be encoded, and is not stored")
            batch.failed.append(item.index)
            continue
        nbytes = record_bytes(len(item.key), encoded.nbytes)
        if start + nbytes > batch.buffer.nbytes:
            larger = buffers.take(max(2 * batch.buffer.nbytes, start + nbytes))
            larger[:start] = batch.buffer[:start]
            buffers.give(batch.buffer)
            batch.buffer = larger
        payload = start + record_header_bytes(len(item.key))
        middle = payload + encoded.plane.nbytes
        end = middle + encoded.frame.nbytes
        batch.buffer[payload:middle] = encoded.plane
        batch.buffer[middle:end] = encoded.frame
        batch.buffer[end : start + nbytes] = 0
        batch.records.append(
            PackedRecord(
                index=item.index,
                key=item.key,
                written=item.written,
                start=start,
                nbytes=nbytes,
                plane_bytes=encoded.plane.nbytes,
                frame_bytes=encoded.frame.nbytes,
                digest=payload_digest(batch.buffer.data[payload:end]),
            )
        )
        start += nbytes
    return batch


def payload_digest(payload: memoryview) -> bytes:
    """xxh3-128 of stored bytes; releases the interpreter lock."""
    return xxhash.xxh3_128_digest(payload)


def finish_headers(
    buffer: Bytes,
    segment: SegmentHeader,
    table_id: int,
    records: Sequence[PackedRecord],
    ordinal: int,
    group: int,
) -> memoryview:
    """Fill in the headers of neighbouring records; returns the bytes to write.

    Args:
        ordinal: of the first of them in its segment.
        group: ordinal of the first record of the group they belong to.
    """
    for i, record in enumerate(records):
        header = pack_record_header(
            segment,
            table_id,
            RecordHeader(
                record.key,
                ordinal + i,
                group,
                record.written,
                record.plane_bytes,
                record.frame_bytes,
                record.digest,
            ),
        )
        buffer[record.start : record.start + len(header)] = np.frombuffer(header, np.uint8)
    last = records[-1]
    return buffer.data[records[0].start : last.start + last.nbytes]


@dataclass(frozen=True, slots=True)
class Commit:
    """How a group of records fared.

    Attributes:
        durable: places of those that are durable, in the order of the segment.
        indices: their indices in the put.
        error: why the others are not. The segment must be sealed then.
    """

    durable: list[FooterEntry]
    indices: list[int]
    error: OSError | None


@dataclass(frozen=True, slots=True)
class _Flight:
    """Neighbouring records on their way to the disk."""

    records: Sequence[PackedRecord]
    places: list[FooterEntry]
    future: Future[None]


class SegmentWriter:
    """The growing end of a segment. One thread owns it; the disk is written by ``threads``.

    Args:
        fd: of a new segment of ``size`` zeros.

    Attributes:
        end: where the next record goes.
    """

    def __init__(
        self, files: FileLayer, fd: int, header: SegmentHeader, size: int, buffers: BufferPool
    ) -> None:
        self.end = header.header_bytes
        self._files = files
        self._fd = fd
        self._header = header
        self._table_id = header.table_id
        self._size = size
        self._buffers = buffers
        self._count = 0
        self._key_bytes = 0
        self._group = 0
        self._flights: list[_Flight] = []

    @property
    def empty(self) -> bool:
        """Whether no record was ever placed."""
        return self._count == 0

    @property
    def room(self) -> int:
        """Bytes behind the last record."""
        return self._size - self.end

    def begin(self) -> None:
        """Write the segment's own header, durably.

        Raises:
            OSError: the disk failed.
        """
        write_content(self._files, self._fd, pack_segment_header(self._header), 0, self._buffers)
        self._files.fdatasync(self._fd)

    def fitting(self, records: Sequence[PackedRecord]) -> int:
        """How many of the records, from the first on, have room beside the footer."""
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
        """Begin to write neighbouring records that fit; the buffer is in use until the result
        is there. Waits while ``in_flight`` writes are under way."""
        waiting = [flight for flight in self._flights if not flight.future.done()]
        if len(waiting) >= in_flight:
            waiting[0].future.exception()
        future = threads.submit(self._write, buffer, records, self.end, self._count, self._group)
        # While the disk is busy: once it is done, a page is one step from being found.
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
        content = finish_headers(buffer, self._header, self._table_id, records, ordinal, group)
        write_exactly(self._files, self._fd, content, offset)

    def commit(self) -> Commit:
        """Make everything appended since the last commit durable."""
        flights, self._flights = self._flights, []
        errors = [flight.future.exception() for flight in flights]
        whole = next((i for i, error in enumerate(errors) if error is not None), len(flights))
        error = errors[whole] if whole < len(flights) else None
        if error is not None and not isinstance(error, OSError):
            raise error
        if whole:
            try:
                self._files.fdatasync(self._fd)
            except OSError as failure:
                # What was written may or may not be there, and asking again would not tell.
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

    def seal(self, entries: Sequence[FooterEntry]) -> int:
        """Write the footer behind the last durable record; returns the size of the file.

        Raises:
            OSError: the disk failed. The records are as durable as they were.
        """
        return write_footer(self._files, self._fd, self._header, self.end, entries, self._buffers)


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
    offset: int,
    entries: Sequence[FooterEntry],
    buffers: BufferPool,
) -> int:
    """Seal a segment: a footer at ``offset``, and nothing behind it; returns the file's size.

    Raises:
        OSError: the disk failed. The segment is as it was, or ends in garbage.
    """
    footer = pack_footer(header, offset, entries)
    write_content(files, fd, footer, offset, buffers)
    files.truncate(fd, offset + len(footer))
    files.fdatasync(fd)
    return offset + len(footer)


def write_content(
    files: FileLayer, fd: int, content: bytes, offset: int, buffers: BufferPool
) -> None:
    """Write whole blocks by way of an aligned buffer.

    Raises:
        OSError: the disk failed.
    """
    buffer = buffers.take(len(content))
    try:
        buffer[: len(content)] = np.frombuffer(content, np.uint8)
        write_exactly(files, fd, buffer.data[: len(content)], offset)
    finally:
        buffers.give(buffer)
