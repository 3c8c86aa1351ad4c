"""Bytes of the headers and footers of segments, and of the headers of records.

``format`` defines the layouts, the values and the lengths. Parsing accepts any bytes: a function
either returns a value or raises ``FormatError``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from tiered_kv.codecs.base import ELEMENTS, PageFormat
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.aligned import aligned
from tiered_kv.storage.disk.files import BLOCK

from .format import (
    ENTRY,
    MAX_KEY_BYTES,
    MAX_PAGE_BYTES,
    MAX_TABLE_BYTES,
    MIN_KEY_BYTES,
    RECORD,
    RECORD_FIXED_BYTES,
    RECORD_MAGIC,
    SEGMENT,
    SEGMENT_MAGIC,
    TRAILER,
    TRAILER_BYTES,
    TRAILER_MAGIC,
    VERSION,
    FooterEntry,
    FormatError,
    RecordHeader,
    SegmentHeader,
    footer_bytes,
    record_header_bytes,
)


def pack_segment_header(header: SegmentHeader) -> bytes:
    """Return the ``header.header_bytes`` bytes of a segment header."""
    fixed = SEGMENT.pack(
        SEGMENT_MAGIC,
        VERSION,
        header.header_bytes,
        header.fingerprint,
        header.nonce,
        header.number,
        header.created,
        header.page_format.page_bytes,
        header.page_format.tokens,
        ELEMENTS.index(header.page_format.element),
        header.codec_id,
        header.rank,
        header.ranks,
        header.replica,
        len(header.table),
    )
    body = fixed + header.table
    return (body + xxhash.xxh3_128_digest(body)).ljust(header.header_bytes, b"\0")


def segment_header_bytes(start: bytes | memoryview) -> int:
    """Return the length of a header, from its first 16 bytes or more.

    Raises:
        FormatError: the bytes do not start a segment, or the segment has another version.
    """
    if len(start) < 16:
        raise FormatError("the file is shorter than a segment header")
    magic, version, nbytes = struct.unpack_from("<8sII", start)
    if magic != SEGMENT_MAGIC:
        raise FormatError("the file is not a segment")
    if version != VERSION:
        raise FormatError(
            f"the segment has version {version}, but only version {VERSION} is supported"
        )
    if nbytes % BLOCK or not 0 < nbytes <= aligned(SEGMENT.size + MAX_TABLE_BYTES + 16):
        raise FormatError("the header of the segment has an impossible length")
    return int(nbytes)


def parse_segment_header(start: bytes | memoryview) -> SegmentHeader:
    """Parse at least the first ``segment_header_bytes`` bytes of a segment.

    Raises:
        FormatError: the bytes are not a header, or the header is damaged.
    """
    nbytes = segment_header_bytes(start)
    if len(start) < nbytes:
        raise FormatError("the header of the segment is truncated")
    _, _, _, fingerprint, nonce, number, created, page_bytes, tokens, *rest = SEGMENT.unpack_from(
        start
    )
    element, codec_id, rank, ranks, replica, table_bytes = rest
    end = SEGMENT.size + table_bytes
    if aligned(end + 16) != nbytes:
        raise FormatError("the header of the segment has the wrong length")
    if xxhash.xxh3_128_digest(start[:end]) != bytes(start[end : end + 16]):
        raise FormatError("the header of the segment is damaged")
    if page_bytes > MAX_PAGE_BYTES:
        raise FormatError("the header of the segment has an impossible page size")
    if element >= len(ELEMENTS):
        raise FormatError("the header of the segment has an unknown element type")
    return SegmentHeader(
        fingerprint=fingerprint,
        nonce=nonce,
        number=number,
        created=created,
        page_format=PageFormat(ELEMENTS[element], page_bytes, tokens),
        codec_id=codec_id,
        rank=rank,
        ranks=ranks,
        replica=replica,
        table=bytes(start[SEGMENT.size : end]),
    )


# -- records ----------------------------------------------------------------------


def pack_record_header(segment: SegmentHeader, record: RecordHeader) -> bytes:
    """Return the ``record.header_bytes`` bytes of a record header."""
    nbytes = record.header_bytes
    fixed = RECORD.pack(
        RECORD_MAGIC,
        nbytes,
        len(record.key),
        segment.nonce,
        record.ordinal,
        record.group,
        record.written,
        segment.page_format.page_bytes,
        segment.page_format.tokens,
        record.plane_bytes,
        record.frame_bytes,
        segment.codec_id,
        0,
        segment.number & 0xFFFFFFFF,
        segment.table_id,
        record.digest,
    )
    digest = xxhash.xxh3_128_digest(fixed + record.key)
    return (fixed + digest + record.key).ljust(nbytes, b"\0")


def parse_record_header(segment: SegmentHeader, start: bytes | memoryview) -> RecordHeader:
    """Parse a record header. The first ``BLOCK`` bytes of a record always contain it.

    Raises:
        FormatError: the bytes do not start a record of this segment, or the record is damaged.
    """
    if len(start) < RECORD_FIXED_BYTES:
        raise FormatError("the data is shorter than a record header")
    (magic, header_bytes, key_bytes, *of_segment, digest) = RECORD.unpack_from(start)
    nonce, ordinal, group, written, page_bytes, tokens, plane, frame, *codec = of_segment
    if magic != RECORD_MAGIC:
        raise FormatError("the data does not start with a record header")
    if not MIN_KEY_BYTES <= key_bytes <= MAX_KEY_BYTES:
        raise FormatError("the key of the record has an impossible length")
    if header_bytes != record_header_bytes(key_bytes, plane + frame) or len(start) < header_bytes:
        raise FormatError("the header of the record has the wrong length")
    key = bytes(start[RECORD_FIXED_BYTES : RECORD_FIXED_BYTES + key_bytes])
    found = bytes(start[RECORD.size : RECORD_FIXED_BYTES])
    if xxhash.xxh3_128_digest(bytes(start[: RECORD.size]) + key) != found:
        raise FormatError("the header of the record is damaged")
    if nonce != segment.nonce or codec[2] != segment.number & 0xFFFFFFFF:
        raise FormatError("the record belongs to another segment")
    if (page_bytes, tokens) != (segment.page_format.page_bytes, segment.page_format.tokens):
        raise FormatError("the page format of the record differs from the segment's")
    if codec[0] != segment.codec_id or codec[3] != segment.table_id:
        raise FormatError("the codec of the record differs from the segment's")
    return RecordHeader(PageKey(key), ordinal, group, written, plane, frame, digest)


def pack_footer(segment: SegmentHeader, offset: int, entries: Sequence[FooterEntry]) -> bytes:
    """Return the bytes of a footer that starts at ``offset``, in whole blocks."""
    table = np.zeros(len(entries), ENTRY)
    table["offset"] = [entry.offset for entry in entries]
    table["plane"] = [entry.plane_bytes for entry in entries]
    table["frame"] = [entry.frame_bytes for entry in entries]
    table["written"] = [entry.written for entry in entries]
    table["key"] = [len(entry.key) for entry in entries]
    keys = b"".join(entry.key for entry in entries)
    body = table.tobytes() + keys
    trailer = TRAILER.pack(
        TRAILER_MAGIC,
        segment.nonce,
        offset,
        len(entries),
        len(keys),
        xxhash.xxh3_128_digest(body),
    )
    trailer += xxhash.xxh3_128_digest(trailer)
    return body.ljust(footer_bytes(len(entries), len(keys)) - len(trailer), b"\0") + trailer


def parse_trailer(segment: SegmentHeader, size: int, end: bytes | memoryview) -> int:
    """Return the offset of the footer, from the last bytes of a file of ``size`` bytes.

    Raises:
        FormatError: the bytes are not a trailer of this segment, which is unsealed or damaged.
    """
    trailer = bytes(end[-TRAILER_BYTES:])
    if len(trailer) < TRAILER_BYTES:
        raise FormatError("the file is shorter than a trailer")
    magic, nonce, offset, count, key_bytes, _ = TRAILER.unpack_from(trailer)
    if magic != TRAILER_MAGIC or nonce != segment.nonce:
        raise FormatError("the segment is not sealed")
    if xxhash.xxh3_128_digest(trailer[: TRAILER.size]) != trailer[TRAILER.size :]:
        raise FormatError("the trailer is damaged")
    if offset % BLOCK or offset + footer_bytes(count, key_bytes) != size:
        raise FormatError("the footer's position does not match the file's size")
    if count > (offset - segment.header_bytes) // BLOCK:
        raise FormatError("the footer has more entries than the segment can have records")
    return int(offset)


def parse_footer(segment: SegmentHeader, footer: bytes | memoryview) -> list[FooterEntry]:
    """Parse the bytes between ``parse_trailer``'s offset and the end of the file.

    Raises:
        FormatError: the bytes are damaged.
    """
    if len(footer) < TRAILER_BYTES:
        raise FormatError("the footer is shorter than a trailer")
    _, _, offset, count, key_bytes, digest = TRAILER.unpack_from(
        footer, len(footer) - TRAILER_BYTES
    )
    keys_from = count * ENTRY.itemsize
    if len(footer) != footer_bytes(count, key_bytes):
        raise FormatError("the footer has the wrong length")
    if xxhash.xxh3_128_digest(footer[: keys_from + key_bytes]) != digest:
        raise FormatError("the footer is damaged")
    rows = np.frombuffer(footer, ENTRY, count)
    keys = bytes(footer[keys_from : keys_from + key_bytes])
    lengths = rows["key"].astype(np.int64)
    if int(lengths.sum()) != key_bytes or np.any(lengths < MIN_KEY_BYTES):
        raise FormatError("the keys of the footer have the wrong lengths")
    entries = []
    end, key_at = segment.header_bytes, 0
    columns = (rows[name].tolist() for name in ("offset", "plane", "frame", "written", "key"))
    for at, plane, frame, written, length in zip(*columns, strict=True):
        entry = FooterEntry(PageKey(keys[key_at : key_at + length]), at, plane, frame, written)
        if at % BLOCK or at < end or length > MAX_KEY_BYTES:
            raise FormatError(
                "a footer entry overlaps another, is misaligned, or has a key that is too long"
            )
        end, key_at = at + entry.nbytes, key_at + length
        entries.append(entry)
    if end > offset:
        raise FormatError("an entry of the footer extends past the start of the footer")
    return entries
