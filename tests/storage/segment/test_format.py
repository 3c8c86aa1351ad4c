"""The bytes of segments: packed bytes are parsed back, and invalid bytes are refused."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.codecs.base import ElementType, PageFormat
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.aligned import aligned
from tiered_kv.storage.disk.files import BLOCK
from tiered_kv.storage.segment.format import (
    ENTRY,
    MAX_KEY_BYTES,
    MIN_KEY_BYTES,
    SEGMENT,
    TRAILER,
    TRAILER_BYTES,
    TRAILER_MAGIC,
    FooterEntry,
    FormatError,
    RecordHeader,
    SegmentHeader,
    footer_bytes,
    record_bytes,
)
from tiered_kv.storage.segment.headers import (
    pack_footer,
    pack_record_header,
    pack_segment_header,
    parse_footer,
    parse_record_header,
    parse_segment_header,
    parse_trailer,
    segment_header_bytes,
)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
KEYS = st.binary(min_size=MIN_KEY_BYTES, max_size=MAX_KEY_BYTES).map(PageKey)
FORMATS = st.builds(PageFormat, st.sampled_from(ElementType), U32, U32)
HEADERS = st.builds(
    SegmentHeader,
    fingerprint=st.binary(min_size=16, max_size=16),
    nonce=U64,
    number=U64,
    created=U64,
    page_format=FORMATS,
    codec_id=st.integers(0, 2**16 - 1),
    rank=U32,
    ranks=U32,
    replica=U32,
    table=st.binary(max_size=9000),
)
RECORDS = st.builds(
    RecordHeader,
    key=KEYS,
    ordinal=U32,
    group=U32,
    written=U64,
    plane_bytes=U32,
    frame_bytes=U32,
    digest=st.binary(min_size=16, max_size=16),
)
HEADER = SegmentHeader(
    b"f" * 16, 7, 3, 1000, PageFormat(ElementType.FP16, 8192, 16), 2, 0, 1, 0, b"table"
)
RECORD = RecordHeader(PageKey(b"k" * 48), 5, 4, 1001, 100, 200, b"d" * 16)


@st.composite
def entries(draw: st.DrawFn, header_bytes: int) -> list[FooterEntry]:
    found = []
    at = header_bytes
    for key in draw(st.lists(KEYS, max_size=8)):
        at += BLOCK * draw(st.integers(0, 3))
        plane, frame = draw(st.integers(0, 9000)), draw(st.integers(0, 9000))
        entry = FooterEntry(key, at, plane, frame, draw(U64))
        found.append(entry)
        at += entry.nbytes
    return found


@given(HEADERS, st.binary(max_size=20))
def test_a_segment_header_is_parsed_as_it_was_packed(header: SegmentHeader, rest: bytes) -> None:
    packed = pack_segment_header(header)
    assert len(packed) == header.header_bytes == segment_header_bytes(packed)
    assert len(packed) % BLOCK == 0
    assert parse_segment_header(packed + rest) == header


@given(HEADERS, RECORDS)
def test_a_record_header_is_parsed_as_it_was_packed(
    segment: SegmentHeader, record: RecordHeader
) -> None:
    packed = pack_record_header(segment, record)
    assert len(packed) == record.header_bytes <= BLOCK
    assert len(packed) % 64 == 0
    assert parse_record_header(segment, packed.ljust(BLOCK, b"\0")) == record
    assert record.nbytes == aligned(len(packed) + record.plane_bytes + record.frame_bytes)


@given(st.data(), HEADERS)
def test_a_footer_is_parsed_as_it_was_packed(data: st.DataObject, header: SegmentHeader) -> None:
    places = data.draw(entries(header.header_bytes))
    end = places[-1].offset + places[-1].nbytes if places else header.header_bytes
    footer = pack_footer(header, end, places)
    assert len(footer) == footer_bytes(len(places), sum(len(place.key) for place in places))
    assert parse_trailer(header, end + len(footer), footer[-BLOCK:]) == end
    assert parse_footer(header, footer) == places


def total(parse: Callable[[bytes], object], content: bytes) -> None:
    """Parse arbitrary bytes. Only FormatError may be raised."""
    with contextlib.suppress(FormatError):
        parse(content)


@given(st.binary(max_size=600))
def test_parsers_accept_any_bytes_or_raise_format_error(content: bytes) -> None:
    for start in (content, b"TKVSEG\0\0" + content, pack_segment_header(HEADER)[:80] + content):
        total(segment_header_bytes, start)
        total(parse_segment_header, start)
    for start in (content, b"TKVR" + content):
        total(lambda it: parse_record_header(HEADER, it), start)
    for end in (content, content + b"TKVFOOT\0" + bytes(56)):
        total(lambda it: parse_trailer(HEADER, len(it), it), end)
        total(lambda it: parse_footer(HEADER, it), end)


@given(st.data())
def test_a_header_with_a_changed_bit_is_refused(data: st.DataObject) -> None:
    packed = pack_segment_header(HEADER)
    used = 88 + len(HEADER.table) + 16
    changed = flipped(packed, data.draw(st.integers(0, 8 * used - 1)))
    with pytest.raises(FormatError):
        parse_segment_header(changed)


@given(st.data())
def test_a_record_header_with_a_changed_bit_is_refused(data: st.DataObject) -> None:
    packed = pack_record_header(HEADER, RECORD)
    changed = flipped(packed, data.draw(st.integers(0, 8 * (96 + len(RECORD.key)) - 1)))
    with pytest.raises(FormatError):
        parse_record_header(HEADER, changed)


@given(st.data())
def test_a_footer_with_a_changed_bit_is_refused(data: st.DataObject) -> None:
    place = FooterEntry(PageKey(b"k" * 48), BLOCK, 10, 20, 5)
    end = place.offset + place.nbytes
    footer = pack_footer(HEADER, end, [place])
    body = data.draw(st.integers(0, 8 * (32 + 48) - 1))
    with pytest.raises(FormatError):
        parse_footer(HEADER, flipped(footer, body))
    trailer = data.draw(st.integers(8 * (len(footer) - 64), 8 * len(footer) - 1))
    with pytest.raises(FormatError):
        parse_trailer(HEADER, end + len(footer), flipped(footer, trailer))


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": 8},
        {"number": 4},
        {"codec_id": 3},
        {"table": b"another"},
        {"page_format": PageFormat(ElementType.FP16, 4096, 16)},
        {"page_format": PageFormat(ElementType.FP16, 8192, 32)},
    ],
)
def test_a_record_of_another_segment_is_refused(changes: dict[str, object]) -> None:
    other = dataclasses.replace(HEADER, **changes)  # type: ignore[arg-type]
    packed = pack_record_header(other, RECORD)
    with pytest.raises(FormatError):
        parse_record_header(HEADER, packed)


def test_a_footer_of_another_segment_or_place_is_refused() -> None:
    footer = pack_footer(HEADER, BLOCK, [])
    other = dataclasses.replace(HEADER, nonce=8)
    with pytest.raises(FormatError, match="not sealed"):
        parse_trailer(other, BLOCK + len(footer), footer)
    with pytest.raises(FormatError, match="position does not match"):
        parse_trailer(HEADER, 2 * BLOCK + len(footer), footer)


@pytest.mark.parametrize("second", [BLOCK, 2 * BLOCK + 1, 1 << 40])
def test_a_footer_whose_records_overlap_is_refused(second: int) -> None:
    places = [
        FooterEntry(PageKey(b"a" * 48), BLOCK, 10, 20, 5),
        FooterEntry(PageKey(b"b" * 48), second, 10, 20, 5),
    ]
    with pytest.raises(FormatError):
        parse_footer(HEADER, pack_footer(HEADER, 3 * BLOCK, places))


def test_a_segment_of_another_version_is_refused_with_its_version() -> None:
    packed = bytearray(pack_segment_header(HEADER))
    packed[8] = 99
    with pytest.raises(FormatError, match="version 99"):
        parse_segment_header(bytes(packed))


def test_the_format_has_not_changed() -> None:
    """The packed bytes have a known hash. A change of the format requires a new VERSION, because
    existing stores contain bytes of the old format."""
    everything = (
        pack_segment_header(HEADER)
        + pack_record_header(HEADER, RECORD)
        + pack_footer(HEADER, BLOCK, [FooterEntry(RECORD.key, BLOCK, 10, 20, 5)])
    )
    assert record_bytes(48, 300) == BLOCK
    assert record_bytes(48, 2 * BLOCK) == 3 * BLOCK
    assert dataclasses.replace(RECORD, plane_bytes=BLOCK, frame_bytes=0).header_bytes == BLOCK
    assert xxhash.xxh3_64_hexdigest(everything) == "b2a51352e5b93e28"


def test_faults_of_a_header_are_reported() -> None:
    packed = pack_segment_header(HEADER)
    with pytest.raises(FormatError, match="not a segment"):
        parse_segment_header(b"TKVSEG\0\1" + packed[8:])
    with pytest.raises(FormatError, match="truncated"):
        parse_segment_header(packed[:-1])
    longer = bytearray(packed.ljust(2 * BLOCK, b"\0"))
    longer[12:16] = (2 * BLOCK).to_bytes(4, "little")
    end = SEGMENT.size + len(HEADER.table)
    longer[end : end + 16] = xxhash.xxh3_128_digest(bytes(longer[:end]))
    with pytest.raises(FormatError, match="wrong length"):
        parse_segment_header(bytes(longer))


def test_a_footer_with_a_wrong_length_is_refused() -> None:
    places = [FooterEntry(PageKey(b"a" * 48), BLOCK, 10, 20, 5)]
    footer = pack_footer(HEADER, 3 * BLOCK, places)
    assert parse_footer(HEADER, footer) == places
    longer = footer[:-TRAILER_BYTES] + bytes(BLOCK) + footer[-TRAILER_BYTES:]
    with pytest.raises(FormatError, match="wrong length"):
        parse_footer(HEADER, longer)


@pytest.mark.parametrize("lengths", [(40, 40), (48, 49), (48, 47), (81, 15), (256, 48)])
def test_a_footer_whose_keys_have_other_lengths_is_refused(lengths: tuple[int, int]) -> None:
    """A footer whose entries state wrong key lengths is refused, although its digests are
    correct."""
    places = [FooterEntry(PageKey(bytes([n]) * 48), BLOCK * n, 10, 20, 5) for n in (1, 2)]
    footer = bytearray(pack_footer(HEADER, 3 * BLOCK, places))
    rows = np.frombuffer(footer, ENTRY, 2)
    for row, length in enumerate(lengths):
        rows["key"][row] = length
    body = 2 * ENTRY.itemsize + 96
    fixed = len(footer) - TRAILER_BYTES
    trailer = TRAILER.pack(
        TRAILER_MAGIC, HEADER.nonce, 3 * BLOCK, 2, 96, xxhash.xxh3_128_digest(bytes(footer[:body]))
    )
    footer[fixed : fixed + TRAILER.size] = trailer
    with pytest.raises(FormatError, match="keys of the footer have the wrong lengths"):
        parse_footer(HEADER, bytes(footer))
