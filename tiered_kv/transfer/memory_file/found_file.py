"""A file that has the name of a memory file: is it one, and can it be used or deleted?"""

from __future__ import annotations

import mmap
import os
import re
from contextlib import suppress
from pathlib import Path

from tiered_kv.storage.disk.files import BLOCK
from tiered_kv.storage.segment.format import FormatError

from .file_lock import lock_file
from .memory_format import FileHeader, ForeignError, parse_file_header

SUFFIX = ".slots"
FILE_NAME = re.compile(rf"([0-9]+)-([0-9]+){re.escape(SUFFIX)}")
"""Name of a memory file: of its replica, and of its rank."""


def memory_path(folder: Path, replica: int, rank: int) -> Path:
    """Path of a rank's memory file."""
    return folder / f"{replica}-{rank}{SUFFIX}"


def block_of(fd: int) -> int:
    """Size of a block of a file's file system, bytes: on hugetlbfs, of a huge page."""
    return max(os.fstat(fd).st_blksize, mmap.PAGESIZE)


def header_of(fd: int, size: int) -> FileHeader | None:
    """Header of an open file of ``size`` bytes; None if a process that made it got no further
    than to a block of zeros.

    Raises:
        ForeignError: it is not ours.
        FormatError: it is ours, and of no use.
    """
    start = os.pread(fd, BLOCK, 0)
    one_block = size <= max(block_of(fd), BLOCK)
    if one_block and not any(start) and not os.pread(fd, size, 0).strip(b"\0"):
        return None
    header = parse_file_header(start)
    if size != header.size:
        raise FormatError(f"it has {size} bytes and should have {header.size}")
    return header


def delete_memory(path: Path) -> int:
    """Delete a memory file that no process has.

    Returns:
        The bytes that this freed; 0 if it is gone already.

    Raises:
        MemoryBusyError: a process has it; it was not deleted.
        ForeignError: it is not ours; it was not deleted.
        OSError: it could not be deleted.
    """
    with suppress(FileNotFoundError):
        fd = lock_file(path, make=False)
        try:
            size = os.fstat(fd).st_size
            try:
                header_of(fd, size)
            except ForeignError:
                raise
            except FormatError:
                pass
            path.unlink()
            return size
        finally:
            os.close(fd)
    return 0
