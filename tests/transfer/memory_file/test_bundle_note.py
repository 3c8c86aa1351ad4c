"""Bundle notes: parsing inverts packing, and arbitrary bytes result in a value or an error."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.keys import PageKey
from tiered_kv.storage.bundles import Record
from tiered_kv.storage.segment.format import FormatError
from tiered_kv.transfer.memory_file.memory_format import MAX_KEY_BYTES
from tiered_kv.transfer.memory_file.slot_table import (
    BundleNote,
    NotedPage,
    note_bytes,
    pack_note,
    parse_note,
)

SLOT = 1 << 16


@st.composite
def notes(draw: st.DrawFn) -> BundleNote:
    slots = tuple(draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9, unique=True)))
    table, count = draw(st.binary(max_size=200)), draw(st.integers(0, 6))
    begin, end = note_bytes(table, len(slots), count), len(slots) * SLOT
    pages = []
    for _ in range(count):
        at = sorted(draw(st.lists(st.integers(begin, end), min_size=3, max_size=3)))
        record = Record(
            at[0], at[1] - at[0], at[2] - at[1], draw(st.binary(min_size=16, max_size=16))
        )
        key = PageKey(draw(st.binary(min_size=16, max_size=MAX_KEY_BYTES)))
        pages.append(NotedPage(key, draw(st.integers(0, 2**63)), record))
    return BundleNote(
        draw(st.integers(0, 99)), draw(st.integers(0, 65535)), table, slots, (*pages,)
    )


@given(notes())
def test_a_packed_note_is_parsed_unchanged(note: BundleNote) -> None:
    packed = pack_note(note)
    assert len(packed) == note_bytes(note.table, len(note.slots), len(note.pages))
    assert parse_note(packed, SLOT) == note


@given(notes(), st.data())
def test_damaged_notes_give_a_value_or_an_error(note: BundleNote, data: st.DataObject) -> None:
    packed = bytearray(pack_note(note))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(packed)))
    for one in (bytes(packed), bytes(packed[:cut])):
        with suppress(FormatError):
            parse_note(one, SLOT)


@given(st.binary(max_size=400))
def test_any_bytes_give_a_value_or_an_error(packed: bytes) -> None:
    with suppress(FormatError):
        parse_note(packed, SLOT)


def test_a_record_inside_the_note_or_after_the_slots_is_refused() -> None:
    size = note_bytes(b"", 1, 1)
    for offset in (size - 1, SLOT - 9):
        page = NotedPage(PageKey(bytes(16)), 1, Record(offset, 5, 5, bytes(16)))
        with pytest.raises(FormatError, match="impossible"):
            parse_note(pack_note(BundleNote(0, 1, b"", (3,), (page,))), SLOT)


@pytest.mark.parametrize("length", [1, MAX_KEY_BYTES + 1])
def test_a_key_that_does_not_fit_is_refused(length: int) -> None:
    page = NotedPage(PageKey(bytes(length)), 1, Record(500, 5, 5, bytes(16)))
    with pytest.raises(ValueError, match="the key has"):
        pack_note(BundleNote(0, 1, b"", (3,), (page,)))
