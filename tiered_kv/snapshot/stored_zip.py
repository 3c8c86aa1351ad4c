"""Zip files with uncompressed members: finds the members, and rejects all other zip files.

``zipfile`` reads the directory and accepts nearly any file. Here, all members must belong to a
snapshot, be contiguous from the first byte, and be followed by the directory and its end, without
comments or gaps. Checksums of members are not verified, because the digests of a snapshot are
stronger.
"""

from __future__ import annotations

import io
import os
import re
import stat
import struct
import zipfile
from typing import NamedTuple

from .manifest import SnapshotError

MOST_MEMBERS = 1 << 20
MOST_DIRECTORY_BYTES = 192 * MOST_MEMBERS
"""Longest directory, bytes: enough for ``MOST_MEMBERS`` members with the extra fields of common
programs."""
PAGE_ENTRY_BYTES = 46 + 70
"""Minimum size of a page's entry in the directory, with its name, bytes."""
OTHER_ENTRIES = 16
"""Number of members that the directory may have in addition to the number of pages that fit into
it. The manifest and the folder have shorter names, and a field of an entry may look like the start
of another entry."""

_MEMBER = re.compile(r"manifest\.json|pages/[0-9a-f]{64}")
_FOLDER = "pages/"
_UTF8 = 0x0800
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_END = struct.Struct("<4sHHHHIIH")
_FULL32, _FULL16 = 0xFFFFFFFF, 0xFFFF


class ZipEntry(NamedTuple):
    """Location of a member's bytes in the zip file."""

    offset: int
    nbytes: int


def members(fd: int) -> dict[str, ZipEntry]:
    """Return the offset and size of each member of a zip file, by name.

    Raises:
        OSError: the disk failed.
        SnapshotError: the file is not a zip file, or not a snapshot.
    """
    infos, directory = _directory(fd)
    if len({info.orig_filename for info in infos}) != len(infos):
        raise _wrong("the file contains a duplicate member")
    found, end = dict[str, ZipEntry](), 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        name = info.orig_filename
        _check(info, name)
        if info.header_offset != end:
            raise _wrong("members overlap, or there are gaps between them")
        at = _data_offset(fd, info)
        end = at + info.file_size
        if end > directory:
            raise _wrong("a member overlaps the zip directory")
        found[name] = ZipEntry(at, info.file_size)
    if end != directory:
        raise _wrong("there are bytes between the members and the zip directory")
    found.pop(_FOLDER, None)
    return found


class _Bounded(io.FileIO):
    """A zip file whose reads limit the size of the zip directory and the number of its members
    before they are parsed, because a parsed member takes several times the memory of its directory
    entry."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MOST_DIRECTORY_BYTES:
            raise _wrong(f"the zip directory has {size} bytes, which is too large")
        data = super().read(size) or b""
        most = min(MOST_MEMBERS, len(data) // PAGE_ENTRY_BYTES + OTHER_ENTRIES)
        if data.count(b"PK\1\2") > most:
            raise _wrong(f"the zip directory of {len(data)} bytes has more than {most} members")
        return data


def _directory(fd: int) -> tuple[list[zipfile.ZipInfo], int]:
    """Return the members as described by the directory, and the offset of the directory."""
    try:
        with _Bounded(fd, closefd=False) as file, zipfile.ZipFile(file) as archive:
            infos, offset = archive.infolist(), archive.start_dir
            file.seek(-_END.size, os.SEEK_END)
            sign, disk, first, here, count, _, _, comment = _END.unpack(file.read(_END.size))
    except (OSError, SnapshotError):
        raise
    except Exception as error:
        # BadZipFile by contract, but these bytes are untrusted.
        raise _wrong(str(error)) from error
    if sign != b"PK\5\6" or comment:
        raise _wrong("the file is truncated, or has a comment or other data at its end")
    if disk or first or here != count or count not in (len(infos), _FULL16):
        raise _wrong("the file is one part of a multi-part archive, or members are missing")
    return infos, offset


def _check(info: zipfile.ZipInfo, name: str) -> None:
    if _MEMBER.fullmatch(name) is None and name != _FOLDER:
        raise _wrong(f"{name[:100]!r} is not a file name that snapshots use")
    if info.flag_bits & ~_UTF8:
        raise _wrong(f"{name} is encrypted or streamed: pack it with zip -0")
    if info.compress_type != zipfile.ZIP_STORED:
        raise _wrong(f"{name} is compressed: pack it with zip -0")
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFDIR if name == _FOLDER else stat.S_IFREG):
        raise _wrong(f"{name} is not a regular file")
    if info.comment or info.volume:
        raise _wrong(f"{name} has a comment, or is stored in another part of the archive")
    if info.compress_size != info.file_size or (name == _FOLDER and info.file_size):
        raise _wrong(f"the zip directory has conflicting sizes for {name}")


def _data_offset(fd: int, info: zipfile.ZipInfo) -> int:
    """Return the offset of a member's data, after checking its header against the directory."""
    name = info.orig_filename.encode("ascii")
    data = os.pread(fd, _LOCAL.size + len(name), info.header_offset)
    if len(data) != _LOCAL.size + len(name):
        raise _wrong("the file is truncated")
    sign, _, flags, method, *_, stored, nbytes, name_bytes, extra_bytes = _LOCAL.unpack_from(data)
    theirs = (sign, flags, method, name_bytes, data[_LOCAL.size :])
    if theirs != (b"PK\3\4", info.flag_bits, info.compress_type, len(name), name):
        raise _wrong(f"the header of {info.orig_filename} does not match the zip directory")
    if not {stored, nbytes} <= {info.file_size, _FULL32}:
        raise _wrong(
            f"the header of {info.orig_filename} and the zip directory have conflicting sizes"
        )
    return int(info.header_offset + _LOCAL.size + name_bytes + extra_bytes)


def _wrong(why: str) -> SnapshotError:
    return SnapshotError(f"the zip file is not a snapshot: {why}")
