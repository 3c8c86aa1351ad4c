"""Store folders and segments under a root, distinguished from any other files there.

A store folder has the name of one and holds the lock of one; a segment has the name of one and is a
plain file. Nothing else is counted, read or deleted, and no link is followed. A path that has such
a name but is something else, or cannot be read, is odd: it is skipped and reported.
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
        paths: folders in the order of their names.
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
    """Find the store folders under a root; none if the root is missing or unreadable."""
    found = StoreFolders()
    for fingerprint in _folders(root, FINGERPRINT_NAME, found.odd):
        for folder in _folders(fingerprint, PLACE_NAME, found.odd):
            try:
                mode = (folder / LOCK_NAME).lstat().st_mode
            except FileNotFoundError:
                continue  # being made, or being deleted
            except OSError as error:
                found.odd[folder] = error.strerror or str(error)
                continue
            if stat.S_ISREG(mode):
                found.paths.append(folder)
            else:
                found.odd[folder / LOCK_NAME] = "no plain file"
    return found


def _folders(parent: Path, name: re.Pattern[str], odd: dict[Path, str]) -> Iterator[Path]:
    try:
        with os.scandir(parent) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    except OSError as error:
        odd[parent] = error.strerror or str(error)
        return
    for entry in entries:
        if not name.fullmatch(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield parent / entry.name
        elif entry.is_symlink():
            odd[parent / entry.name] = "a link, which is not followed"


def segment_files(folder: Path) -> SegmentFiles:
    """Find the segments in a store's folder. Those that vanish meanwhile are left out."""
    found = SegmentFiles()
    try:
        with os.scandir(folder) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except FileNotFoundError:
        return found
    except OSError as error:
        found.odd[folder] = error.strerror or str(error)
        return found
    for entry in entries:
        path = folder / entry.name
        if not SEGMENT_NAME.fullmatch(entry.name):
            continue
        if not entry.is_file(follow_symlinks=False):
            found.odd[path] = "no plain file"
        else:
            try:
                found.sizes[path] = path.lstat().st_size
            except FileNotFoundError:
                continue
            except OSError as error:
                found.odd[path] = error.strerror or str(error)
    return found


def begins_like_segment(path: Path) -> bool:
    """True if a file begins like a segment, or like one whose process died before writing it."""
    try:
        with opened(path) as fd:
            start = os.pread(fd, BLOCK, 0)
    except OSError:
        return False
    return start.startswith(SEGMENT_MAGIC) or not any(start)
