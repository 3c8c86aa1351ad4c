"""Reads, checks and decodes the records of a segment."""

from __future__ import annotations

import numpy as np

from tiered_kv.codecs.base import Bytes, Codec, EncodedPage
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.aligned import aligned_bytes
from tiered_kv.storage.disk.files import FileLayer, read_exactly

from .format import FormatError, RecordHeader, SegmentHeader, payload_digest
from .headers import parse_record_header


def read_blocks(files: FileLayer, fd: int, offset: int, nbytes: int) -> memoryview:
    """Read whole blocks of a file into a new buffer.

    Raises:
        OSError: the disk failed, or the file is too short.
    """
    buffer = aligned_bytes(nbytes).data[:nbytes]
    read_exactly(files, fd, [buffer], offset)
    return buffer


def open_record(
    header: SegmentHeader, key: PageKey, record: memoryview
) -> tuple[RecordHeader, EncodedPage]:
    """Check a record's bytes. Returns the record's header, and its stored page, which aliases these
    bytes.

    Raises:
        FormatError: the bytes are not a record of that page and segment, or are damaged.
    """
    found = parse_record_header(header, record)
    if found.key != key:
        raise FormatError("the record belongs to another page")
    middle = found.header_bytes + found.plane_bytes
    end = middle + found.frame_bytes
    if end > len(record):
        raise FormatError("the record is truncated")
    if payload_digest(record[found.header_bytes : end]) != found.digest:
        raise FormatError("the page is damaged")
    payload = np.frombuffer(record, np.uint8)
    return found, EncodedPage(payload[found.header_bytes : middle], payload[middle:end])


def check_page(header: SegmentHeader, key: PageKey, start: memoryview, page: Bytes) -> None:
    """Check a page that was read without its header, against the header of its record.

    Raises:
        FormatError: the header does not belong to that page and segment, or the header or the page
            is damaged.
    """
    found = parse_record_header(header, start)
    if found.key != key:
        raise FormatError("the record belongs to another page")
    if (found.plane_bytes, found.frame_bytes) != (page.nbytes, 0):
        raise FormatError("the record has the wrong length")
    if payload_digest(page.data) != found.digest:
        raise FormatError("the page is damaged")


def decode_record(
    header: SegmentHeader,
    codec: Codec,
    key: PageKey,
    record: memoryview,
    out: Bytes,
) -> RecordHeader:
    """Check the bytes of a record and decode its page into ``out``. Returns the record's header.

    Raises:
        FormatError: the bytes are not a complete record of that page; ``out`` is undefined.
    """
    found, encoded = open_record(header, key, record)
    try:
        codec.decode(encoded, out)
    except Exception as error:
        # CodecError by contract. But codecs may raise anything, and other pages must not be
        # affected.
        raise FormatError(f"the page cannot be decoded: {error}") from error
    return found
