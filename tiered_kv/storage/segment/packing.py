"""Records packed into aligned buffers, in their layout on disk.

Encoding, copying and hashing run on any thread, before a record's offset in a segment is known. The
headers are filled in later. Pages stored uncompressed are not copied, and only their headers are in
a buffer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from tiered_kv.codecs.base import Bytes, Codec, EncodedPage
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.aligned import BufferPool, is_blocks
from tiered_kv.storage.disk.files import BLOCK

from .format import RecordHeader, SegmentHeader, payload_digest, record_bytes, record_header_bytes
from .headers import pack_record_header

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PageToWrite:
    """A page that was passed to a call of ``put``.

    Attributes:
        index: position of the page in that call.
        page: raw bytes of the page, or the encoded page.
        written: time of the page's first write, seconds since 1970.
    """

    index: int
    key: PageKey
    page: Bytes | EncodedPage
    written: int


@dataclass(frozen=True, slots=True)
class PackedRecord:
    """A record in a batch, complete except for its header.

    Attributes:
        start: offset of the record in the buffer, a multiple of a block.
        nbytes: length of the record on disk, and in the buffer unless the record is in two pieces.
        digest: digest of plane and frame.
        page: the raw page, if the buffer contains only the record's header, in one block; None if
            the buffer contains the whole record.
    """

    index: int
    key: PageKey
    written: int
    start: int
    nbytes: int
    plane_bytes: int
    frame_bytes: int
    digest: bytes
    page: memoryview | None = None

    @property
    def end(self) -> int:
        """End position of the record in the buffer, bytes."""
        return self.start + (self.nbytes if self.page is None else BLOCK)


@dataclass(slots=True)
class Batch:
    """Encoded pages as consecutive records. Pages that the codec failed to encode are left out."""

    buffer: Bytes
    records: list[PackedRecord] = field(default_factory=list)


def batch_in_place(codec: Codec, pages: Sequence[PageToWrite], buffers: BufferPool) -> Batch | None:
    """Batch the pages without copying them, if the codec and their memory allow it; otherwise
    return None. The pages must not change until they are written. They are hashed here, while other
    threads write, because hashing in a writing thread would leave the disk idle.

    Raises:
        OSError: out of memory.
    """
    raw = [item.page for item in pages if not isinstance(item.page, EncodedPage)]
    if not codec.stores_in_place or len(raw) < len(pages) or not all(map(is_blocks, raw)):
        return None
    batch = Batch(buffers.take(len(pages) * BLOCK))
    for i, (item, page) in enumerate(zip(pages, raw, strict=True)):
        nbytes = page.nbytes
        batch.records.append(
            PackedRecord(
                index=item.index,
                key=item.key,
                written=item.written,
                start=i * BLOCK,
                nbytes=record_bytes(len(item.key), nbytes),
                plane_bytes=nbytes,
                frame_bytes=0,
                digest=payload_digest(page.data),
                page=page.data,
            )
        )
    return batch


def pack_batch(codec: Codec, pages: Sequence[PageToWrite], buffers: BufferPool) -> Batch:
    """Encode the pages into a buffer of the pool, which the writer returns to the pool."""
    room = sum(record_bytes(len(item.key), item.page.nbytes) for item in pages)
    batch = Batch(buffers.take(room))
    start = 0
    for item in pages:
        try:
            encoded = item.page if isinstance(item.page, EncodedPage) else codec.encode(item.page)
        except Exception:
            # Codecs may raise anything; the other pages must not be affected.
            logger.exception("a page could not be encoded, and is not stored")
            continue
        nbytes = record_bytes(len(item.key), encoded.nbytes)
        if start + nbytes > batch.buffer.nbytes:
            larger = buffers.take(max(2 * batch.buffer.nbytes, start + nbytes))
            larger[:start] = batch.buffer[:start]
            buffers.give(batch.buffer)
            batch.buffer = larger
        payload = start + record_header_bytes(len(item.key), encoded.nbytes)
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


def finish_headers(
    buffer: Bytes,
    segment: SegmentHeader,
    records: Sequence[PackedRecord],
    ordinal: int,
    group: int,
) -> list[memoryview]:
    """Fill in the headers of adjacent records. Returns the bytes to write, in pieces.

    Args:
        ordinal: number of the first of these records in the segment, from 0.
        group: number of the first record that becomes durable together with these records.
    """
    data, pieces = buffer.data, []
    begin = records[0].start
    for i, record in enumerate(records):
        header = pack_record_header(
            segment,
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
        data[record.start : record.start + len(header)] = header
        if record.page is not None:
            pieces += [data[begin : record.end], record.page]
            begin = record.end
    end = records[-1].end
    return pieces if begin == end else [*pieces, data[begin:end]]
