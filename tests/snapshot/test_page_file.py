"""Page files are read back bit for bit, or refused."""

from __future__ import annotations

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.snapshot.made_snapshots import BF16, FORMATS, MIXED, OPAQUE
from tiered_kv.codecs.autotune import synthetic_page
from tiered_kv.codecs.base import ELEMENTS, Bytes, ElementType, PageFormat
from tiered_kv.codecs.section_table import HEADER as TABLE_HEADER
from tiered_kv.snapshot.manifest import SnapshotError
from tiered_kv.snapshot.page_file import (
    HEADER,
    MAGIC,
    VERSION,
    decode_page,
    encode_page,
    most_file_bytes,
)


def stored(page: Bytes, page_format: PageFormat) -> bytes:
    return b"".join(encode_page(page, page_format))


def decoded(data: bytes, page_format: PageFormat) -> Bytes:
    out = np.full(page_format.page_bytes, 0xA5, np.uint8)
    decode_page(data, page_format, out)
    return out


@pytest.mark.parametrize("page_format", FORMATS, ids=lambda one: one.element.value)
def test_a_page_is_read_back(page_format: PageFormat) -> None:
    for seed in range(3):
        page = synthetic_page(page_format, seed)
        assert np.array_equal(decoded(stored(page, page_format), page_format), page)


@settings(max_examples=200)
@given(st.sampled_from(FORMATS), st.data())
def test_a_page_of_any_bytes_is_read_back(page_format: PageFormat, data: st.DataObject) -> None:
    some = data.draw(st.binary(min_size=1, max_size=64))
    page = np.resize(np.frombuffer(some, np.uint8), page_format.page_bytes)
    file = stored(page, page_format)
    assert len(file) <= most_file_bytes(page_format)
    assert np.array_equal(decoded(file, page_format), page)


def test_kv_pages_are_compressed() -> None:
    page_format = PageFormat(ElementType.BF16, 64 << 10, 16)
    assert len(stored(synthetic_page(page_format), page_format)) < 0.9 * page_format.page_bytes


def test_noise_needs_only_an_additional_header() -> None:
    noise = np.random.default_rng(0).integers(0, 256, BF16.page_bytes, np.uint8)
    for page_format in (BF16, PageFormat(ElementType.OPAQUE, BF16.page_bytes, 16)):
        assert len(stored(noise, page_format)) == HEADER.size + noise.nbytes


def test_a_group_with_another_format_reads_the_same_bytes() -> None:
    """A file that was written for one page format is read for another format of the same size,
    because a file serves all pages that have the same bytes."""
    page = synthetic_page(BF16, 1)
    other = PageFormat(ElementType.FP32, BF16.page_bytes, 8)
    assert np.array_equal(decoded(stored(page, BF16), other), page)


# -- refused files ------------------------------------------------------------------------


def refusal(data: bytes, page_format: PageFormat = BF16) -> str:
    with pytest.raises(SnapshotError) as caught:
        decoded(data, page_format)
    return str(caught.value)


def header(**changes: int | bytes) -> bytes:
    fields: dict[str, int | bytes] = {
        "magic": MAGIC,
        "version": VERSION,
        "codec": 0,
        "element": ELEMENTS.index(ElementType.BF16),
        "tokens": 16,
        "page": BF16.page_bytes,
        "table": 0,
        "plane": BF16.page_bytes,
        "frame": 0,
    }
    return HEADER.pack(*{**fields, **changes}.values())


GOOD = header() + bytes(BF16.page_bytes)


def test_the_base_of_the_following_pages_is_valid() -> None:
    assert not decoded(GOOD, BF16).any()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "truncated"),
        (GOOD[: HEADER.size - 1], "truncated"),
        (GOOD[:-1], "according to its header"),
        (GOOD + b"\0", "according to its header"),
        (header(magic=b"PKVPAGE\0") + GOOD[HEADER.size :], "magic"),
        (header(version=2) + GOOD[HEADER.size :], "version 2"),
        (header(codec=99) + GOOD[HEADER.size :], "codec 99"),
        (header(codec=65535) + GOOD[HEADER.size :], "codec"),
        (header(element=6) + GOOD[HEADER.size :], "type 6"),
        (header(page=BF16.page_bytes + 1) + GOOD[HEADER.size :], "instead of"),
        (header(page=0xFFFFFFFF) + GOOD[HEADER.size :], "instead of"),
        (header(plane=0xFFFFFFFF) + GOOD[HEADER.size :], "according to its header"),
        (header(frame=0xFFFFFFFF) + GOOD[HEADER.size :], "according to its header"),
        (header(table=0xFFFFFFFF) + GOOD[HEADER.size :], "table"),
        (header(table=8, plane=BF16.page_bytes - 8) + GOOD[HEADER.size :], "has no table"),
        (header(plane=0, frame=BF16.page_bytes) + GOOD[HEADER.size :], "raw page"),
    ],
)
def test_a_file_that_is_not_a_page_is_refused(data: bytes, why: str) -> None:
    assert why in refusal(data)


def test_a_table_of_more_than_64_kib_is_refused() -> None:
    table = bytes((64 << 10) + 1)
    data = header(table=len(table)) + table + bytes(BF16.page_bytes)
    assert "table of 65537 bytes" in refusal(data)


def test_a_class_named_by_a_file_is_not_imported() -> None:
    name = b"tests.snapshot.made_snapshots:Manifest"
    table = struct.pack("<H", len(name)) + name
    data = header(codec=65535, table=len(table)) + table + bytes(BF16.page_bytes)
    assert "TIERED_KV_CODEC" in refusal(data)


def framed(frame: bytes, codec: int, element: ElementType, plane: bytes = b"") -> bytes:
    fixed = header(codec=codec, element=ELEMENTS.index(element), plane=len(plane), frame=len(frame))
    return fixed + plane + frame


def table_of_sections(nbytes: int, count: int) -> bytes:
    body = TABLE_HEADER.pack(b"TKVS", 1, 0, 1, 16, nbytes, count) + bytes(100)
    return body + struct.pack("<I", zlib.crc32(body))


BOMB = zstandard.ZstdCompressor(level=19).compress(bytes(256 << 20))
HOSTILE = {
    "a frame of 256 MiB": framed(BOMB, 1, ElementType.BF16),
    "symbols of 256 MiB": framed(BOMB, 2, ElementType.BF16, bytes(BF16.page_bytes // 2)),
    "a page that is all frame": framed(BOMB, 2, ElementType.FP8_E4M3),
    "a huge page": header(page=0xFFFFFFFF, codec=2, plane=0),
    "a page of huge sections": header(codec=3, table=len(table_of_sections(1 << 62, 1)), plane=0)
    + table_of_sections(1 << 62, 1),
    "a table of many sections": header(
        codec=3, table=len(table_of_sections(2048, 0xFFFFFFFF)), plane=0
    )
    + table_of_sections(2048, 0xFFFFFFFF),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_reading_a_file_needs_memory_for_the_file_and_a_page(what: str) -> None:
    data = HOSTILE[what]
    decoded(GOOD, BF16)  # creates everything that is cached
    tracemalloc.start()
    try:
        refusal(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(data) + 4 * BF16.page_bytes + (256 << 10)


@pytest.mark.parametrize("page_format", [BF16, OPAQUE, MIXED], ids=["bf16", "opaque", "mixed"])
def test_a_file_that_is_cut_anywhere_is_refused(page_format: PageFormat) -> None:
    data = stored(synthetic_page(page_format), page_format)
    for end in range(0, len(data), 7):
        refusal(data[:end], page_format)
