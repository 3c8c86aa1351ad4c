"""Record of a page in a remote store. A reader can verify that a value is the page that was stored.

    | bytes | content |
    |---|---|
    | 8 | magic ``tkvpage`` and a zero |
    | 2, 2 | version; length of the header |
    | 2, 2 | length of the key; number of the codec |
    | 8, 4 | bytes and tokens of the page |
    | 8, 8 | bytes of the plane and of the frame |
    | 8 | name of the codec's table, zeros without one |
    | 16 | xxh3-128 of plane and frame |
    | 16 | xxh3-128 of everything before it and of the key |
    | … | key |

Plane and frame follow. Integers are little-endian. Parsing any bytes either returns a record or
raises ``RecordError``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from tiered_kv.codecs.base import EncodedPage, PageFormat

MAGIC = b"tkvpage\0"
VERSION = 1
_FIXED = struct.Struct("<8sHHHHQIQQ8s16s")
HEADER_BYTES = _FIXED.size + 16
"""Length of a header without its key, bytes."""
NO_TABLE = bytes(8)
MORE_THAN_PAGE = 4096
"""Bytes that a codec may add to a page, in addition to a sixty-fourth of the page
(``codecs.base``)."""


class RecordError(Exception):
    """Bytes that are not the record of the requested page."""


@dataclass(frozen=True, slots=True)
class PageRecord:
    """A page as stored.

    Attributes:
        codec_id: number of its codec.
        table: name of the codec's table; ``NO_TABLE`` if it has none.
    """

    codec_id: int
    table: bytes
    page: EncodedPage


def table_name(codec_id: int, table: bytes) -> bytes:
    """Return the name of a codec's table, 8 bytes; ``NO_TABLE`` if the table is empty."""
    if not table:
        return NO_TABLE
    return xxhash.xxh3_64_digest(codec_id.to_bytes(2, "little") + table)


def longest_record(page_format: PageFormat, key_bytes: int) -> int:
    """Return the maximum length of a record of pages with this format, bytes."""
    page = page_format.page_bytes
    return HEADER_BYTES + key_bytes + page + page // 64 + MORE_THAN_PAGE


def pack_record(
    key: bytes, page_format: PageFormat, record: PageRecord
) -> tuple[bytes, memoryview, memoryview]:
    """Return the parts of a record: the header, the plane and the frame. Plane and frame are not
    copied."""
    plane, frame = record.page.plane.data, record.page.frame.data
    payload = xxhash.xxh3_128(plane)
    payload.update(frame)
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES + len(key),
        len(key),
        record.codec_id,
        page_format.page_bytes,
        page_format.tokens,
        plane.nbytes,
        frame.nbytes,
        record.table,
        payload.digest(),
    )
    return fixed + xxhash.xxh3_128_digest(fixed + key) + key, plane, frame


def open_record(value: memoryview, key: bytes, page_format: PageFormat) -> PageRecord:
    """Return the page in a value. The result aliases the value.

    Raises:
        RecordError: the value is truncated, modified, of another version, or of another page.
    """
    if len(value) < HEADER_BYTES:
        raise RecordError("the value is shorter than a record")
    magic, version, header, key_bytes, codec_id, *rest = _FIXED.unpack_from(value)
    page_bytes, tokens, plane, frame, table, digest = rest
    if magic != MAGIC:
        raise RecordError("the value is not a page record")
    if version != VERSION:
        raise RecordError(
            f"the record has version {version}, but only version {VERSION} is supported"
        )
    if header != HEADER_BYTES + key_bytes or header + plane + frame != len(value):
        raise RecordError("the record has the wrong length")
    if bytes(value[HEADER_BYTES:header]) != key:
        raise RecordError("the record belongs to another page")
    told = bytes(value[_FIXED.size : HEADER_BYTES])
    if xxhash.xxh3_128_digest(bytes(value[: _FIXED.size]) + key) != told:
        raise RecordError("the header of the record is damaged")
    if (page_bytes, tokens) != (page_format.page_bytes, page_format.tokens):
        raise RecordError("the page has another format than expected")
    if xxhash.xxh3_128_digest(value[header:]) != digest:
        raise RecordError("the page is damaged")
    payload = np.frombuffer(value[header:], np.uint8)
    return PageRecord(codec_id, table, EncodedPage(payload[:plane], payload[plane:]))
