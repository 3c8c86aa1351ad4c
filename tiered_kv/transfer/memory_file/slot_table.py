"""The table of slot headers, in memory that outlives the process.

Nothing is flushed and there is no fence. The memory is a shared mapping: its pages belong to the
file, and survive when the process is killed, as long as the machine runs. An interrupted core has
performed every store of the program up to some instruction, and none after it, on x86 and on Arm
alike. Memory order matters only to another core that reads at the same time, and the next owner
reads after the process has ended. So it finds the state of a program that stopped at that
instruction. Each store here is a separate numpy call, and no compiler reorders these calls.

A slot is invalidated before its first byte changes. The last store, after all other stores,
validates the slot. So every slot found valid is complete, header and page.

The note at the start of a bundle's first slot lists its pages, their locations and their codec.

    note      head | slots | table | records

    head      group          u32  page group
              codec          u32  id of the codec
              slots          u32
              table bytes    u32
              pages          u32

    slots     u32 each, in the order of the bundle's bytes

    table     of the codec

    record    of each page that a later engine may find, 120 bytes:

              key bytes      u32
              plane bytes    u32
              frame bytes    u32
              offset         u64  in the concatenated slots of the bundle
              saved          u64  nanoseconds since 1970, when every rank had the page
              digest         16   xxh3-128 of plane and frame
              key            76   padded with zeros

Integers are little-endian. The headers of the bundle's slots have a digest of the note. Parsing
accepts any bytes: a function either returns a value or raises ``FormatError``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiered_kv.keys import PageKey
from tiered_kv.storage.bundles import Record
from tiered_kv.storage.segment.format import MIN_KEY_BYTES, FormatError

from .memory_format import (
    ENTRY_BYTES,
    MAX_KEY_BYTES,
    BundleHeader,
    SlotHeader,
    State,
    pack_bundle_header,
    pack_slot_header,
    parse_bundle_header,
    parse_slot_header,
)


class SlotTable:
    """Headers of slots, in place.

    Args:
        table: the bytes of the table, uint8, contiguous.
        nonce: nonce of the file.
        slot_bytes: size of a slot, bytes.
    """

    def __init__(self, table: NDArray[np.uint8], nonce: int, slot_bytes: int) -> None:
        self._rows = table.reshape(-1, ENTRY_BYTES)
        self._states: NDArray[np.uint32] = self._rows[:, :4].view("<u4")[:, 0]
        self._nonce = nonce
        self._slot_bytes = slot_bytes

    def invalidate(self, slots: Sequence[int]) -> None:
        """Invalidate slots whose bytes are about to change."""
        self._states[list(slots)] = State.INVALID

    def invalidate_all(self) -> None:
        """Invalidate every slot that is valid or part of a bundle."""
        self._states[self._states > State.INVALID] = State.INVALID

    def forget_invalid(self, but: Iterable[int]) -> None:
        """Mark invalid slots as never used, except the slots ``but``."""
        forgotten = self._states == State.INVALID
        forgotten[list(but)] = False
        self._states[forgotten] = State.NEVER_USED

    def validate(self, slot: int, header: SlotHeader) -> None:
        """Mark a slot as valid. It must already contain the bytes of the page.

        Raises:
            ValueError: the key or the page is too long for a header.
        """
        self._write(slot, pack_slot_header(self._nonce, slot, header), State.VALID)

    def validate_bundle(self, slots: Sequence[int], header: BundleHeader) -> None:
        """Mark the slots of a bundle as valid, the first slot last, because the other slots are
        ignored until the first slot is valid."""
        states = dict.fromkeys(slots[1:], State.PART) | {slots[0]: State.BUNDLE}
        for slot, state in states.items():
            self._write(slot, pack_bundle_header(self._nonce, slot, header, state), state)

    def _write(self, slot: int, packed: bytes, state: State) -> None:
        self._states[slot] = State.INVALID
        self._rows[slot, 4:] = np.frombuffer(packed, np.uint8)[4:]
        self._states[slot] = state

    def read(self, slot: int) -> SlotHeader | None:
        """Return the header of a valid slot; None if the slot is not valid.

        Raises:
            FormatError: the header is torn or damaged.
        """
        return self._parse(slot) if self._states[slot] == State.VALID else None

    def _parse(self, slot: int) -> SlotHeader:
        entry = self._rows[slot].tobytes()
        return parse_slot_header(self._nonce, slot, entry, self._slot_bytes)

    def valid(self) -> tuple[dict[int, SlotHeader], list[int]]:
        """Return the headers of the valid slots, by slot; and the slots with torn headers or
        unknown states."""
        found = dict[int, SlotHeader]()
        torn: list[int] = np.flatnonzero(self._states > State.PART).tolist()
        for slot in np.flatnonzero(self._states == State.VALID).tolist():
            try:
                found[slot] = self._parse(slot)
            except FormatError:
                torn.append(slot)
        return found, torn

    def bundles(self) -> tuple[list[tuple[BundleHeader, list[int]]], list[int]]:
        """Return complete bundles, each with its slots, the first slot first; and the remaining
        slots of incomplete bundles, whose other slots were reused or never written."""
        by_note, stray = dict[bytes, list[int]](), list[int]()
        headers = dict[int, BundleHeader]()
        first_ones = self._states == State.BUNDLE
        for slot in np.flatnonzero(first_ones | (self._states == State.PART)).tolist():
            entry = self._rows[slot].tobytes()
            try:
                header = parse_bundle_header(self._nonce, slot, entry, self._slot_bytes)
            except FormatError:
                stray.append(slot)
                continue
            headers[slot] = header
            by_note.setdefault(header.digest, []).append(slot)
        found = list[tuple[BundleHeader, list[int]]]()
        for slots in by_note.values():
            slots.sort(key=lambda slot: not first_ones[slot])
            header = headers[slots[0]]
            if sum(first_ones[slots]) == 1 and len(slots) == header.slots:
                found.append((header, slots))
            else:
                stray += slots
        return found, stray

    def invalid(self) -> list[int]:
        """Return the slots that were about to be written, or whose page was discarded."""
        return list(np.flatnonzero(self._states == State.INVALID).tolist())


_HEAD = struct.Struct("<IIIII")
_SLOT = struct.Struct("<I")
_RECORD = struct.Struct("<IIIQQ16s76s")


@dataclass(frozen=True, slots=True)
class NotedPage:
    """A page of a bundle, as listed in the bundle's note.

    Attributes:
        saved: time at which the page was known to be complete on every rank, nanoseconds since
            1970.
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
    """Return the size of a note, bytes.

    Args:
        table: table of the codec.
    """
    return _HEAD.size + slots * _SLOT.size + len(table) + pages * _RECORD.size


