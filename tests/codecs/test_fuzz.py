"""Arbitrary bytes from the disk decode to a page or raise ``CodecError``."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.codecs.autotune import synthetic_page
from tiered_kv.codecs.base import (
    Bytes,
    Codec,
    CodecError,
    ElementType,
    EncodedPage,
    PageFormat,
    Section,
)
from tiered_kv.codecs.centred import HEADER, CentredCodec
from tiered_kv.codecs.raw import NOTHING
from tiered_kv.codecs.registry import from_table, parse

GUARD = 64
FORMATS = [
    PageFormat(element, 6400, 16)
    for element in (ElementType.BF16, ElementType.FP16, ElementType.FP8_E4M3)
]
MIXED = PageFormat.of(
    [
        Section(ElementType.BF16, 640),
        Section(ElementType.FP32, 1601),
        Section(ElementType.OPAQUE, 17),
        Section(ElementType.FP32, 2399),
        Section(ElementType.BF16, 1280),
    ],
    16,
)


def trained(page_format: PageFormat) -> Codec:
    return CentredCodec(page_format).trained([synthetic_page(page_format, i) for i in range(2)])


CODECS: list[Codec] = [
    *(trained(page_format) for page_format in FORMATS),
    *(parse(name)(FORMATS[0]) for name in ("raw", "zstd", "centred")),
    parse("centred")(PageFormat(ElementType.FP32, 6400, 16)),
    parse("centred")(MIXED).trained([synthetic_page(MIXED, i) for i in range(2)]),
]
STORED = [codec.encode(synthetic_page(codec.page_format, 7)) for codec in CODECS]


def decode_guarded(codec: Codec, encoded: EncodedPage) -> Bytes | None:
    """Decode a page. Return it, or None if the codec raises ``CodecError``.

    Asserts that no byte around ``out`` changes, and that the thread can decode the next page
    correctly.
    """
    size = codec.page_format.page_bytes
    memory = np.full(size + 2 * GUARD, 0xA5, dtype=np.uint8)
    out: Bytes | None = memory[GUARD : GUARD + size]
    assert out is not None
    try:
        codec.decode(encoded, out)
    except CodecError:
        out = None
    assert (memory[:GUARD] == 0xA5).all()
    assert (memory[GUARD + size :] == 0xA5).all()

    again = np.empty(size, dtype=np.uint8)
    codec.decode(STORED[CODECS.index(codec)], again)
    assert np.array_equal(again, synthetic_page(codec.page_format, 7))
    return out


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """Generate damaged copies of ``good``, or random bytes."""
    data = bytearray(good)
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["change", "cut", "grow", "splice"]))
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        if kind == "change" and data:
            # The first bytes are headers, where damage has more effects than in the rest.
            at = draw(st.one_of(st.just(at), st.integers(0, min(len(data) - 1, 24))))
            data[at] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del data[at:]
        elif kind == "grow":
            data[at:at] = draw(st.binary(max_size=40))
        else:
            data[at : at + 20] = draw(st.binary(min_size=20, max_size=20))
    return draw(st.one_of(st.just(bytes(data)), st.binary(max_size=200)))


def as_bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, dtype=np.uint8)


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(data=st.data(), which=st.integers(0, len(CODECS) - 1))
def test_damaged_pages_harm_no_request(data: st.DataObject, which: int) -> None:
    good = STORED[which]
    plane = as_bytes(data.draw(damaged(good.plane.tobytes())))
    frame = as_bytes(data.draw(damaged(good.frame.tobytes())))
    decode_guarded(CODECS[which], EncodedPage(plane, frame))


def frame_of(content: bytes, level: int = 1) -> bytearray:
    return bytearray(zstandard.ZstdCompressor(level=level).compress(content))


ZSTD = CODECS[4]
SIZE = ZSTD.page_format.page_bytes


def refusal(frame: bytes) -> str:
    assert decode_guarded(ZSTD, EncodedPage(NOTHING, as_bytes(frame))) is None
    with pytest.raises(CodecError) as caught:
        ZSTD.decode(EncodedPage(NOTHING, as_bytes(frame)), np.empty(SIZE, dtype=np.uint8))
    return str(caught.value)


def test_a_frame_of_a_longer_page_is_refused_by_its_header() -> None:
    assert f"{SIZE + 1} bytes instead of {SIZE}" in refusal(bytes(frame_of(bytes(SIZE + 1))))


def test_a_frame_with_64_mib_fills_no_more_than_a_page() -> None:
    bomb = frame_of(bytes(64 << 20))
    honest = frame_of(bytes(SIZE))
    window = bomb[5]
    flags = 0x40  # a content size of two bytes and a window descriptor
    header = bytes([*bomb[:4], flags, window]) + struct.pack("<H", SIZE - 256)
    blocks = bomb[zstandard.frame_header_size(bytes(bomb)) :]
    assert zstandard.get_frame_parameters(header + blocks).content_size == SIZE
    assert len(blocks) > len(honest)
    refusal(header + blocks)


def test_a_frame_that_asks_for_a_huge_window_gets_none() -> None:
    """A truncated frame with a window of 2 GiB is refused. zstd cannot decode a truncated frame in
    one piece, so it would otherwise allocate the window."""
    flags, huge = 0x40, 0xA8  # 2**31 bytes
    header = b"\x28\xb5\x2f\xfd" + bytes([flags, huge]) + struct.pack("<H", SIZE - 256)
    parameters = zstandard.get_frame_parameters(header)
    assert (parameters.content_size, parameters.window_size) == (SIZE, 1 << 31)
    assert "too much memory" in refusal(header + b"\x01\x00")


def test_a_frame_that_ends_early_is_refused() -> None:
    whole = frame_of(np.random.default_rng(0).bytes(SIZE))
    for length in (0, 3, 4, 8, len(whole) // 2, len(whole) - 1):
        refusal(bytes(whole[:length]))


def test_a_frame_of_any_other_encoder_will_do() -> None:
    page = synthetic_page(ZSTD.page_format, 3)
    for level in (-5, 3, 19):
        frame = as_bytes(bytes(frame_of(page.tobytes(), level)))
        decoded = decode_guarded(ZSTD, EncodedPage(NOTHING, frame))
        assert decoded is not None
        assert np.array_equal(decoded, page)


# -- tables ---------------------------------------------------------------------

TABLE = CODECS[0].table


def read(table: bytes, page_format: PageFormat = FORMATS[0]) -> Codec:
    return from_table(CentredCodec.codec_id, table, page_format)


def sealed(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_damaged_table_is_refused(data: st.DataObject) -> None:
    table = data.draw(damaged(TABLE))
    if table in (TABLE, b""):  # an empty table means that there is none
        return
    with pytest.raises(CodecError, match="table"):
        read(table)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_table_of_nonsense_with_a_good_checksum_is_refused_or_works(data: st.DataObject) -> None:
    try:
        codec = read(sealed(data.draw(damaged(TABLE[:-4]))))
    except CodecError:
        return
    page = synthetic_page(FORMATS[0], 5)
    out = np.zeros_like(page)
    codec.decode(codec.encode(page), out)
    assert np.array_equal(out, page)


@pytest.mark.parametrize("field", range(1, 8))
@pytest.mark.parametrize("value", [0, 1, 3, 7, 255])
def test_every_field_of_a_table_is_checked(field: int, value: int) -> None:
    fields = list(HEADER.unpack_from(TABLE))
    if fields[field] == value:
        return
    fields[field] = value
    with pytest.raises(CodecError, match="table"):
        read(sealed(HEADER.pack(*fields) + TABLE[HEADER.size : -4]))


@pytest.mark.parametrize("inner", [0, 3, 7, 201, 2**32 - 1])
def test_a_table_whose_channels_cannot_be_laid_out_is_refused(inner: int) -> None:
    inners = struct.pack("<I", inner)
    body = TABLE[: HEADER.size] + inners + TABLE[HEADER.size + 4 : -4]
    with pytest.raises(CodecError, match="does not divide a stripe"):
        read(sealed(body))


def test_a_table_of_other_pages_is_refused() -> None:
    assert read(TABLE).table == TABLE
    for other in (
        PageFormat(ElementType.FP16, 6400, 16),
        PageFormat(ElementType.BF16, 6400, 8),
        PageFormat(ElementType.BF16, 3200, 16),
    ):
        with pytest.raises(CodecError, match="does not belong to pages"):
            read(TABLE, other)
