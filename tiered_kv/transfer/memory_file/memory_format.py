"""Format of a memory file: the slots of one rank's CPU memory, with a header for each.

    file      header | table | slots

    header    magic          8    "TKVMEM" and two zeros
              version        u32
              entry bytes    u32  of a slot's header: 128
              contents       16   digest of the fingerprints of the engine's page groups
              nonce          u64  random: a slot's header is valid in this file only
              created        u64  seconds since 1970
              rank, ranks    2 u32
              replica        u32
              reserved       u32  0
              slots          u64
              slot bytes     u64
              table at       u64  offset of the table: 4096
              slots at       u64  offset of the first slot, a multiple of 4096
              size           u64  of the file, whole blocks of the file system
              digest         16   xxh3-128 of everything before it
              owner               at 2048: JSON that names the last process, zeros up to 4096

    table     for each slot a header of 128 bytes, two cache lines:

              state          u32  0 never used, 1 invalid, 2 valid, 3 the first slot of a
                                  bundle, 4 a further one
              page bytes     u32  of the page, which starts at the slot's first byte
              key bytes      u32
              saved          u64  nanoseconds since 1970, when every rank had the page
              digest         16   xxh3-128 of the page's bytes
              key            76   padded with zeros
              own digest     16   xxh3-128 of nonce, number of the slot (u64), and all before it

    bundle    pages that are compressed together fill several slots, the first of which starts with
              a note (``slot_table``). Their headers have the note's size as page bytes, the note's
              digest, the time of the newest page, no key bytes, and in place of the key:

              pages          u32
              slots          u32

Integers are little-endian. A key with vLLM's own hash has 48 bytes, so a header does not fit into
64 bytes. With pages of 256 KiB, the table takes one byte in 2,000.

Parsing accepts any bytes: a function either returns a value or raises ``FormatError``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from tiered_kv.keys import DIGEST_BYTES, PageKey
from tiered_kv.storage.disk.aligned import aligned
from tiered_kv.storage.disk.files import BLOCK
from tiered_kv.storage.segment.format import MAX_PAGE_BYTES, MIN_KEY_BYTES, FormatError

VERSION = 1
MAGIC = b"TKVMEM\0\0"
OWNER_AT = 2048
OWNER_BYTES = BLOCK - OWNER_AT
"""Size of the description of the last process, bytes."""
ENTRY_BYTES = 128
"""Size of a slot's header, bytes."""
MAX_KEY_BYTES = 76
"""Longest key that fits into a slot's header, bytes."""

_FILE = struct.Struct("<8sII16sQQIIIIQQQQQ")
_ENTRY = struct.Struct("<IIIQ16s76s")
_COUNTS = struct.Struct("<II")
_WHERE = struct.Struct("<QQ")


class ForeignError(FormatError):
    """A file that was not created by tiered-kv, or belongs to another user."""


class State(IntEnum):
    """State of a slot. The values differ in one byte, so that a store of a state cannot be torn."""

    NEVER_USED = 0
    INVALID = 1
    VALID = 2
    BUNDLE = 3
    PART = 4


@dataclass(frozen=True, slots=True)
class Geometry:
    """Properties of a memory file. An engine adopts a file's pages only if all of them match.

    Attributes:
        contents: 16 bytes, the digest of the fingerprints of the engine's page groups.
        rank, ranks: rank to which the memory belongs, and number of ranks.
        replica: data-parallel rank of the engine.
        slots: number of slots.
        slot_bytes: size of a slot, equal to the largest page, bytes.

    Raises:
        ValueError: ``contents`` has another size.
    """

    contents: bytes
    rank: int
    ranks: int
    replica: int
    slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if len(self.contents) != DIGEST_BYTES:
            raise ValueError(f"the digest has {len(self.contents)} bytes instead of {DIGEST_BYTES}")

    @property
    def slots_at(self) -> int:
        """Offset of the first slot in the file, bytes."""
        return aligned(BLOCK + self.slots * ENTRY_BYTES)

    @property
    def nbytes(self) -> int:
        """Size of header, table and slots, bytes; the file is padded to a whole block."""
        return self.slots_at + self.slots * self.slot_bytes


@dataclass(frozen=True, slots=True)
class FileHeader:
    """Fields of a file's header; see the table above."""

    geometry: Geometry
    nonce: int
    created: int
    size: int


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """A page in a slot, as described by the slot's header.

    Attributes:
        nbytes: size of the page, which starts at the slot's first byte, bytes.
        saved: time at which the page was known to be complete on every rank, nanoseconds since
            1970.
        digest: xxh3-128 of the page's bytes.
    """

    key: PageKey
    nbytes: int
    saved: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class BundleHeader:
    """Pages that are compressed together, as the header of each of their slots describes them.

    Attributes:
        note_bytes: size of the note at the start of the first slot, bytes.
        pages: number of pages that the note lists.
        slots: number of slots.
        saved: time at which the newest page was known to be complete on every rank, nanoseconds
            since 1970.
        digest: xxh3-128 of the note.
    """

    note_bytes: int
    pages: int
    slots: int
    saved: int
    digest: bytes


