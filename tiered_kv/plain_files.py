"""Plain files in folders that other processes and other users can write to."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700
LEFT_OVER_S = 3600.0
"""Age from which on an unfinished file counts as left over, seconds: writing one takes less."""


def open_plain(path: Path, flags: int, *, dir_fd: int | None = None) -> int:
    """Open a plain file. Follows no link and never blocks.

    Args:
        dir_fd: an open folder that ``path`` is relative to.

    Raises:
        OSError: the file is missing, or no plain file.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, FILE_MODE, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENXIO, "no plain file", str(path))
    os.set_blocking(fd, True)  # only the opening of a pipe was not to be waited for
    return fd


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDONLY, *, dir_fd: int | None = None) -> Iterator[int]:
    """Open a plain file, as ``open_plain`` does, and close it at the end of the block."""
    fd = open_plain(path, flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def open_own(path: Path, flags: int) -> int:
    """Open a plain file of this process's user, for contents that are believed.

    Raises:
        PermissionError: it is another user's.
        OSError: the file is missing, or no plain file.
    """
    fd = open_plain(path, flags)
    try:
        owner = os.fstat(fd).st_uid
        if owner != os.geteuid() and owner != _owner_of_new_files(path.parent):
            raise _foreign(path, owner)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_own(path: Path, most: int) -> bytes:
    """Read a whole file of this process's user.

    Raises:
        ValueError: it has more than ``most`` bytes.
        OSError: as for ``open_own``, or the disk failed.
    """
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"it has more than {most} bytes")
        return file.read()


def check_owner(path: Path) -> None:
    """Check that no other user can have put a folder or file there.

    Where any user may create names, as in ``/dev/shm`` and ``/tmp``, what is found must be this
    user's, or root's. Elsewhere whoever owns the parent chose it. A link counts as well as what it
    leads to.

    Raises:
        PermissionError: another user made it.
        OSError: it is missing, or cannot be examined.
    """
    link, there = path.lstat(), path.stat()
    if not path.parent.stat().st_mode & stat.S_IWOTH:
        return
    for owner in (link.st_uid, there.st_uid):
        if owner not in (0, os.geteuid()) and owner != _owner_of_new_files(path.parent):
            raise _foreign(path, owner)


def _owner_of_new_files(folder: Path) -> int | None:
    """The user whom a file system records for files of this process: a network mount may record
    another. None if it takes none."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return None


def _foreign(path: Path, owner: int) -> PermissionError:
    return PermissionError(errno.EPERM, f"it belongs to another user ({owner})", str(path))


def write_all(fd: int, parts: Iterable[bytes | memoryview]) -> int:
    """Write all of these bytes, one part after the other; returns their number.

    Raises:
        OSError: the disk is full, or failed; any part may have been written.
    """
    total = 0
    for part in parts:
        left = memoryview(part).cast("B")
        total += left.nbytes
        while left:
            left = left[os.write(fd, left) :]
    return total


def replace_file(path: Path, data: bytes, *, beside: Path | None = None, durable: bool) -> int:
    """Write a file under another name, which then takes the place of ``path``: a reader finds the
    old file or the new one, whole.

    Args:
        beside: the other name, whose file is removed first; by default one that no other process
            chooses. Then files that killed processes left next to ``path`` are removed.
        durable: make its contents survive a power cut before it takes the place.

    Returns:
        A descriptor of the new file, open for appending.

    Raises:
        OSError: it could not be written; the old file is still there, and no other.
    """
    if beside is None:
        _sweep(path)
        beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    beside.unlink(missing_ok=True)
    fd = open_plain(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
    try:
        write_all(fd, [data])
        if durable:
            os.fdatasync(fd)
        beside.replace(path)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(OSError):
            beside.unlink()  # the space that it takes
        raise
    return fd


def _sweep(path: Path) -> None:
    """Remove what killed processes left of new contents of ``path``. Never fails."""
    unfinished = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}")
    with contextlib.suppress(OSError):
        for one in path.parent.iterdir():
            if unfinished.fullmatch(one.name):
                with contextlib.suppress(OSError):
                    if time.time() - one.lstat().st_mtime > LEFT_OVER_S:
                        one.unlink()
