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
"""Age at which an unfinished file counts as abandoned, seconds. Writing a file takes less time."""


def open_plain(path: Path, flags: int, *, dir_fd: int | None = None) -> int:
    """Open a plain file, and return its descriptor. Symbolic links are not followed, and the call
    does not block if the path is a pipe.

    Args:
        dir_fd: an open folder that ``path`` is relative to.

    Raises:
        OSError: the file is missing, or is not a plain file.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, FILE_MODE, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENXIO, "not a regular file", str(path))
    os.set_blocking(fd, True)  # only needed to open a pipe
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
    """Open a plain file that belongs to this process's user, so that its contents are trusted.
    Returns its descriptor.

    Raises:
        PermissionError: the file belongs to another user.
        OSError: the file is missing, or is not a plain file.
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
        ValueError: the file has more than ``most`` bytes.
        OSError: as in ``open_own``, or the disk failed.
    """
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"the file is larger than {most} bytes")
        return file.read()


def check_owner(path: Path) -> None:
    """Check that no other user can have created a folder or file.

    Where any user may create names, as in ``/dev/shm`` and ``/tmp``, the path must belong to this
    user or to root. Elsewhere the owner of the parent is trusted. For a link, both the link and its
    target are checked.

    Raises:
        PermissionError: another user may have created the folder or file.
        OSError: the path is missing, or cannot be examined.
    """
    link, there = path.lstat(), path.stat()
    if not path.parent.stat().st_mode & stat.S_IWOTH:
        return
    for owner in (link.st_uid, there.st_uid):
        if owner not in (0, os.geteuid()) and owner != _owner_of_new_files(path.parent):
            raise _foreign(path, owner)


def _owner_of_new_files(folder: Path) -> int | None:
    """Return the user that a file system records as owner of this process's files; None if no file
    can be created. On a network mount, this may be another user than the process's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return None


def _foreign(path: Path, owner: int) -> PermissionError:
    return PermissionError(
        errno.EPERM, f"the path belongs to another user (uid {owner})", str(path)
    )


def write_all(fd: int, parts: Iterable[bytes | memoryview]) -> int:
    """Write all parts in order. Returns the number of bytes.

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
    """Write a file under a temporary name, and rename it to ``path``. A reader finds either the
    complete old file or the complete new one.

    Args:
        beside: temporary path. A file that exists there is removed first. By default, a random name
            next to ``path`` is used, and old temporary files that killed processes left there are
            removed.
        durable: True to make the contents durable before the rename.

    Returns:
        A descriptor of the new file, open for appending.

    Raises:
        OSError: the file could not be written. The old file is unchanged, and no new file is left.
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
            beside.unlink()  # free its space
        raise
    return fd


def _sweep(path: Path) -> None:
    """Remove temporary files of ``path`` that are older than ``LEFT_OVER_S``, because killed
    processes left them. Errors are ignored."""
    unfinished = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}")
    with contextlib.suppress(OSError):
        for one in path.parent.iterdir():
            if unfinished.fullmatch(one.name):
                with contextlib.suppress(OSError):
                    if time.time() - one.lstat().st_mtime > LEFT_OVER_S:
                        one.unlink()
