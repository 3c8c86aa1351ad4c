"""Opening of a rank's memory file: existing pages are adopted, or the file is created again.

    TIERED_KV_CPU_PATH/<replica>-<rank>.slots

An engine has the folder to itself: a second engine is refused. An existing file is handled
according to its contents:

- A file without the magic, a path that is not a plain file, or a file of another user is left
  unchanged, and the start is refused, because its contents may be valuable.
- If a memory file is in use, the start is refused. The message names the process.
- A memory file of another version, fingerprint or geometry, or one that is damaged or truncated, is
  deleted, with a warning. It is a cache that no start with these settings can use, and it would
  take memory that the new file needs. Users who alternate between two models need two folders.
- A matching memory file is adopted. A slot with a torn header counts as empty; the other slots are
  kept.
- An empty file, or one block of zeros, left by a process killed during creation, is created again.
- A memory file of a rank that the engine no longer has is deleted, unless it is in use.

The whole file is allocated before it is mapped, because a store to a mapping on a full file system
would raise SIGBUS.

The module also decides whether a file with the name of a memory file is a memory file, and whether
it can be used or deleted.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tiered_kv.errors import ConfigError
from tiered_kv.file_lock import (
    describe_owner,
    is_current,
    open_locked,
    owner_in_words,
    read_owner,
)
from tiered_kv.formatting import count
from tiered_kv.plain_files import FILE_MODE, check_owner, opened
from tiered_kv.storage.disk.files import BLOCK, RealFiles
from tiered_kv.storage.segment.format import FormatError, seconds_now

from .lasting_memory import LastingMemory
from .memory_format import (
    MAGIC,
    OWNER_AT,
    OWNER_BYTES,
    FileHeader,
    ForeignError,
    Geometry,
    pack_file_header,
    parse_file_header,
)

SETTING = "TIERED_KV_CPU_PATH"
"""Environment variable that names the folder of memory files."""
SUFFIX = ".slots"
FILE_NAME = re.compile(rf"([0-9]+)-([0-9]+){re.escape(SUFFIX)}")
"""Pattern of the name of a memory file, which contains its replica and its rank."""


class MemoryBusyError(ConfigError):
    """Another process has the memory file open."""


def memory_path(folder: Path, replica: int, rank: int) -> Path:
    """Return the path of a rank's memory file."""
    return folder / f"{replica}-{rank}{SUFFIX}"


def block_of(fd: int) -> int:
    """Return the block size of a file's file system, bytes. On hugetlbfs, it is the size of a huge
    page."""
    return max(os.fstat(fd).st_blksize, mmap.PAGESIZE)


def header_of(fd: int, size: int) -> FileHeader | None:
    """Return the header of an open file of ``size`` bytes; None if the file is empty or a single
    block of zeros, because its creation was interrupted.

    Raises:
        ForeignError: the file is not a memory file.
        FormatError: the file is a memory file, but unusable.
    """
    start = os.pread(fd, BLOCK, 0)
    one_block = size <= max(block_of(fd), BLOCK)
    if one_block and not any(start) and not os.pread(fd, size, 0).strip(b"\0"):
        return None
    header = parse_file_header(start)
    if size != header.size:
        raise FormatError(f"the file has {size} bytes instead of {header.size}")
    return header


def lock_file(path: Path, *, make: bool) -> int:
    """Open a memory file and lock it for as long as the returned descriptor is open.

    The file is mapped through another descriptor: Python duplicates the descriptor of a mapping,
    and a forked child would inherit the copy, and the lock with it.

    Args:
        make: True to create an empty file if the file is missing.

    Raises:
        MemoryBusyError: another process has the file open; the message names it.
        OSError: the file is missing, or cannot be opened.
    """
    fd = open_locked(path, os.O_RDWR | (os.O_CREAT if make else 0))
    if fd is None:
        owner = owner_in_words(read_owner(path, OWNER_AT, OWNER_BYTES))
        raise MemoryBusyError(
            f"{path} is in use by {owner}: stop that process, or set another {SETTING} "
            "for this engine"
        )
    return fd


