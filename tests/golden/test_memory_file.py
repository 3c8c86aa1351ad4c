"""A memory file written by commit 913b4b9: single pages, pages compressed together, and slots
without a page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.golden.conftest import Copy
from tests.golden.written import FINGERPRINT, FORMAT, changes, keys_of, page
from tiered_kv.codecs.raw import RawCodec
from tiered_kv.connectors.runtime.worker.lasting_pages import adopt_bundles
from tiered_kv.errors import ConfigError
from tiered_kv.keys import PageKey
from tiered_kv.storage.bundles import Bundles
from tiered_kv.transfer.memory_file.memory_format import (
    ENTRY_BYTES,
    OWNER_AT,
    Geometry,
    State,
    pack_bundle_header,
    pack_file_header,
    pack_slot_header,
    parse_bundle_header,
    parse_file_header,
    parse_slot_header,
)
from tiered_kv.transfer.memory_file.opening import open_memory
from tiered_kv.transfer.memory_file.slot_table import pack_note, parse_note

SLOTS, PAGE = 32, FORMAT.page_bytes
GEOMETRY = Geometry(FINGERPRINT, rank=1, ranks=2, replica=0, slots=SLOTS, slot_bytes=PAGE)
NAME = "0-1.slots"
TABLE_AT, SLOTS_AT, HEADER_BYTES = 4096, 8192, 120
SAVED = 1_700_000_000_000_000_000
"""Time at which the first page was saved, in nanoseconds since 1970."""
SINGLE = {0: 0, 3: 1, 5: 2, 1: 3, 19: 60, 18: 61}
"""Slot of each single page, and how many nanoseconds after ``SAVED`` it was saved."""
BUNDLE = tuple(range(30, 19, -1))
"""Slots of the pages that are compressed together."""
UNUSED = (2, 4, *range(6, 18), 31)

Found = dict[PageKey, tuple[tuple[int, ...], int, bytes]]
"""Slots, time and bytes of each page, by key."""


def expected() -> Found:
    single = zip(SINGLE, keys_of(0, 3, 1) + keys_of(200, 2), strict=True)
    found: Found = {
        key: ((slot,), SAVED + SINGLE[slot], page(key).tobytes()) for slot, key in single
    }
    for n, key in enumerate(keys_of(100, 12, 1)):
        found[key] = (BUNDLE, SAVED + 20 + n, page(key).tobytes())
    return found


def read(folder: Path) -> Found:
    """Return everything that the next engine adopts, or nothing if the file is refused."""
    try:
        memory = open_memory(folder, GEOMETRY, keep=True)
    except ConfigError:
        return {}
    try:
        memory.check_adopted(1)
        slots = memory.view.reshape(SLOTS, PAGE)
        found: Found = {
            one.key: ((slot,), one.saved, slots[slot, : one.nbytes].tobytes())
            for slot, one in memory.adopted.items()
        }
        bundles, out = Bundles(slots, RawCodec(FORMAT)), np.zeros(PAGE, np.uint8)
        for bundle in adopt_bundles(memory, {0: bundles}, SLOTS, ""):
            for key, saved in zip(bundle.keys, bundle.saved, strict=True):
                if bundles.read(bundle.slots[0], key, out):
                    found[key] = (bundle.slots, saved, out.tobytes())
        return found
    finally:
        memory.close()


def test_the_next_engine_adopts_every_page(copy: Copy) -> None:
    folder = copy("memory")
    assert read(folder) == expected()
    assert read(folder) == expected(), "and the one after it"


def entry_at(slot: int) -> int:
    return TABLE_AT + slot * ENTRY_BYTES


def slot_at(slot: int) -> int:
    return SLOTS_AT + slot * PAGE


CHECKED = {
    "file header": range(HEADER_BYTES),
    "header of a page": range(entry_at(3), entry_at(4)),
    "header of a bundle": range(entry_at(30), entry_at(31)),
    "header of a bundle's second slot": range(entry_at(29), entry_at(30)),
    "page": range(slot_at(3), slot_at(4), 41),
    "note of a bundle": range(slot_at(30), slot_at(31), 41),
    "compressed pages": range(slot_at(25), slot_at(26), 97),
}


@pytest.mark.parametrize("part", CHECKED)
def test_a_changed_byte_costs_pages_and_never_gives_a_wrong_one(part: str, copy: Copy) -> None:
    whole = expected()
    folder = copy("memory")
    for at, content in changes((folder / NAME).read_bytes(), CHECKED[part]):
        (folder / NAME).write_bytes(content)
        found = read(folder)
        assert found != whole, f"the change at {at} went unnoticed"
        assert found.items() <= whole.items(), f"the change at {at} gave a wrong page"


IGNORED = {
    "after the file header": range(HEADER_BYTES, OWNER_AT, 100),
    "last process": range(OWNER_AT, TABLE_AT, 100),
    "slots without a page": range(slot_at(UNUSED[0]), slot_at(UNUSED[0] + 1), 100),
}


@pytest.mark.parametrize("part", IGNORED)
def test_bytes_without_a_meaning_may_change(part: str, copy: Copy) -> None:
    whole = expected()
    folder = copy("memory")
    for _, content in changes((folder / NAME).read_bytes(), IGNORED[part]):
        (folder / NAME).write_bytes(content)
        assert read(folder) == whole


def test_headers_and_notes_are_written_in_the_same_format(written: Path) -> None:
    content = (written / "memory" / NAME).read_bytes()
    header = parse_file_header(content[:TABLE_AT])
    assert header.geometry == GEOMETRY
    assert header.size == len(content)
    assert pack_file_header(header) == content[:HEADER_BYTES]
    nonce = header.nonce
    for slot in SINGLE:
        entry = content[entry_at(slot) : entry_at(slot + 1)]
        assert pack_slot_header(nonce, slot, parse_slot_header(nonce, slot, entry, PAGE)) == entry
    for slot in BUNDLE:
        entry = content[entry_at(slot) : entry_at(slot + 1)]
        state = State.BUNDLE if slot == BUNDLE[0] else State.PART
        bundle = parse_bundle_header(nonce, slot, entry, PAGE)
        assert pack_bundle_header(nonce, slot, bundle, state) == entry
        packed = content[slot_at(BUNDLE[0]) :][: bundle.note_bytes]
        note = parse_note(packed, PAGE)
        assert (note.group, note.codec_id, note.slots) == (0, 2, BUNDLE)
        assert pack_note(note) == packed
    for slot in UNUSED:
        assert content[entry_at(slot)] == State.NEVER_USED
