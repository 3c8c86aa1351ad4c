"""Bytes of footers: the pages of a sealed segment and their offsets. See ``format``.

Parsing is total: any bytes give a value or raise ``FormatError``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.files import BLOCK

from .format import (
    ENTRY,
    MAX_KEY_BYTES,
    MIN_KEY_BYTES,
    TRAILER,
    TRAILER_BYTES,
    TRAILER_MAGIC,
    FooterEntry,
    FormatError,
    SegmentHeader,
    footer_bytes,
)


def pack_footer(segment: SegmentHeader, offset: int, entries: Sequence[FooterEntry]) -> bytes:
    """Pack a footer for ``offset``, in whole blocks."""
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
        FormatError: the bytes are no trailer of this segment: it is unsealed, or damaged.
    """
    trailer = bytes(end[-TRAILER_BYTES:])
    if len(trailer) < TRAILER_BYTES:
        raise FormatError("shorter than a trailer")
    magic, nonce, offset, count, key_bytes, _ = TRAILER.unpack_from(trailer)
    if magic != TRAILER_MAGIC or nonce != segment.nonce:
        raise FormatError("the segment is not sealed")
    if xxhash.xxh3_128_digest(trailer[: TRAILER.size]) != trailer[TRAILER.size :]:
        raise FormatError("the trailer is damaged")
    if offset % BLOCK or offset + footer_bytes(count, key_bytes) != size:
        raise FormatError("the footer lies elsewhere")
    if count > (offset - segment.header_bytes) // BLOCK:
        raise FormatError("the footer has more entries than there is room for records")
    return int(offset)


def parse_footer(segment: SegmentHeader, footer: bytes | memoryview) -> list[FooterEntry]:
    """Parse the bytes between ``parse_trailer``'s offset and the end of the file.

    Raises:
        FormatError: the bytes are damaged.
    """
    if len(footer) < TRAILER_BYTES:
        raise FormatError("shorter than a trailer")
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
            raise FormatError("the records of the footer overlap")
        end, key_at = at + entry.nbytes, key_at + length
        entries.append(entry)
    if end > offset:
        raise FormatError("a record of the footer lies behind it")
    return entries
