"""Zip files whose members are stored: where each lies, if the file is exactly that.

A zip file is read from its end, and leaves much to its reader. Here nothing is left: members are
those that a snapshot has, lie one behind the other from the first byte on, and are followed by the
directory and its end, without comments or anything between. Zip64 is known. Checksums of members
are not looked at: the digests of a snapshot say more.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from .manifest import SnapshotError

MOST_MEMBERS = 1 << 20

_MEMBER = re.compile(rb"manifest\.json|pages/[0-9a-f]{64}")
_FOLDER = b"pages/"
_UTF8 = 0x0800
_STORED = 0
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_ZIP64_EXTRA = 1
_FULL32, _FULL16 = 0xFFFFFFFF, 0xFFFF
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a member's bytes in its file."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Member:
    """Member as the directory tells of it."""

    name: bytes
    flags: int
    method: int
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Directory:
    """Directory of a zip file."""

    offset: int
    end: int
    count: int


def members(fd: int) -> dict[str, Place]:
    """Find the members of a zip file.

    Raises:
        OSError: the disk failed.
        SnapshotError: it is no zip file, or not such a one.
    """
    directory = _directory(fd, os.fstat(fd).st_size)
    found = dict[bytes, _Member]()
    for member in _entries(fd, directory):
        if member.name in found:
            raise _wrong(f"{member.name.decode()} is in it twice")
        found[member.name] = member
    places, end = dict[str, Place](), 0
    for member in sorted(found.values(), key=lambda member: member.offset):
        if member.offset != end:
            raise _wrong("members overlap, or bytes lie between them")
        at = _data_offset(fd, member)
        end = at + member.nbytes
        if end > directory.offset:
            raise _wrong("a member reaches into the directory")
        if member.name != _FOLDER:
            places[member.name.decode()] = Place(at, member.nbytes)
    if end != directory.offset:
        raise _wrong("bytes lie between the members and the directory")
    return places


def _directory(fd: int, size: int) -> _Directory:
    if size < _END.size:
        raise _wrong("it is too short")
    at = size - _END.size
    sign, disk, first, here, count, nbytes, offset, comment = _END.unpack(_read(fd, at, _END.size))
    if sign != b"PK\5\6" or comment:
        raise _wrong("it is cut off, or has something behind its end")
    if disk or first or here != count:
        raise _wrong("it is one of several files")
    if at >= _LOCATOR.size + _END64.size:
        told = _LOCATOR.unpack(_read(fd, at - _LOCATOR.size, _LOCATOR.size))
        if told[0] == b"PK\6\7":
            at -= _LOCATOR.size + _END64.size
            if told[1:] != (0, at, 1):
                raise _wrong("its end is damaged")
            count, nbytes, offset = _end64(_read(fd, at, _END64.size), (count, nbytes, offset))
    if offset + nbytes != at:
        raise _wrong("its directory is not where its end says")
    if count > MOST_MEMBERS or nbytes < count * _ENTRY.size:
        raise _wrong(f"it cannot have {count} members")
    return _Directory(offset, at, count)


def _end64(data: bytes, short: tuple[int, int, int]) -> tuple[int, int, int]:
    """Count, size and offset of a directory from the longer one of its two ends."""
    sign, nbytes, _, _, disk, first, here, *values = _END64.unpack(data)
    count, length, offset = values
    if sign != b"PK\6\6" or nbytes != _END64.size - 12 or disk or first or here != count:
        raise _wrong("its end is damaged")
    for value, other, full in zip(values, short, (_FULL16, _FULL32, _FULL32), strict=True):
        if other not in (full, value):
            raise _wrong("its two ends disagree")
    return count, length, offset


def _entries(fd: int, directory: _Directory) -> Iterator[_Member]:
    """Members in the order of the directory."""
    text = _Text(fd, directory.offset, directory.end)
    for _ in range(directory.count):
        yield _entry(text)
    if text.left:
        raise _wrong("its directory has more in it than members")


def _entry(text: _Text) -> _Member:
    fields = _ENTRY.unpack(text.take(_ENTRY.size))
    sign, _, _, flags, method, _, _, _, stored, nbytes = fields[:10]
    name_bytes, extra_bytes, comment_bytes, disk, _, attributes, offset = fields[10:]
    if sign != b"PK\1\2":
        raise _wrong("its directory is damaged")
    name, extra = text.take(name_bytes), text.take(extra_bytes)
    if _MEMBER.fullmatch(name) is None and name != _FOLDER:
        raise _wrong(f"{name[:100]!r} is no name in a snapshot")
    if flags & ~_UTF8:
        raise _wrong(f"{name.decode()} is encrypted, or written in one go: store it plainly")
    if method != _STORED or (stored != nbytes and _FULL32 not in (stored, nbytes)):
        raise _wrong(f"{name.decode()} is compressed: pack it with zip -0")
    kind = stat.S_IFMT(attributes >> 16)
    if kind not in (0, stat.S_IFDIR if name == _FOLDER else stat.S_IFREG):
        raise _wrong(f"{name.decode()} is no plain file")
    if comment_bytes or disk:
        raise _wrong(f"{name.decode()} has a comment, or lies in another file")
    nbytes, stored, offset = _long(extra, (nbytes, stored, offset))
    if stored != nbytes or (name == _FOLDER and nbytes):
        raise _wrong(f"{name.decode()} has two sizes")
    return _Member(name, flags, method, nbytes, offset)


def _long(extra: bytes, short: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes and offset, of which the extra fields have those that are too long for the entry."""
    wanted = [i for i, value in enumerate(short) if value == _FULL32]
    found, at, seen = list(short), 0, False
    while at < len(extra):
        if at + 4 > len(extra):
            raise _wrong("an extra field is cut off")
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        at += 4
        if at + nbytes > len(extra):
            raise _wrong("an extra field is cut off")
        if kind == _ZIP64_EXTRA:
            if seen or nbytes < 8 * len(wanted):
                raise _wrong("an extra field is damaged")
            seen = True
            values = struct.unpack_from(f"<{len(wanted)}Q", extra, at)
            for i, value in zip(wanted, values, strict=True):
                found[i] = value
        at += nbytes
    if wanted and not seen:
        raise _wrong("a size is missing")
    return tuple(found)


