"""The bytes of a segment. Little-endian throughout; every part begins at a block (4 KiB).

    segment   header | record | record | ... | footer (once sealed; else zeros or a torn tail)

    header    magic          8    "TKVSEG" and two zeros
              version        u32
              header bytes   u32  of all of it, zeros up to a block included
              fingerprint    16   of the store
              nonce          u64  random: bytes of a file's earlier life fit no record of this one
              number         u64  of the segment in its store, rising
              created        u64  seconds since 1970
              page bytes     u64
              tokens         u32  of a page
              element        u16  type of the elements
              codec          u16
              rank, ranks    2 u32
              replica        u32
              table bytes    u32
              table               what the codec needs beside a page
              digest         16   xxh3-128 of all before it

    record    magic          4    "TKVR"
              header bytes   u16  of the record's header, a multiple of 64
              key bytes      u16
              nonce          u64  the segment's
              ordinal        u32  of the record in the segment, from 0
              group          u32  ordinal of the first record made durable together with this one
              written        u64  seconds since 1970, of the page (a rewritten page keeps it)
              page bytes     u32
              tokens         u32
              plane bytes    u32
              frame bytes    u32
              codec          u16
              reserved       u16  0
              number         u32  the segment's, its low half
              table id       u64  xxh3-64 of the codec's table
              payload digest 16   xxh3-128 of plane and frame
              header digest  16   xxh3-128 of all before it and of the key
              key                 zeros up to a multiple of 64
              plane, frame        zeros up to a block

    footer    entry * count       offset u64, plane u32, frame u32, written u64, key bytes u16,
                                  6 zeros; in the order of the file
              keys                one after the other
              trailer             the last 64 bytes of the file: magic "TKVFOOT" and a zero, nonce
                                  u64, offset of the footer u64, count u32, key bytes u32 of all
                                  keys, digest 16 of entries and keys, digest 16 of the trailer

Parsing is total: whatever the bytes, it gives a value or raises ``FormatError``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from tiered_kv.codecs.base import ElementType, PageFormat
from tiered_kv.keys import PageKey
from tiered_kv.storage.files import BLOCK

VERSION = 1
MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 255
MAX_TABLE_BYTES = 1 << 24

_SEGMENT = struct.Struct("<8sII16sQQQQIHHIIII")
_SEGMENT_MAGIC = b"TKVSEG\0\0"
_RECORD = struct.Struct("<4sHHQIIQIIIIHHIQ16s")
RECORD_MAGIC = b"TKVR"
_RECORD_FIXED = _RECORD.size + 16
_TRAILER = struct.Struct("<8sQQII16s")
_TRAILER_MAGIC = b"TKVFOOT\0"
TRAILER_BYTES = _TRAILER.size + 16
_ENTRY = np.dtype(
    [
        ("offset", "<u8"),
        ("plane", "<u4"),
        ("frame", "<u4"),
        ("written", "<u8"),
        ("key", "<u2"),
        ("zeros", "V6"),
    ]
)
_ELEMENTS = {
    ElementType.OPAQUE: 0,
    ElementType.BF16: 1,
    ElementType.FP16: 2,
    ElementType.FP8_E4M3: 3,
    ElementType.FP8_E5M2: 4,
}
_ELEMENT_TYPES = {code: element for element, code in _ELEMENTS.items()}


class FormatError(Exception):
    """Bytes that are not what they should be."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment says of itself; see the table above."""

    fingerprint: bytes
    nonce: int
    number: int
    created: int
    page_format: PageFormat
    codec_id: int
    rank: int
    ranks: int
    replica: int
    table: bytes

    @property
    def header_bytes(self) -> int:
        return aligned(_SEGMENT.size + len(self.table) + 16)

    @property
    def table_id(self) -> int:
        return xxhash.xxh3_64_intdigest(self.table)


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record says of itself, beside what it repeats of its segment."""

    key: PageKey
    ordinal: int
    group: int
    written: int
    plane_bytes: int
    frame_bytes: int
    digest: bytes

    @property
    def header_bytes(self) -> int:
        return record_header_bytes(len(self.key))

    @property
    def nbytes(self) -> int:
        return record_bytes(len(self.key), self.plane_bytes + self.frame_bytes)


@dataclass(frozen=True, slots=True)
class FooterEntry:
    """Where in the segment a page lies."""

    key: PageKey
    offset: int
    plane_bytes: int
    frame_bytes: int
    written: int

    @property
    def nbytes(self) -> int:
        """Of the record, header and padding included."""
        return record_bytes(len(self.key), self.stored_bytes)

    @property
    def stored_bytes(self) -> int:
        return self.plane_bytes + self.frame_bytes


def aligned(nbytes: int) -> int:
    """The least whole number of blocks that holds so many bytes, in bytes."""
    return -(-nbytes // BLOCK) * BLOCK


def record_header_bytes(key_bytes: int) -> int:
    return -(-(_RECORD_FIXED + key_bytes) // 64) * 64


def record_bytes(key_bytes: int, stored_bytes: int) -> int:
    """Room a record takes in its segment."""
    return aligned(record_header_bytes(key_bytes) + stored_bytes)


def footer_bytes(count: int, key_bytes: int) -> int:
    """Room of a footer of so many entries whose keys have so many bytes together."""
    return aligned(count * _ENTRY.itemsize + key_bytes + TRAILER_BYTES)


# -- segment headers --------------------------------------------------------------


def pack_segment_header(header: SegmentHeader) -> bytes:
    """``header.header_bytes`` bytes."""
    fixed = _SEGMENT.pack(
        _SEGMENT_MAGIC,
        VERSION,
        header.header_bytes,
        header.fingerprint,
        header.nonce,
        header.number,
        header.created,
        header.page_format.page_bytes,
        header.page_format.tokens,
        _ELEMENTS[header.page_format.element],
        header.codec_id,
        header.rank,
        header.ranks,
        header.replica,
        len(header.table),
    )
    body = fixed + header.table
    return (body + xxhash.xxh3_128_digest(body)).ljust(header.header_bytes, b"\0")


def segment_header_bytes(start: bytes | memoryview) -> int:
    """Length of the header that begins so, from its first 16 bytes or more.

    Raises:
        FormatError: no segment begins so, or one of another version.
    """
    if len(start) < 16:
        raise FormatError("shorter than the header of a segment")
    magic, version, nbytes = struct.unpack_from("<8sII", start)
    if magic != _SEGMENT_MAGIC:
        raise FormatError("not a segment")
    if version != VERSION:
        raise FormatError(f"a segment of version {version}; this is version {VERSION}")
    if nbytes % BLOCK or not 0 < nbytes <= aligned(_SEGMENT.size + MAX_TABLE_BYTES + 16):
        raise FormatError("a segment whose header has no possible length")
    return int(nbytes)


def parse_segment_header(start: bytes | memoryview) -> SegmentHeader:
    """From the first ``segment_header_bytes`` bytes of a segment, or more of them.

    Raises:
        FormatError: they are no header, or a damaged one.
    """
    nbytes = segment_header_bytes(start)
    if len(start) < nbytes:
        raise FormatError("the header of the segment is cut off")
    _, _, _, fingerprint, nonce, number, created, page_bytes, tokens, *rest = _SEGMENT.unpack_from(
        start
    )
    element, codec_id, rank, ranks, replica, table_bytes = rest
    end = _SEGMENT.size + table_bytes
    if aligned(end + 16) != nbytes:
        raise FormatError("the header of the segment has the wrong length")
    if xxhash.xxh3_128_digest(start[:end]) != bytes(start[end : end + 16]):
        raise FormatError("the header of the segment is damaged")
    if element not in _ELEMENT_TYPES:
        raise FormatError("elements of an unknown type")
    return SegmentHeader(
        fingerprint=fingerprint,
        nonce=nonce,
        number=number,
        created=created,
        page_format=PageFormat(_ELEMENT_TYPES[element], page_bytes, tokens),
        codec_id=codec_id,
        rank=rank,
        ranks=ranks,
        replica=replica,
        table=bytes(start[_SEGMENT.size : end]),
    )


# -- records ----------------------------------------------------------------------


def pack_record_header(segment: SegmentHeader, table_id: int, record: RecordHeader) -> bytes:
    """``record.header_bytes`` bytes. ``table_id`` is the segment's, computed once."""
    fixed = _RECORD.pack(
        RECORD_MAGIC,
        record.header_bytes,
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
        table_id,
        record.digest,
    )
    digest = xxhash.xxh3_128_digest(fixed + record.key)
    return (fixed + digest + record.key).ljust(record.header_bytes, b"\0")


