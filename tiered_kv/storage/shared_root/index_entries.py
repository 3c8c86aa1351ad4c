"""Index of a writer's folder: the location of each value in the folder's packs, which are files of
values. The index is append-only.

    | bytes of the head | content |
    |---|---|
    | 8 | magic ``tkvindx`` and a zero |
    | 8 | version |
    | 16 | the index's number, random, drawn when it was created |

    | bytes of an entry | content |
    |---|---|
    | 2, 2 | length of the name; kind |
    | 4 | number of the pack |
    | 8, 8 | offset of the value in the pack, and its length |
    | … | name |
    | 8 | xxh3-64 of the index's number and of the entry up to here |

Integers are little-endian. An incomplete entry may still be being written: reading stops there.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import xxhash

MAGIC = b"tkvindx\0"
VERSION = 1
NUMBER_BYTES = 16
HEAD_BYTES = len(MAGIC) + 8 + NUMBER_BYTES
_ENTRY = struct.Struct("<HHIQQ")
_DIGEST_BYTES = 8
MOST_NAME_BYTES = 1 << 12
MOST_OFFSET = 1 << 62
"""Maximum end of a value, bytes. No file is that long, and the system accepts no larger offset."""


class Kind(IntEnum):
    """Type of an index entry."""

    VALUE = 1
    """A value was added."""
    DELETED = 2
    """The value of that name was deleted."""
    PACK_GONE = 3
    """A pack was deleted, with all its values."""


class Place(NamedTuple):
    """Byte range in a pack."""

    pack: int
    offset: int
    nbytes: int


class Entry(NamedTuple):
    """One entry of an index.

    Attributes:
        name: name of the value; empty for an entry about a pack.
    """

    kind: Kind
    name: bytes
    place: Place


def head_of(number: bytes) -> bytes:
    """Return the first bytes of the index with that number."""
    return MAGIC + VERSION.to_bytes(8, "little") + number


def number_in(head: bytes) -> bytes | None:
    """Return the number of an index from its first bytes; None if the bytes are not the head of a
    readable index."""
    begin = MAGIC + VERSION.to_bytes(8, "little")
    return head[len(begin) :] if len(head) == HEAD_BYTES and head.startswith(begin) else None


def pack_entries(entries: Sequence[Entry], number: bytes) -> bytes:
    """Return the bytes of entries that are to be appended to the index with that number."""
    parts = []
    for kind, name, place in entries:
        whole = _ENTRY.pack(len(name), kind, *place) + name
        parts += [whole, xxhash.xxh3_64_digest(number + whole)]
    return b"".join(parts)


def parse_entries(data: bytes, number: bytes) -> tuple[list[Entry], int]:
    """Return the entries up to the first incomplete or damaged entry, and their size, bytes."""
    entries: list[Entry] = []
    at = 0
    while at + _ENTRY.size <= len(data):
        name_bytes, kind, *place = _ENTRY.unpack_from(data, at)
        end = at + _ENTRY.size + name_bytes
        digest = data[end : end + _DIGEST_BYTES]
        if name_bytes > MOST_NAME_BYTES or len(digest) < _DIGEST_BYTES:
            break
        if xxhash.xxh3_64_digest(number + data[at:end]) != digest or kind not in _KINDS:
            break
        where = Place(*place)
        if where.offset + where.nbytes > MOST_OFFSET:
            break
        entries.append(Entry(Kind(kind), data[at + _ENTRY.size : end], where))
        at = end + _DIGEST_BYTES
    return entries, at


_KINDS = frozenset(Kind)