def contents_of(fingerprints: Sequence[bytes]) -> bytes:
    """Return the digest of the fingerprints of an engine's page groups, in their order."""
    return xxhash.xxh3_128_digest(b"".join(fingerprints))


def pack_file_header(header: FileHeader) -> bytes:
    """Pack a file's header, without the description of its owner."""
    one = header.geometry
    body = _FILE.pack(
        MAGIC,
        VERSION,
        ENTRY_BYTES,
        one.contents,
        header.nonce,
        header.created,
        one.rank,
        one.ranks,
        one.replica,
        0,
        one.slots,
        one.slot_bytes,
        BLOCK,
        one.slots_at,
        header.size,
    )
    return body + xxhash.xxh3_128_digest(body)


def parse_file_header(start: bytes) -> FileHeader:
    """Parse the first bytes of a file.

    Raises:
        ForeignError: the file is not a memory file.
        FormatError: the file has another version, or is damaged.
    """
    if not start.startswith(MAGIC):
        raise ForeignError("the file is not a memory file of tiered-kv")
    if len(start) < _FILE.size + 16:
        raise FormatError("the header of the file is truncated")
    _, version, entry, contents, nonce, created, rank, ranks, replica, _, *rest = _FILE.unpack_from(
        start
    )
    if version != VERSION:
        raise FormatError(
            f"the file has format version {version}, but only version {VERSION} is supported"
        )
    if xxhash.xxh3_128_digest(start[: _FILE.size]) != start[_FILE.size : _FILE.size + 16]:
        raise FormatError("the header of the file is damaged")
    slots, slot_bytes, table_at, slots_at, size = rest
    geometry = Geometry(contents, rank, ranks, replica, slots, slot_bytes)
    places = (entry, table_at, slots_at)
    if places != (ENTRY_BYTES, BLOCK, geometry.slots_at) or size < geometry.nbytes:
        raise FormatError("the header of the file is inconsistent")
    return FileHeader(geometry, nonce, created, size)


def pack_slot_header(nonce: int, slot: int, header: SlotHeader) -> bytes:
    """Pack the header of a valid slot.

    Raises:
        ValueError: the key or the page is too long for a header.
    """
    if not MIN_KEY_BYTES <= len(header.key) <= MAX_KEY_BYTES:
        raise ValueError(f"the key has {len(header.key)} bytes, which a slot cannot store")
    if not 0 < header.nbytes <= MAX_PAGE_BYTES:
        raise ValueError(f"the page has {header.nbytes} bytes, which a slot cannot store")
    body = _ENTRY.pack(
        State.VALID,
        header.nbytes,
        len(header.key),
        header.saved,
        header.digest,
        header.key,
    )
    return body + _own_digest(nonce, slot, body)


def parse_slot_header(nonce: int, slot: int, entry: bytes, slot_bytes: int) -> SlotHeader:
    """Parse the header of a slot whose state is valid.

    Raises:
        FormatError: the header is torn, damaged, or belongs to another slot or file.
    """
    if len(entry) != ENTRY_BYTES or _own_digest(nonce, slot, entry[: _ENTRY.size]) != bytes(
        entry[_ENTRY.size :]
    ):
        raise FormatError("the header of the slot is incomplete or damaged")
    state, nbytes, key_bytes, saved, digest, key = _ENTRY.unpack_from(entry)
    if (
        state != State.VALID
        or not MIN_KEY_BYTES <= key_bytes <= MAX_KEY_BYTES
        or not 0 < nbytes <= slot_bytes
    ):
        raise FormatError("the header of the slot has impossible values")
    return SlotHeader(PageKey(key[:key_bytes]), nbytes, saved, digest)


def pack_bundle_header(nonce: int, slot: int, header: BundleHeader, state: State) -> bytes:
    """Pack the header of a slot of a bundle. ``state`` is ``BUNDLE`` for the first slot, and
    ``PART`` for every other slot."""
    counts = _COUNTS.pack(header.pages, header.slots)
    body = _ENTRY.pack(state, header.note_bytes, 0, header.saved, header.digest, counts)
    return body + _own_digest(nonce, slot, body)


def parse_bundle_header(nonce: int, slot: int, entry: bytes, slot_bytes: int) -> BundleHeader:
    """Parse the header of a slot whose state is ``BUNDLE`` or ``PART``.

    Raises:
        FormatError: the header is torn, damaged, or belongs to another slot or file.
    """
    body, own = entry[: _ENTRY.size], entry[_ENTRY.size :]
    if len(entry) != ENTRY_BYTES or _own_digest(nonce, slot, body) != own:
        raise FormatError("the header of the slot is incomplete or damaged")
    state, note_bytes, key_bytes, saved, digest, counts = _ENTRY.unpack(body)
    pages, slots = _COUNTS.unpack_from(counts)
    if state not in (State.BUNDLE, State.PART) or key_bytes or not 0 < note_bytes <= slot_bytes:
        raise FormatError("the header of the slot has impossible values")
    return BundleHeader(note_bytes, pages, slots, saved, digest)


def _own_digest(nonce: int, slot: int, body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(_WHERE.pack(nonce, slot) + body)
