"""Store folders and segments under a root, distinguished from any other files there.

A store folder has a store's name and contains a store's lock. A segment has a segment's name and is
a plain file. Nothing else is counted, read or deleted, and no link is followed. A path with
such a name that is something else, or cannot be read, is called odd. It is skipped and reported.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tiered_kv.plain_files import opened
from tiered_kv.storage.disk.files import BLOCK
from tiered_kv.storage.segment.format import SEGMENT_MAGIC

from .locks import LOCK_NAME

SEGMENT_SUFFIX = ".seg"
FINGERPRINT_NAME = re.compile(r"[0-9a-f]{32}")
PLACE_NAME = re.compile(r"[0-9]+-[0-9]+")
SEGMENT_NAME = re.compile(r"[0-9]{8}\.seg")


@dataclass(frozen=True, slots=True)
class StoreFolders:
    """The store folders under a root.

    Attributes:
        paths: folders, sorted by name.
        odd: reasons for skipped paths, by path.
    """

    paths: list[Path] = field(default_factory=list)
    odd: dict[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SegmentFiles:
    """The segments in a store's folder.

    Attributes:
        sizes: sizes in bytes, by path, oldest first.
        odd: reasons for skipped paths, by path.
    """

    sizes: dict[Path, int] = field(default_factory=dict)
    odd: dict[Path, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Total size of the segments, bytes."""
        return sum(self.sizes.values())


def store_folders(root: Path) -> StoreFolders:
    """Find the store folders under a root. The result has no folders if the root is missing or
    unreadable."""
    found = StoreFolders()
    for fingerprint in _folders(root, FINGERPRINT_NAME, found.odd):
        for folder in _folders(fingerprint, PLACE_NAME, found.odd):
            # A folder without a lock is being created or deleted.
            if _plain_file(folder / LOCK_NAME, found.odd) is not None:
                found.paths.append(folder)
    return found


def segment_files(folder: Path) -> SegmentFiles:
    """Find the segments in a store's folder. Segments that vanish meanwhile are left out."""
    found = SegmentFiles()
    for entry in _entries(folder, SEGMENT_NAME, found.odd):
        if (status := _plain_file(folder / entry.name, found.odd)) is not None:
            found.sizes[folder / entry.name] = status.st_size
    return found


def _folders(parent: Path, name: re.Pattern[str], odd: dict[Path, str]) -> Iterator[Path]:
    for entry in _entries(parent, name, odd):
        if entry.is_dir(follow_symlinks=False):
            yield parent / entry.name
        elif entry.is_symlink():
            odd[parent / entry.name] = "a link, which is not followed"


def _entries(folder: Path, name: re.Pattern[str], odd: dict[Path, str]) -> list[os.DirEntry[str]]:
    """Return the entries of a folder whose names match, sorted by name. The result is empty if the
    folder is missing, or if it cannot be read, which is recorded in ``odd``."""
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if name.fullmatch(entry.name)]
            return sorted(found, key=lambda entry: entry.name)
    except FileNotFoundError:
        pass
    except OSError as error:
        odd[folder] = error.strerror or str(error)
    return []


def _plain_file(path: Path, odd: dict[Path, str]) -> os.stat_result | None:
    """Return the status of a plain file; None if the path is missing, or odd."""
    try:
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            return status
        odd[path] = "not a regular file"
    except FileNotFoundError:
        pass
    except OSError as error:
        odd[path] = error.strerror or str(error)
    return None


def begins_like_segment(path: Path) -> bool:
    """True if a file starts like a segment, or was created by a process that died before writing.
    False if the file cannot be read."""
    try:
        with opened(path) as fd:
            start = os.pread(fd, BLOCK, 0)
    except OSError:
        return False
    return start.startswith(SEGMENT_MAGIC) or not any(start)
