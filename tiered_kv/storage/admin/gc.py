"""Deletion of stores that no process has open, and of leftovers of dead processes.

Only files that a store creates are deleted, by name. A folder with any other file in it stays. The
store's lock is held while its pages are deleted, and the root's lock while its folder is deleted.
So a process that starts meanwhile either finds the store busy or creates it again.
"""

from __future__ import annotations

import errno
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.file_lock import short_owner
from tiered_kv.storage.disk.files import RealFiles
from tiered_kv.storage.store.folders import FINGERPRINT_NAME, PLACE_NAME, SEGMENT_NAME
from tiered_kv.storage.store.locks import LOCK_NAME, StoreBusyError, StoreLock, root_locked

from .inventory import StoreInfo

LEFTOVER_S = 60.0
"""Age at which probe files and empty folders count as abandoned, seconds. A process that opens a
store needs such files and folders for only 1 or 2 s."""

_CLOCK_SET = 365 * 86400.0
_PROBE_NAME = re.compile(r"\.probe-[0-9]+")


@dataclass(frozen=True, slots=True)
class Selection:
    """Criteria of the stores to delete. A store must meet all of them.

    Attributes:
        unused_s: minimum time since the store's last use, seconds; 0 for any.
        fingerprint: first hexadecimal digits of the store's fingerprint; empty for any.
    """

    unused_s: float = 0.0
    fingerprint: str = ""

    def takes(self, store: StoreInfo, now: float) -> bool:
        """True if the store meets every criterion.

        Args:
            now: seconds since 1970.
        """
        known = store.last_use >= _CLOCK_SET  # else written with an unset clock
        unused = not self.unused_s or (known and now - store.last_use >= self.unused_s)
        return unused and store.fingerprint.hex().startswith(self.fingerprint)


def holder_of(store: StoreInfo) -> str:
    """Return a short description of the process that has a store open, from the store's lock; an
    empty text if no process has the store open."""
    return short_owner(store.holder) if store.locked else ""


def delete_store(store: StoreInfo) -> None:
    """Delete a store's segments, its lock and its folder, and the folder of its fingerprint if no
    store is left there. Does nothing if the store no longer exists.

    Raises:
        StoreBusyError: a process has the store open; nothing was deleted.
        OSError: the disk failed, or the folder contains other files; what is left is still a valid
            store.
    """
    files = RealFiles()
    try:
        lock = StoreLock(store.path)
    except FileNotFoundError:
        return  # another process deleted it
    except StoreBusyError as error:
        who = holder_of(store) or "a process that has just opened it"
        raise StoreBusyError(f"{store.path} is in use by {who}") from error
    try:
        for name in files.names(store.path):
            if name == "probe" or SEGMENT_NAME.fullmatch(name):
                files.unlink(store.path / name)
        with root_locked(store.path.parent.parent):
            if foreign := {path.name for path in store.path.iterdir()} - {LOCK_NAME}:
                raise OSError(
                    errno.ENOTEMPTY,
                    f"the folder contains {min(foreign)}, which is not part of a store",
                    str(store.path),
                )
            (store.path / LOCK_NAME).unlink()
            store.path.rmdir()
            with suppress(OSError):  # other ranks have stores in the same folder
                store.path.parent.rmdir()
    finally:
        lock.release()


def leftovers(root: Path) -> list[Path]:
    """Return the probe files and the folders without a store under a root, except recent ones. A
    folder follows the folders that it contains."""
    found = []
    old = time.time() - LEFTOVER_S
    for path in sorted(root.iterdir()):
        with suppress(OSError):  # the path has vanished, or ``find_stores`` reports it
            here = path.lstat()
            if stat.S_ISDIR(here.st_mode) and FINGERPRINT_NAME.fullmatch(path.name):
                found += list(_empty_folders(path, old))
            elif (
                stat.S_ISREG(here.st_mode)
                and _PROBE_NAME.fullmatch(path.name)
                and here.st_mtime < old
            ):
                found.append(path)
    return found


def _empty_folders(fingerprint: Path, old: float) -> Iterator[Path]:
    inside = list(fingerprint.iterdir())
    empty = [path for path in inside if PLACE_NAME.fullmatch(path.name) and _is_empty(path, old)]
    yield from empty
    if len(empty) == len(inside) and (empty or fingerprint.stat().st_mtime < old):
        yield fingerprint


def _is_empty(path: Path, old: float) -> bool:
    here = path.lstat()
    return stat.S_ISDIR(here.st_mode) and here.st_mtime < old and not any(path.iterdir())


def delete_leftover(root: Path, path: Path) -> None:
    """Delete a leftover, if it still exists.

    Raises:
        OSError: the leftover could not be deleted, or is a folder that is no longer empty.
    """
    with root_locked(root), suppress(FileNotFoundError):
        path.rmdir() if path.is_dir() else path.unlink()
