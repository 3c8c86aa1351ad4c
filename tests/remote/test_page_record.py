"""A page record is decoded to the page that was put, or is refused if any of its bytes changed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.codecs.base import ElementType, EncodedPage, PageFormat
from tiered_kv.remote.page_record import (
    HEADER_BYTES,
    NO_TABLE,
    PageRecord,
    RecordError,
    longest_record,
    open_record,
    pack_record,
    table_name,
)

FORMAT = PageFormat(ElementType.BF16, 256, 4)
KEY = b"k" * 50


def record(plane: bytes = b"plane" * 9, frame: bytes = b"frame" * 30, key: bytes = KEY) -> bytes:
    page = EncodedPage(np.frombuffer(plane, np.uint8), np.frombuffer(frame, np.uint8))
    return b"".join(pack_record(key, FORMAT, PageRecord(3, NO_TABLE, page)))


@given(st.binary(max_size=300), st.binary(max_size=300), st.binary(min_size=1, max_size=257))
def test_a_page_comes_back(plane: bytes, frame: bytes, key: bytes) -> None:
    found = open_record(memoryview(record(plane, frame, key)), key, FORMAT)
    assert (found.codec_id, found.table) == (3, NO_TABLE)
    assert (found.page.plane.tobytes(), found.page.frame.tobytes()) == (plane, frame)


@given(st.data())
def test_a_changed_byte_is_noticed(data: st.DataObject) -> None:
    good = bytearray(record())
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecordError):
        open_record(memoryview(good), KEY, FORMAT)


@given(st.integers(0, len(record()) - 1))
def test_a_short_record_is_refused(length: int) -> None:
    with pytest.raises(RecordError):
        open_record(memoryview(record()[:length]), KEY, FORMAT)


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_any_bytes_are_refused(value: bytes) -> None:
    with pytest.raises(RecordError):
        open_record(memoryview(value), KEY, FORMAT)
    with pytest.raises(RecordError):
        open_record(memoryview(record() + value + b"x"), KEY, FORMAT)


def test_a_record_of_another_page_or_format_is_refused() -> None:
    with pytest.raises(RecordError, match="another page"):
        open_record(memoryview(record()), b"K" * 50, FORMAT)
    with pytest.raises(RecordError, match="another format"):
        open_record(memoryview(record()), KEY, PageFormat(ElementType.BF16, 256, 8))


def test_the_longest_record_fits_every_page() -> None:
    most = FORMAT.page_bytes + FORMAT.page_bytes // 64 + 4096
    assert len(record(b"x" * most, b"")) == longest_record(FORMAT, len(KEY))


def test_tables_have_unique_names() -> None:
    assert table_name(3, b"") == NO_TABLE
    assert len({table_name(3, b"a"), table_name(4, b"a"), table_name(3, b"b"), NO_TABLE}) == 4