def delete_memory(path: Path) -> int:
    """Delete a memory file that no process has open.

    Returns:
        The number of bytes that were freed; 0 if the file is missing.

    Raises:
        MemoryBusyError: a process has the file open. The file was not deleted.
        ForeignError: the file is not a memory file. It was not deleted.
        OSError: the file could not be deleted.
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


logger = logging.getLogger(__name__)

GIB = 1 << 30

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)


def open_memory(
    folder: Path,
    geometry: Geometry,
    *,
    keep: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> LastingMemory:
    """Open the memory file of a rank with its existing pages, or create it.

    Args:
        folder: folder on tmpfs or hugetlbfs; created if missing.
        keep: True to keep the file at a clean stop.
        clock: monotonic seconds.

    Raises:
        ConfigError: there is not enough space, another process has the file open, or the file is
            not a memory file; the message says what to do.
    """
    path = memory_path(folder, geometry.replica, geometry.rank)
    try:
        RealFiles().make_folders(folder)
        check_owner(folder)
        _delete_lost_ranks(folder, geometry)
        while True:
            fd = lock_file(path, make=True)
            try:
                memory = _open_locked(path, fd, geometry, keep=keep, clock=clock)
            except BaseException:
                os.close(fd)
                raise
            if memory is not None:
                return memory
            os.close(fd)  # the file was deleted
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise ConfigError(
                f"{path} is not a regular file: remove it, or set another {SETTING}"
            ) from error
        raise ConfigError(
            f"{error.filename or path} cannot be used ({error.strerror or error}): make the "
            f"server's user its owner, with write access, or set another {SETTING}"
        ) from error


def _delete_lost_ranks(folder: Path, geometry: Geometry) -> None:
    """Delete the memory files of ranks that this engine no longer has, which no engine would open
    again."""
    for path in folder.iterdir():
        name = FILE_NAME.fullmatch(path.name)
        if name and int(name[1]) == geometry.replica and int(name[2]) >= geometry.ranks:
            with suppress(ConfigError, FormatError, OSError):  # in use, or not ours
                delete_memory(path)
                ranks = count(geometry.ranks, "rank")
                logger.warning("%s was deleted, because this engine has only %s", path, ranks)


def _open_locked(
    path: Path, fd: int, geometry: Geometry, *, keep: bool, clock: Callable[[], float]
) -> LastingMemory | None:
    """Open a file whose lock this process holds. Returns None if the file had to be deleted."""
    size = os.fstat(fd).st_size
    try:
        header = _usable(fd, size, geometry)
    except ForeignError as error:
        raise ConfigError(
            f"{path} is left unchanged, because {error}: remove it, or set another {SETTING}"
        ) from error
    except FormatError as error:
        logger.warning("%s is recreated, because %s", path, error)
        path.unlink()
        return None
    os.fchmod(fd, FILE_MODE)
    try:
        if header is None:
            header = _make(path, fd, geometry)
        else:
            _write_owner(path, fd)
            os.posix_fallocate(fd, 0, size)  # fill the holes that a copy of a file may have
        mapped = _map(path, fd, header.size)
    except BaseException as error:
        if not size:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise _no_room(path, geometry) from error
        raise
    memory = LastingMemory(path, fd, mapped, header, keep=keep, clock=clock)
    if size:
        kept = count(len(memory.adopted), "page")
        logger.info("%s has %s from the previous engine", path, kept)
    return memory


def _usable(fd: int, size: int, geometry: Geometry) -> FileHeader | None:
    """Return the header of a file that can be adopted; None if the file is empty.

    Raises:
        ForeignError: the file is not a memory file of this user.
        FormatError: the file is unusable; the message says why.
    """
    if os.fstat(fd).st_uid != os.geteuid():
        raise ForeignError("the file belongs to another user")
    if not size:
        return None
    header = header_of(fd, size)
    if header is None:
        raise FormatError("a process was killed while creating the file")
    there = header.geometry
    if there.contents != geometry.contents:
        raise FormatError("the pages in the file belong to another model or other settings")
    if there != geometry:
        raise FormatError(
            f"the file belongs to rank {there.rank} of {there.ranks} with {there.slots} slots of "
            f"{there.slot_bytes} bytes, but this is rank {geometry.rank} of {geometry.ranks} "
            f"with {geometry.slots} slots of {geometry.slot_bytes} bytes"
        )
    return header


def _make(path: Path, fd: int, geometry: Geometry) -> FileHeader:
    """Initialize an empty file. The magic is written first, so that a file left by a killed process
    is recognized."""
    block = block_of(fd)
    size = -(-geometry.nbytes // block) * block
    if RealFiles().free(path.parent) < size:
        raise _no_room(path, geometry)
    header = FileHeader(geometry, secrets.randbits(64), seconds_now(), size)
    os.posix_fallocate(fd, 0, min(block, size))
    with _map(path, fd, min(block, size)) as first:
        packed = pack_file_header(header)
        first[: len(MAGIC)] = MAGIC
        first[: len(packed)] = packed
    _write_owner(path, fd)  # processes that wait for the lock can name its owner
    os.posix_fallocate(fd, 0, size)
    return header


def _write_owner(path: Path, fd: int) -> None:
    """Write the description of the owner of a file into its first block. The block is mapped,
    because hugetlbfs supports no other writes."""
    with _map(path, fd, min(block_of(fd), os.fstat(fd).st_size)) as first:
        first[OWNER_AT:BLOCK] = describe_owner(OWNER_BYTES).ljust(OWNER_BYTES, b"\0")


def _map(path: Path, fd: int, size: int) -> mmap.mmap:
    """Map a whole file through a separate descriptor, with all its pages populated."""
    with opened(path, os.O_RDWR) as other:
        if not is_current(fd, path) or not os.path.samestat(os.fstat(fd), os.fstat(other)):
            raise OSError(errno.ESTALE, "the file has just been replaced", str(path))
        return mmap.mmap(other, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _no_room(path: Path, geometry: Geometry) -> ConfigError:
    free, wanted = RealFiles().free(path.parent), geometry.nbytes
    has = f"has space for {free / GIB:.2f} GiB" if free < wanted else "provides no more memory"
    return ConfigError(
        f"{path.parent} {has}, but the CPU memory of rank {geometry.rank} needs "
        f"{wanted / GIB:.2f} GiB: lower TIERED_KV_CPU_GIB, make the file system larger (a "
        "container has 64 MiB of /dev/shm unless it is started with --shm-size), or set another "
        f"{SETTING}"
    )