def parse_record_header(
    segment: SegmentHeader, table_id: int, start: bytes | memoryview
) -> RecordHeader:
    """From the first bytes of a record; a block of them is always enough.

    Raises:
        FormatError: they begin no record of this segment, or a damaged one.
    """
    if len(start) < _RECORD_FIXED:
        raise FormatError("shorter than a record")
    (magic, header_bytes, key_bytes, *of_segment, digest) = _RECORD.unpack_from(start)
    nonce, ordinal, group, written, page_bytes, tokens, plane, frame, *codec = of_segment
    if magic != RECORD_MAGIC:
        raise FormatError("not a record")
    if not MIN_KEY_BYTES <= key_bytes <= MAX_KEY_BYTES:
        raise FormatError("a record whose key has no possible length")
    if header_bytes != record_header_bytes(key_bytes) or len(start) < header_bytes:
        raise FormatError("a record whose header has the wrong length")
    key = bytes(start[_RECORD_FIXED : _RECORD_FIXED + key_bytes])
    found = bytes(start[_RECORD.size : _RECORD_FIXED])
    if xxhash.xxh3_128_digest(bytes(start[: _RECORD.size]) + key) != found:
        raise FormatError("the header of a record is damaged")
    if nonce != segment.nonce or codec[2] != segment.number & 0xFFFFFFFF:
        raise FormatError("a record of another segment")
    if (page_bytes, tokens) != (segment.page_format.page_bytes, segment.page_format.tokens):
        raise FormatError("a record of pages of another format")
    if codec[0] != segment.codec_id or codec[3] != table_id:
        raise FormatError("a record of another codec")
    return RecordHeader(PageKey(key), ordinal, group, written, plane, frame, digest)


