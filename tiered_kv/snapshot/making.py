"""Folders and files that are being made, and what is left of those whose maker was killed.

``.making-<16 hex>`` is a folder with a file ``lock``, or a plain file. Its maker holds the lock, or
the file itself, with flock, and gives it another name when it is whole. One that nobody holds is
swept by the next maker.

A folder has no lock in its first moment, and then either its maker takes the lock or a sweeper
does. A maker that comes second begins anew.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from pathlib import Path

from tiered_kv.storage.disk.files import open_plain
from tiered_kv.storage.store.locks import try_lock

from .snapshot_files import make_folder

LOCK = "lock"

_PREFIX = ".making-"
_NAME = re.compile(r"\.making-[0-9a-f]{16}")
_TRIES = 20


class Making:
    """A folder or file of ours that is being made.

    Args:
        parent: folder in which it will have its name.
        folder: True for a folder.

    Attributes:
        path: place of it for now.
        fd: open file that is locked: the file itself, or the lock of the folder.

    Raises:
        OSError: the parent cannot be written.
    """

    def __init__(self, parent: Path, *, folder: bool) -> None:
        self._folder = folder
        for _ in range(_TRIES):
            self.path = parent / f"{_PREFIX}{secrets.token_hex(8)}"
            if folder:
                make_folder(self.path)
            with contextlib.suppress(FileNotFoundError):  # a sweeper was faster
                self.fd = _locked(_lock_of(self.path, folder), os.O_CREAT)
                if self.fd >= 0:
                    return
        raise OSError(errno.EBUSY, "others remove what is made there", str(parent))

    def publish(self, path: Path) -> None:
        """Give it its name, which nothing may have.

        Raises:
            OSError: something has it, or the disk failed; it has its old name then.
        """
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "it is there already", str(path))
        # A folder takes the place of no other that holds anything, and a link never does.
        if self._folder:
            os.rename(self.path, path)  # noqa: PTH104
            with contextlib.suppress(OSError):
                (path / LOCK).unlink()
        else:
            try:
                os.link(self.path, path)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                os.rename(self.path, path)  # noqa: PTH104

    def release(self) -> None:
        """Remove what has no name yet, and release the lock. Idempotent. Never fails."""
        if self.fd < 0:
            return
        with contextlib.suppress(OSError):
            _remove(self.path)
        os.close(self.fd)
        self.fd = -1


def sweep(parent: Path) -> None:
    """Remove what killed makers left in a folder. Never fails."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):  # noqa: PTH208
            if _NAME.fullmatch(name):
                with contextlib.suppress(OSError):
                    _sweep_one(parent / name)


def _sweep_one(path: Path) -> None:
    if path.is_symlink():
        return
    folder = path.is_dir()
    fd = _locked(_lock_of(path, folder), os.O_CREAT if folder else 0)
    if fd >= 0:
        try:
            _remove(path)
        finally:
            os.close(fd)


def _locked(path: Path, create: int) -> int:
    """Open and lock a file; -1 if somebody else has it, or it has no name any more.

    Raises:
        OSError: it cannot be opened, or the file system has no locks.
    """
    fd = open_plain(path, os.O_RDWR | create)
    held = False
    try:
        held = try_lock(fd) and os.fstat(fd).st_nlink > 0
    finally:
        if not held:
            os.close(fd)
    return fd if held else -1


def _lock_of(path: Path, folder: bool) -> Path:
    return path / LOCK if folder else path


def _remove(path: Path) -> None:
    """Remove a folder, its lock last, or a file."""
    try:
        names = os.listdir(path)  # noqa: PTH208
    except NotADirectoryError:
        path.unlink()
        return
    for name in sorted(names, key=lambda name: name == LOCK):
        one = path / name
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one)
        else:
            one.unlink(missing_ok=True)
    path.rmdir()