def pack_note(note: BundleNote) -> bytes:
    """Pack a note.

    Raises:
        ValueError: a key is too long for a record.
    """
    head = (note.group, note.codec_id, len(note.slots), len(note.table), len(note.pages))
    parts = [_HEAD.pack(*head), *map(_SLOT.pack, note.slots), note.table]
    for page in note.pages:
        if not MIN_KEY_BYTES <= len(page.key) <= MAX_KEY_BYTES:
            raise ValueError(
                f"the key has {len(page.key)} bytes, which a bundle record cannot store"
            )
        one = page.record
        sizes = (len(page.key), one.plane_bytes, one.frame_bytes, one.offset, page.saved)
        parts.append(_RECORD.pack(*sizes, one.digest, page.key))
    return b"".join(parts)


def parse_note(note: bytes, slot_bytes: int) -> BundleNote:
    """Parse a note.

    Raises:
        FormatError: the note is inconsistent.
    """
    if len(note) < _HEAD.size:
        raise FormatError("the bundle record is truncated")
    group, codec_id, slots, table_bytes, pages = _HEAD.unpack_from(note)
    table_at = _HEAD.size + slots * _SLOT.size
    pages_at = table_at + table_bytes
    if not slots or len(note) != pages_at + pages * _RECORD.size:
        raise FormatError("the bundle record has the wrong length")
    places = tuple(one for (one,) in _SLOT.iter_unpack(note[_HEAD.size : table_at]))
    found = list[NotedPage]()
    for key_bytes, plane, frame, offset, saved, digest, key in _RECORD.iter_unpack(note[pages_at:]):
        if (
            not MIN_KEY_BYTES <= key_bytes <= MAX_KEY_BYTES
            or offset < len(note)
            or offset + plane + frame > slots * slot_bytes
        ):
            raise FormatError("the bundle record has impossible values")
        record = Record(offset, plane, frame, digest)
        found.append(NotedPage(PageKey(key[:key_bytes]), saved, record))
    return BundleNote(group, codec_id, note[table_at:pages_at], places, tuple(found))
