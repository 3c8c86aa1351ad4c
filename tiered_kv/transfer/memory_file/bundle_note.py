"""Note at the begin of a bundle's first slot: which pages are in it, where, and in what codec.

    note      head | slots | table | records

    head      group          u32  page group
              codec          u32  number of the codec
              slots          u32
              table bytes    u32
              pages          u32

    slots     u32 each, in the order of the bundle's bytes

    table     of the codec

    record    of each page that a later engine may find, 112 bytes:

              key bytes      u32
              plane bytes    u32
              frame bytes    u32
              offset         u64  in the bundle's slots, taken one behind the other
              saved          u64  nanoseconds since 1970, when every rank had it
              digest         16   xxh3-128 of plane and frame
              key            76   zeros behind it

Little-endian. The headers of the bundle's slots have a digest of the note. Parsing is total: any
bytes give a value or raise ``FormatError``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tiered_kv.keys import PageKey
from tiered_kv.storage.bundles import Record
from tiered_kv.storage.segment.format import MIN_KEY_BYTES, FormatError

from .memory_format import MAX_KEY_BYTES

_HEAD = struct.Struct("<IIIII")
_SLOT = struct.Struct("<I")
_RECORD = struct.Struct("<IIIQQ16s76s")


@dataclass(frozen=True, slots=True)
class NotedPage:
    """A page of a bundle.

    Attributes:
        saved: time at which the scheduler knew it whole on every rank, nanoseconds since 1970.
    """

    key: PageKey
    saved: int
    record: Record


@dataclass(frozen=True, slots=True)
class BundleNote:
    """Fields of a note; see the table above."""

    group: int
    codec_id: int
    table: bytes
    slots: tuple[int, ...]
    pages: tuple[NotedPage, ...]


def note_bytes(table: bytes, slots: int, pages: int) -> int:
    """Size of a note.

    Args:
        table: of the codec.
    """
    return _HEAD.size + slots * _SLOT.size + len(table) + pages * _RECORD.size


def pack_note(note: BundleNote) -> bytes:
    """Pack a note.

    Raises:
        ValueError: a key is longer than a record can say.
    """
    head = (note.group, note.codec_id, len(note.slots), len(note.table), len(note.pages))
    parts = [_HEAD.pack(*head), *map(_SLOT.pack, note.slots), note.table]
    for page in note.pages:
        if not MIN_KEY_BYTES <= len(page.key) <= MAX_KEY_BYTES:
            raise ValueError(f"a key of {len(page.key)} bytes")
        one = page.record
        sizes = (len(page.key), one.plane_bytes, one.frame_bytes, one.offset, page.saved)
        parts.append(_RECORD.pack(*sizes, one.digest, page.key))
    return b"".join(parts)


def parse_note(note: bytes, slot_bytes: int) -> BundleNote:
    """Parse a note.

    Raises:
        FormatError: it contradicts itself.
    """
    if len(note) < _HEAD.size:
        raise FormatError("the note of a bundle is cut off")
    group, codec_id, slots, table_bytes, pages = _HEAD.unpack_from(note)
    table_at = _HEAD.size + slots * _SLOT.size
    pages_at = table_at + table_bytes
    if not slots or len(note) != pages_at + pages * _RECORD.size:
        raise FormatError("the note of a bundle has another length than it says")
    places = tuple(one for (one,) in _SLOT.iter_unpack(note[_HEAD.size : table_at]))
    found = list[NotedPage]()
    for key_bytes, plane, frame, offset, saved, digest, key in _RECORD.iter_unpack(note[pages_at:]):
        if (
            not MIN_KEY_BYTES <= key_bytes <= MAX_KEY_BYTES
            or offset < len(note)
            or offset + plane + frame > slots * slot_bytes
        ):
            raise FormatError("the note of a bundle has impossible values")
        record = Record(offset, plane, frame, digest)
        found.append(NotedPage(PageKey(key[:key_bytes]), saved, record))
    return BundleNote(group, codec_id, note[table_at:pages_at], places, tuple(found))