# -- footers ----------------------------------------------------------------------


def pack_footer(segment: SegmentHeader, offset: int, entries: Sequence[FooterEntry]) -> bytes:
    """A footer that lies at ``offset``, whole blocks of it."""
    table = np.zeros(len(entries), _ENTRY)
    table["offset"] = [entry.offset for entry in entries]
    table["plane"] = [entry.plane_bytes for entry in entries]
    table["frame"] = [entry.frame_bytes for entry in entries]
    table["written"] = [entry.written for entry in entries]
    table["key"] = [len(entry.key) for entry in entries]
    keys = b"".join(entry.key for entry in entries)
    body = table.tobytes() + keys
    trailer = _TRAILER.pack(
        _TRAILER_MAGIC,
        segment.nonce,
        offset,
        len(entries),
        len(keys),
        xxhash.xxh3_128_digest(body),
    )
    trailer += xxhash.xxh3_128_digest(trailer)
    return body.ljust(footer_bytes(len(entries), len(keys)) - len(trailer), b"\0") + trailer


def parse_trailer(segment: SegmentHeader, size: int, end: bytes | memoryview) -> int:
    """Offset of the footer, from the last bytes of a file of ``size`` bytes.

    Raises:
        FormatError: they are no trailer of this segment: it is not sealed, or damaged.
    """
    trailer = bytes(end[-TRAILER_BYTES:])
    if len(trailer) < TRAILER_BYTES:
        raise FormatError("shorter than a trailer")
    magic, nonce, offset, count, key_bytes, _ = _TRAILER.unpack_from(trailer)
    if magic != _TRAILER_MAGIC or nonce != segment.nonce:
        raise FormatError("the segment is not sealed")
    if xxhash.xxh3_128_digest(trailer[: _TRAILER.size]) != trailer[_TRAILER.size :]:
        raise FormatError("the trailer is damaged")
    if offset % BLOCK or offset + footer_bytes(count, key_bytes) != size:
        raise FormatError("the footer lies elsewhere")
    return int(offset)


def parse_footer(segment: SegmentHeader, footer: bytes | memoryview) -> list[FooterEntry]:
    """From the bytes between ``parse_trailer``'s offset and the end of the file.

    Raises:
        FormatError: they are damaged.
    """
    if len(footer) < TRAILER_BYTES:
        raise FormatError("shorter than a trailer")
    _, _, offset, count, key_bytes, digest = _TRAILER.unpack_from(
        footer, len(footer) - TRAILER_BYTES
    )
    keys_from = count * _ENTRY.itemsize
    if len(footer) != footer_bytes(count, key_bytes):
        raise FormatError("the footer has the wrong length")
    if xxhash.xxh3_128_digest(footer[: keys_from + key_bytes]) != digest:
        raise FormatError("the footer is damaged")
    rows = np.frombuffer(footer, _ENTRY, count)
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
            raise FormatError("the records of the footer overlap")
        end, key_at = at + entry.nbytes, key_at + length
        entries.append(entry)
    if end > offset:
        raise FormatError("a record of the footer lies behind it")
    return entries
