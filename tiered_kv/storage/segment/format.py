"""Format of a segment: its parts and their lengths.

    segment   header | record | record | ... | footer (once sealed; else zeros or a torn tail)

    header    magic          8    "TKVSEG" and two zeros
              version        u32
              header bytes   u32  of the whole header, including zeros up to a block
              fingerprint    16   of the store
              nonce          u64  random: records left over from a file's earlier use do not match
              number         u64  of the segment in its store, rising
              created        u64  seconds since 1970
              page bytes     u64
              tokens         u32  of a page
              element        u16  type of the elements; opaque if there are several: a codec that
                                  needs the sections of a page has them in its table
              codec          u16
              rank, ranks    2 u32
              replica        u32
              table bytes    u32
              table               data that the codec needs besides the page; for codec 65535 (out
                                  of tree) preceded by its name: see ``codecs/out_of_tree``
              digest         16   xxh3-128 of everything before it

    record    magic          4    "TKVR"
              header bytes   u16  of the record's header: a block if the plane and the
                                  frame are whole blocks, else a multiple of 64
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
              header digest  16   xxh3-128 of everything before it and of the key
              key                 zeros up to the end of the header
              plane, frame        zeros up to a block

    footer    entry * count       offset u64, plane u32, frame u32, written u64, key bytes u16,
                                  6 zeros; in the order of the file
              keys                one after the other
              trailer             the last 64 bytes of the file: magic "TKVFOOT" and a zero, nonce
                                  u64, offset of the footer u64, count u32, key bytes u32 of all
                                  keys, digest 16 of entries and keys, digest 16 of the trailer

Integers are little-endian. Every part starts at a block (4 KiB). The payload of a page that is
stored raw also starts at a block, if the page consists of whole blocks. The payload is then
transferred between the caller's memory and the disk without copying, and the record takes no more
space than if the payload followed the record's header directly.

The module also defines the sizes of segments: the usual size, and the bounds that a page format
sets.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field

import numpy as np
import xxhash

from tiered_kv.codecs.base import PageFormat
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.aligned import aligned
from tiered_kv.storage.disk.files import BLOCK

VERSION = 1
MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 255
MAX_TABLE_BYTES = 1 << 24
MAX_PAGE_BYTES = (1 << 32) - 1
MAX_SECONDS = (1 << 63) - 1

SEGMENT = struct.Struct("<8sII16sQQQQIHHIIII")
SEGMENT_MAGIC = b"TKVSEG\0\0"
RECORD = struct.Struct("<4sHHQIIQIIIIHHIQ16s")
RECORD_MAGIC = b"TKVR"
RECORD_FIXED_BYTES = RECORD.size + 16
TRAILER = struct.Struct("<8sQQII16s")
TRAILER_MAGIC = b"TKVFOOT\0"
TRAILER_BYTES = TRAILER.size + 16
ENTRY = np.dtype(
    [
        ("offset", "<u8"),
        ("plane", "<u4"),
        ("frame", "<u4"),
        ("written", "<u8"),
        ("key", "<u2"),
        ("zeros", "V6"),
    ]
)


class FormatError(Exception):
    """Malformed or damaged bytes."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Fields of a segment header; see the table above.

    Attributes:
        page_format: page format, as far as the header describes it.
        table_id: xxh3-64 of the table, computed once because every record contains it.
    """

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
    table_id: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table_id", xxhash.xxh3_64_intdigest(self.table))

    @property
    def header_bytes(self) -> int:
        return aligned(SEGMENT.size + len(self.table) + 16)


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """Fields of a record header, except the fields that repeat fields of its segment."""

    key: PageKey
    ordinal: int
    group: int
    written: int
    plane_bytes: int
    frame_bytes: int
    digest: bytes

    @property
    def header_bytes(self) -> int:
        return record_header_bytes(len(self.key), self.plane_bytes + self.frame_bytes)

    @property
    def nbytes(self) -> int:
        return record_bytes(len(self.key), self.plane_bytes + self.frame_bytes)


@dataclass(frozen=True, slots=True)
class FooterEntry:
    """Location of a page in its segment."""

    key: PageKey
    offset: int
    plane_bytes: int
    frame_bytes: int
    written: int

    @property
    def nbytes(self) -> int:
        """Length of the record with header and padding, bytes."""
        return record_bytes(len(self.key), self.stored_bytes)

    @property
    def stored_bytes(self) -> int:
        return self.plane_bytes + self.frame_bytes


def seconds_now() -> int:
    """Return the seconds since 1970, for a header or a record; 0 if the clock is before that."""
    return min(max(0, int(time.time())), MAX_SECONDS)


def record_header_bytes(key_bytes: int, stored_bytes: int) -> int:
    if stored_bytes % BLOCK == 0:
        return BLOCK
    return -(-(RECORD_FIXED_BYTES + key_bytes) // 64) * 64


def record_bytes(key_bytes: int, stored_bytes: int) -> int:
    """Return the length of a record in its segment, bytes."""
    return aligned(record_header_bytes(key_bytes, stored_bytes) + stored_bytes)


def footer_bytes(count: int, key_bytes: int) -> int:
    """Return the length in bytes of a footer that has ``count`` entries and ``key_bytes`` bytes of
    keys."""
    return aligned(count * ENTRY.itemsize + key_bytes + TRAILER_BYTES)


def payload_digest(payload: memoryview) -> bytes:
    """Return the xxh3-128 of stored bytes. Releases the interpreter lock."""
    return xxhash.xxh3_128_digest(payload)


SEGMENT_BYTES = 512 << 20
MIN_PAGES = 8
"""Number of pages for which even the smallest segment has space."""


def least_segment_bytes(page_format: PageFormat) -> int:
    """Return the size of a segment with space for ``MIN_PAGES`` pages, bytes."""
    # A codec may store slightly more than its input.
    page = page_format.page_bytes
    record = record_bytes(MAX_KEY_BYTES, page + page // 64 + BLOCK)
    header = 16 * BLOCK
    return header + MIN_PAGES * record + footer_bytes(MIN_PAGES, MIN_PAGES * MAX_KEY_BYTES)


def most_segment_bytes(page_format: PageFormat) -> int:
    """Return the largest possible size of a segment with these pages, for any past or present
    capacity, bytes."""
    return max(SEGMENT_BYTES, least_segment_bytes(page_format))
