"""Plain files in folders that other processes and other users can write to."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700


def open_plain(path: Path, flags: int) -> int:
    """Open a plain file. Follows no link and never blocks.

    Raises:
        OSError: the file is missing, or no plain file.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, FILE_MODE)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENXIO, "no plain file", str(path))
    os.set_blocking(fd, True)  # only the opening of a pipe was not to be waited for
    return fd


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
