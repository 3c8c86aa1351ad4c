"""The narrow interface between the SSD store and the operating system.

The store accesses its files only through a ``FileLayer``, so that a test can insert an
implementation that fails, or that tears or loses writes. Offsets, lengths and buffer addresses are
multiples of ``BLOCK``, as O_DIRECT requires.

Every method may be called from any thread, blocks on the disk, and raises ``OSError``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Protocol

from tiered_kv.plain_files import FOLDER_MODE, open_plain

BLOCK = 4096
"""Alignment of everything on disk, bytes."""

Buffers = Sequence[memoryview]
"""Memory for one contiguous piece of a file; each buffer consists of whole blocks."""

_MOST_BUFFERS = 1024
"""Maximum number of buffers per system call."""


class Access(Enum):
    """Purpose for which a file is opened."""

    READ = os.O_RDONLY
    WRITE = os.O_RDWR
    CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL


class FileLayer(Protocol):
    """Operations that the store needs from an operating system."""

    def make_folders(self, folder: Path) -> None:
        """Create the folder and its parents, if missing, accessible only to their owner. New
        folders survive a power failure."""

    def names(self, folder: Path) -> list[str]:
        """Return the names of the plain files in the folder, in any order. Links, pipes and devices
        are left out."""

    def free(self, folder: Path) -> int:
        """Return the number of bytes that are free for files in the folder; 0 if the disk accepts
        no more files."""

    def open(self, path: Path, access: Access, *, direct: bool) -> int:
        """Open a plain file, following no link. ``direct`` bypasses the page cache (EINVAL where
        that is impossible)."""

    def close(self, fd: int) -> None: ...

    def size(self, fd: int) -> int:
        """Return the size of a file, bytes."""

    def preallocate(self, fd: int, nbytes: int) -> None:
        """Extend the file to ``nbytes`` bytes with zeros, and reserve its disk space if
        possible."""

    def truncate(self, fd: int, nbytes: int) -> None: ...

    def pread(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Read into the buffers in order. Returns the number of bytes read, which may be smaller
        than requested, and is 0 at the end of the file."""

    def pwrite(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Write the buffers in order. Returns the number of bytes written, which may be smaller
        than requested."""

    def fdatasync(self, fd: int) -> None:
        """Make the file's contents and length durable."""

    def sync_folder(self, folder: Path) -> None:
        """Make the creation and removal of files in the folder durable."""

    def unlink(self, path: Path) -> None: ...

    def uncache(self, fd: int, offset: int, nbytes: int) -> None:
        """Allow the page cache to drop these bytes. Never fails."""


class RealFiles:
    """The file layer of the operating system."""

    def make_folders(self, folder: Path) -> None:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=FOLDER_MODE, exist_ok=True)
            with contextlib.suppress(PermissionError):  # the parent may not be readable
                self.sync_folder(path.parent)

    def names(self, folder: Path) -> list[str]:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]

    def free(self, folder: Path) -> int:
        disk = os.statvfs(folder)
        if not disk.f_blocks:  # a file system that does not report its size
            return sys.maxsize
        if disk.f_files and not disk.f_favail:
            return 0
        return disk.f_bavail * disk.f_frsize

    def open(self, path: Path, access: Access, *, direct: bool) -> int:
        return open_plain(path, access.value | (os.O_DIRECT if direct else 0))

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def preallocate(self, fd: int, nbytes: int) -> None:
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            os.ftruncate(fd, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def pread(self, fd: int, buffers: Buffers, offset: int) -> int:
        return os.preadv(fd, buffers[:_MOST_BUFFERS], offset)

    def pwrite(self, fd: int, buffers: Buffers, offset: int) -> int:
        return os.pwritev(fd, buffers[:_MOST_BUFFERS], offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_folder(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def uncache(self, fd: int, offset: int, nbytes: int) -> None:
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def read_exactly(files: FileLayer, fd: int, buffers: Buffers, offset: int) -> None:
    """Fill the buffers, in as many reads as needed.

    Raises:
        OSError: the disk failed, or the file ends before the buffers do.
    """
    _transfer(files.pread, fd, buffers, offset)


def write_exactly(files: FileLayer, fd: int, buffers: Buffers, offset: int) -> None:
    """Write all of the buffers, in as many writes as needed.

    Raises:
        OSError: the disk failed or is full; any part may have been written.
    """
    _transfer(files.pwrite, fd, buffers, offset)


def _transfer(
    transfer: Callable[[int, Buffers, int], int], fd: int, buffers: Buffers, offset: int
) -> None:
    while left := sum(map(len, buffers)):
        count = transfer(fd, buffers, offset)
        if count == left:
            return
        usable = count // BLOCK * BLOCK  # the rest must start at a block
        if usable <= 0:
            raise OSError(
                errno.EIO, "the file ended early, or the disk transferred less than a block"
            )
        buffers, offset = _behind(buffers, usable), offset + usable


def _behind(buffers: Buffers, nbytes: int) -> Buffers:
    """Return the buffers without their first ``nbytes`` bytes."""
    for i, buffer in enumerate(buffers):
        if nbytes < len(buffer):
            return [buffer[nbytes:], *buffers[i + 1 :]]
        nbytes -= len(buffer)
    return []


def takes_direct(files: FileLayer, known: Path, block: memoryview) -> bool:
    """True if direct I/O works in the folder of a file.

    Some file systems refuse direct I/O at open, others at the first write. On a full disk no test
    file can be created, so only reading is tested.

    Args:
        known: an existing file.
        block: ``BLOCK`` aligned bytes for the test.
    """
    path = known.with_name("probe")
    try:
        with contextlib.suppress(FileNotFoundError):
            files.unlink(path)
        fd = files.open(path, Access.CREATE, direct=True)
        try:
            files.pwrite(fd, [block], 0)
            files.pread(fd, [block], 0)
        finally:
            files.close(fd)
    except OSError as error:
        refused = error.errno in (errno.EINVAL, errno.EOPNOTSUPP)
        return not refused and _reads_direct(files, known, block)
    finally:
        with contextlib.suppress(OSError):
            files.unlink(path)
    return True


def _reads_direct(files: FileLayer, known: Path, block: memoryview) -> bool:
    try:
        fd = files.open(known, Access.READ, direct=True)
        try:
            files.pread(fd, [block], 0)
        finally:
            files.close(fd)
    except OSError:
        return False
    return True
