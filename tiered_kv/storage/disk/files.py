"""The narrow waist between the SSD store and the operating system.

Everything the store does to its files goes through a ``FileLayer``, so that a test can
put one in between that fails, tears or forgets. Offsets, lengths and the addresses of
buffers are multiples of ``BLOCK``: what O_DIRECT asks for.

Every method may be called from any thread, blocks on the disk, and raises ``OSError``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Protocol

BLOCK = 4096
"""Alignment of everything on disk, in bytes."""

Buffers = Sequence[memoryview]
"""Memory that is one piece in a file; each has whole blocks."""

_MOST_BUFFERS = 1024
"""Of one system call."""

FILE_MODE = 0o600
FOLDER_MODE = 0o700


class Access(Enum):
    """What a file is opened for."""

    READ = os.O_RDONLY
    WRITE = os.O_RDWR
    CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL


class FileLayer(Protocol):
    """What the store asks of an operating system."""

    def make_folders(self, folder: Path) -> None:
        """The folder and its parents, if missing, for their owner alone. Those that were made
        outlive a power cut."""

    def names(self, folder: Path) -> list[str]:
        """Names of the plain files in the folder, in any order: no link, pipe or device."""

    def free(self, folder: Path) -> int:
        """Bytes that the disk has left for files in the folder; 0 if it takes no more files."""

    def open(self, path: Path, access: Access, *, direct: bool) -> int:
        """A descriptor of a plain file, which no link led to; ``direct`` bypasses the page cache
        (EINVAL where that cannot be)."""

    def close(self, fd: int) -> None: ...

    def size(self, fd: int) -> int:
        """Bytes of the file."""

    def preallocate(self, fd: int, nbytes: int) -> None:
        """Make the file that long, of zeros, with its room on the disk reserved if possible."""

    def truncate(self, fd: int, nbytes: int) -> None: ...

    def pread(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Bytes read into the buffers, one after the other: perhaps fewer than they hold, 0 at
        the end."""

    def pwrite(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Bytes written from the start of the buffers: perhaps fewer than they hold."""

    def fdatasync(self, fd: int) -> None:
        """What was written, and the length of the file, outlive a power cut."""

    def sync_folder(self, folder: Path) -> None:
        """Files created in and removed from the folder stay so after a power cut."""

    def unlink(self, path: Path) -> None: ...

    def uncache(self, fd: int, offset: int, nbytes: int) -> None:
        """The page cache need not keep these bytes. Never fails."""


def open_plain(path: Path, flags: int) -> int:
    """A descriptor of a plain file. Follows no link, and waits for nobody.

    Raises:
        OSError: there is none, or something of that name that is no plain file.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, FILE_MODE)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENXIO, "no plain file", str(path))
    os.set_blocking(fd, True)  # only the opening of a pipe was not to be waited for
    return fd


class RealFiles:
    """The operating system itself."""

    def make_folders(self, folder: Path) -> None:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=FOLDER_MODE, exist_ok=True)
            with contextlib.suppress(PermissionError):  # one may write where one may not read
                self.sync_folder(path.parent)

    def names(self, folder: Path) -> list[str]:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]

    def free(self, folder: Path) -> int:
        disk = os.statvfs(folder)
        if not disk.f_blocks:  # a file system that does not say
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
    """Fill the buffers, in as many reads as it takes.

    Raises:
        OSError: the disk failed, or the file ends before the buffers do.
    """
    _transfer(files.pread, fd, buffers, offset)


def write_exactly(files: FileLayer, fd: int, buffers: Buffers, offset: int) -> None:
    """Write all of the buffers, in as many writes as it takes.

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
        usable = count // BLOCK * BLOCK  # what is left must begin at a block
        if usable <= 0:
            raise OSError(errno.EIO, "the file ended, or the disk took less than a block")
        buffers, offset = _behind(buffers, usable), offset + usable


def _behind(buffers: Buffers, nbytes: int) -> Buffers:
    """What is left of the buffers behind their first bytes."""
    for i, buffer in enumerate(buffers):
        if nbytes < len(buffer):
            return [buffer[nbytes:], *buffers[i + 1 :]]
        nbytes -= len(buffer)
    return []


def takes_direct(files: FileLayer, known: Path, block: memoryview) -> bool:
    """Whether files can be written and read past the page cache in the folder of a file.

    Some file systems refuse at open, some at the first write. A disk that is full takes no
    file to try it with: there, reading must tell.

    Args:
        known: a file that is there.
        block: ``BLOCK`` aligned bytes to try it with.
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
