"""Memory files in a folder: found and described without mapping them.

A memory file is recognized by its name and its magic. Nothing else is read, and no link is
followed. A path with such a name that is something else, or cannot be read, is called odd. It is
skipped and reported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tiered_kv.errors import ConfigError
from tiered_kv.file_lock import is_locked, read_owner
from tiered_kv.plain_files import opened
from tiered_kv.storage.disk.files import BLOCK, RealFiles, read_exactly
from tiered_kv.storage.segment.format import FormatError

from .memory_format import ENTRY_BYTES, OWNER_AT, OWNER_BYTES, FileHeader, ForeignError
from .opening import FILE_NAME, SETTING, header_of
from .slot_table import SlotTable


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """A memory file.

    Attributes:
        nbytes: size of the file, bytes.
        locked: True if a process has the file open.
        owner: self-description of that process, or of the last process; empty if unknown.
        header: header of the file; None if the header is unusable.
        damage: reason why there is no usable header; empty if the header is usable.
        pages: number of pages in valid slots, compressed pages included.
        torn: number of slots with torn headers; 0 for a file in use, which changes while it is
            read.
        newest: time of the newest page, nanoseconds since 1970; 0 without pages.
    """

    path: Path
    nbytes: int
    locked: bool
    owner: Mapping[str, object]
    header: FileHeader | None
    damage: str = ""
    pages: int = 0
    torn: int = 0
    newest: int = 0


@dataclass(frozen=True, slots=True)
class MemoryListing:
    """The memory files in a folder.

    Attributes:
        files: files, sorted by name.
        odd: reasons for skipped paths, by path.
    """

    files: list[MemoryFile] = field(default_factory=list)
    odd: dict[Path, str] = field(default_factory=dict)


def list_memory(folder: Path) -> MemoryListing:
    """Return the memory files in a folder, and the paths that were skipped.

    Raises:
        ConfigError: the path is not a folder.
        OSError: the folder cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: use the value of {SETTING}")
    found = MemoryListing()
    for path in sorted(folder.iterdir()):
        if not FILE_NAME.fullmatch(path.name):
            continue
        try:
            found.files.append(_describe(path))
        except FileNotFoundError:
            continue  # deleted meanwhile
        except ForeignError as error:
            found.odd[path] = str(error)
        except OSError as error:
            found.odd[path] = error.strerror or str(error)
    return found


def _describe(path: Path) -> MemoryFile:
    locked, owner = is_locked(path), read_owner(path, OWNER_AT, OWNER_BYTES)
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        try:
            header = header_of(fd, size)
        except ForeignError:
            raise
        except FormatError as error:
            return MemoryFile(path, size, locked, owner, None, str(error))
        if header is None:
            return MemoryFile(
                path, size, locked, owner, None, "the creation of the file was not completed"
            )
        geometry = header.geometry
        blocks = np.zeros(geometry.slots_at - BLOCK, np.uint8)
        read_exactly(RealFiles(), fd, [blocks.data], BLOCK)
        table = blocks[: geometry.slots * ENTRY_BYTES]
        slots = SlotTable(table, header.nonce, geometry.slot_bytes)
        (found, torn), (bundles, _) = slots.valid(), slots.bundles()
        compressed = [bundle for bundle, _ in bundles]
        times = [page.saved for page in found.values()] + [one.saved for one in compressed]
        return MemoryFile(
            path=path,
            nbytes=size,
            locked=locked,
            owner=owner,
            header=header,
            pages=len(found) + sum(bundle.pages for bundle in compressed),
            torn=0 if locked else len(torn),
            newest=max(times, default=0),
        )