def _data_offset(fd: int, member: _Member) -> int:
    """Offset of a member's bytes: behind its own header, which must say what the directory says."""
    fixed = _read(fd, member.offset, _LOCAL.size)
    sign, _, flags, method, *_, stored, nbytes, name_bytes, extra_bytes = _LOCAL.unpack(fixed)
    at = member.offset + _LOCAL.size
    extra_at = at + name_bytes
    if (sign, flags, method, name_bytes) != (
        b"PK\3\4",
        member.flags,
        member.method,
        len(member.name),
    ) or _read(fd, at, name_bytes) != member.name:
        raise _wrong(f"{member.name.decode()} is not what the directory says")
    told = _long(_read(fd, extra_at, extra_bytes), (nbytes, stored))
    if told != (member.nbytes, member.nbytes):
        raise _wrong(f"{member.name.decode()} has two sizes")
    return int(extra_at + extra_bytes)


class _Text:
    """Bytes of a file, read from ``offset`` to ``end`` in chunks."""

    def __init__(self, fd: int, offset: int, end: int) -> None:
        self._fd, self._offset, self._end = fd, offset, end
        self._chunk, self._at = b"", 0

    @property
    def left(self) -> int:
        """Number of bytes that are left."""
        return self._end - self._offset + len(self._chunk) - self._at

    def take(self, count: int) -> bytes:
        """Read so many bytes.

        Raises:
            SnapshotError: fewer are left.
        """
        if count > self.left:
            raise _wrong("its directory is cut off")
        while len(self._chunk) - self._at < count:
            more = min(_CHUNK, self._end - self._offset)
            self._chunk = self._chunk[self._at :] + _read(self._fd, self._offset, more)
            self._offset, self._at = self._offset + more, 0
        self._at += count
        return self._chunk[self._at - count : self._at]


def _read(fd: int, offset: int, nbytes: int) -> bytes:
    """Read just so many bytes.

    Raises:
        SnapshotError: the file ends before.
    """
    # An offset from the file itself may be larger than the system takes.
    data = os.pread(fd, nbytes, offset) if offset <= os.fstat(fd).st_size else b""
    if len(data) != nbytes:
        raise _wrong("it is cut off")
    return data


def _wrong(why: str) -> SnapshotError:
    return SnapshotError(f"the zip file is no snapshot: {why}")
