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
from enum import Enum
from pathlib import Path
from typing import Protocol

BLOCK = 4096
"""Alignment of everything on disk, in bytes."""

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
        """The folder and its parents, if missing, for their owner alone."""

    def names(self, folder: Path) -> list[str]:
        """Names in the folder, in any order."""

    def open(self, path: Path, access: Access, *, direct: bool) -> int:
        """A descriptor; ``direct`` bypasses the page cache (EINVAL where that cannot be)."""

    def close(self, fd: int) -> None: ...

    def size(self, fd: int) -> int:
        """Bytes of the file."""

    def preallocate(self, fd: int, nbytes: int) -> None:
        """Make the file that long, of zeros, with its room on the disk reserved if possible."""

    def truncate(self, fd: int, nbytes: int) -> None: ...

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Bytes read into the start of the buffer: perhaps fewer than asked for, 0 at the end."""

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Bytes written from the start of the buffer: perhaps fewer than asked for."""

    def fdatasync(self, fd: int) -> None:
        """What was written, and the length of the file, outlive a power cut."""

    def sync_folder(self, folder: Path) -> None:
        """Files created in and removed from the folder stay so after a power cut."""

    def unlink(self, path: Path) -> None: ...

    def uncache(self, fd: int, offset: int, nbytes: int) -> None:
        """The page cache need not keep these bytes. Never fails."""


class RealFiles:
    """The operating system itself."""

    def make_folders(self, folder: Path) -> None:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=FOLDER_MODE, exist_ok=True)

    def names(self, folder: Path) -> list[str]:
        return os.listdir(folder)  # noqa: PTH208 - names are wanted, not paths

    def open(self, path: Path, access: Access, *, direct: bool) -> int:
        flags = access.value | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        return os.open(path, flags, FILE_MODE)

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

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.pwritev(fd, [buffer], offset)

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


def read_exactly(files: FileLayer, fd: int, buffer: memoryview, offset: int) -> None:
    """Fill the buffer, in as many reads as it takes.

    Raises:
        OSError: the disk failed, or the file ends before the buffer does.
    """
    done = 0
    while done < len(buffer):
        done += _whole_blocks(files.pread(fd, buffer[done:], offset + done), len(buffer) - done)


def write_exactly(files: FileLayer, fd: int, buffer: memoryview, offset: int) -> None:
    """Write the whole buffer, in as many writes as it takes.

    Raises:
        OSError: the disk failed or is full; any part may have been written.
    """
    done = 0
    while done < len(buffer):
        done += _whole_blocks(files.pwrite(fd, buffer[done:], offset + done), len(buffer) - done)


def _whole_blocks(count: int, wanted: int) -> int:
    """How far a transfer got that may have been short; what is left must begin at a block."""
    usable = count if count == wanted else count // BLOCK * BLOCK
    if usable <= 0:
        raise OSError(errno.EIO, "the file ended, or the disk took less than a block")
    return usable


def takes_direct(files: FileLayer, folder: Path, block: memoryview) -> bool:
    """Whether files of the folder can be written and read past the page cache.

    Some file systems refuse at open, some at the first write. Other errors (a full disk)
    say nothing about it and count as yes.

    Args:
        block: ``BLOCK`` aligned bytes to try it with.
    """
    path = folder / "probe"
    try:
        with contextlib.suppress(FileNotFoundError):
            files.unlink(path)
        fd = files.open(path, Access.CREATE, direct=True)
        try:
            files.pwrite(fd, block, 0)
            files.pread(fd, block, 0)
        finally:
            files.close(fd)
    except OSError as error:
        return error.errno not in (errno.EINVAL, errno.EOPNOTSUPP)
    finally:
        with contextlib.suppress(OSError):
            files.unlink(path)
    return True
