"""Index of a writer's folder: where each value lies. It is added to, and never changed.

    | bytes of the head | content |
    |---|---|
    | 8 | magic ``tkvindx`` and a zero |
    | 8 | version |
    | 16 | the index's number, drawn when it was begun |

    | bytes of an entry | content |
    |---|---|
    | 2, 2 | length of the name; kind |
    | 4 | number of the pack |
    | 8, 8 | where the value begins in it, and its length |
    | … | name |
    | 8 | xxh3-64 of the index's number and all of the entry before it |

Integers are little-endian. An entry that is not whole may be on its way: what follows is not read.
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
"""End of the last byte that a place may have: no file is as long, and the system takes no more."""


class Kind(IntEnum):
    """News that an entry brings."""

    VALUE = 1
    """A value was added."""
    DELETED = 2
    """The value of that name counts no more."""
    PACK_GONE = 3
    """A pack was deleted, with all of its values."""


class Place(NamedTuple):
    """Part of a pack, in bytes."""

    pack: int
    offset: int
    nbytes: int


class Entry(NamedTuple):
    """One piece of news.

    Attributes:
        name: empty if it is about a pack.
    """

    kind: Kind
    name: bytes
    place: Place


def head_of(number: bytes) -> bytes:
    """First bytes of the index of that number."""
    return MAGIC + VERSION.to_bytes(8, "little") + number


def number_in(head: bytes) -> bytes | None:
    """The index's number; None if this is the head of none that can be read here."""
    begin = MAGIC + VERSION.to_bytes(8, "little")
    return head[len(begin) :] if len(head) == HEAD_BYTES and head.startswith(begin) else None


def pack_entries(entries: Sequence[Entry], number: bytes) -> bytes:
    """Bytes of entries, for the end of the index of that number."""
    parts = []
    for kind, name, place in entries:
        whole = _ENTRY.pack(len(name), kind, *place) + name
        parts += [whole, xxhash.xxh3_64_digest(number + whole)]
    return b"".join(parts)


def parse_entries(data: bytes, number: bytes) -> tuple[list[Entry], int]:
    """Entries up to the first that is not whole, and the bytes that they take."""
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
