"""Opening of a rank's memory file: what is there is adopted, or taken down and made anew.

    TIERED_KV_CPU_PATH/<replica>-<rank>.slots

An engine has the folder for itself: another one beside it is refused. What a file holds decides
what becomes of it:

- A file that is not ours by its magic, is no plain file, or is another user's stays as it is, and
  the start is refused. Nobody knows what it is worth.
- Ours, and in use: refused. The sentence names the process.
- Ours, of another version, fingerprint or geometry, damaged or cut off: deleted, with a warning.
  It is a cache that no start with these settings can use, and while it stays it takes memory that
  the new one needs. Whoever changes between two models has a folder for each.
- Ours and alike: adopted. A slot whose header is torn counts as empty; the others are kept.
- Empty, or one block of zeros: begun by a process that was killed. It is made anew.
- Ours, of a rank that the engine has no more: deleted, unless it is in use.

All of a file is allocated before it is mapped, so that no store to it ever finds the file system
full, which would be a SIGBUS.

A file that has the name of a memory file: is it one, and can it be used or deleted?
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
"""Variable that names the folder of memory files."""
SUFFIX = ".slots"
FILE_NAME = re.compile(rf"([0-9]+)-([0-9]+){re.escape(SUFFIX)}")
"""Name of a memory file: of its replica, and of its rank."""


class MemoryBusyError(ConfigError):
    """Another process has the file."""


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


def lock_file(path: Path, *, make: bool) -> int:
    """Open a memory file and lock it for as long as the descriptor is open.

    The file is mapped by another descriptor: Python keeps a copy of that one, which a forked child
    would inherit, and the lock with it.

    Args:
        make: make an empty file if there is none.

    Raises:
        MemoryBusyError: another process has it; the sentence names that.
        OSError: the file is missing, or cannot be opened.
    """
    fd = open_locked(path, os.O_RDWR | (os.O_CREAT if make else 0))
    if fd is None:
        owner = owner_in_words(read_owner(path, OWNER_AT, OWNER_BYTES))
        raise MemoryBusyError(
            f"{path} is in use by {owner}: stop it, or give this engine another {SETTING}"
        )
    return fd


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
    """Open the memory file of a rank, with the pages that it has from before, or make it.

    Args:
        folder: place on tmpfs or hugetlbfs; made if it is missing.
        keep: leave the file there at a clean stop.
        clock: monotonic seconds.

    Raises:
        ConfigError: there is no room, another process has the file, or what has its name is not
            ours; the sentence says what to do.
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
            os.close(fd)  # it was deleted
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise ConfigError(
                f"{path} is no plain file: remove it, or set another {SETTING}"
            ) from error
        raise ConfigError(
            f"{error.filename or path} cannot be used ({error.strerror or error}): make it this "
            f"user's and writable, or set another {SETTING}"
        ) from error


def _delete_lost_ranks(folder: Path, geometry: Geometry) -> None:
    """Delete memory of ranks that this engine has no more: nobody would ever open it."""
    for path in folder.iterdir():
        name = FILE_NAME.fullmatch(path.name)
        if name and int(name[1]) == geometry.replica and int(name[2]) >= geometry.ranks:
            with suppress(ConfigError, FormatError, OSError):  # in use, or not ours
                delete_memory(path)
                logger.warning("%s is deleted: there are %d ranks", path, geometry.ranks)


def _open_locked(
    path: Path, fd: int, geometry: Geometry, *, keep: bool, clock: Callable[[], float]
) -> LastingMemory | None:
    """Open a file of which this process has the lock; None if it had to be deleted."""
    size = os.fstat(fd).st_size
    try:
        header = _usable(fd, size, geometry)
    except ForeignError as error:
        raise ConfigError(
            f"{path} stays as it is, since {error}: remove it, or set another {SETTING}"
        ) from error
    except FormatError as error:
        logger.warning("%s is made anew, since %s", path, error)
        path.unlink()
        return None
    os.fchmod(fd, FILE_MODE)
    try:
        if header is None:
            header = _make(path, fd, geometry)
        else:
            _write_owner(path, fd)
            os.posix_fallocate(fd, 0, size)  # whatever holes a copy of a file may have
        mapped = _map(path, fd, header.size)
    except BaseException as error:
        if not size:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise _no_room(path, geometry) from error
        raise
    memory = LastingMemory(path, fd, mapped, header, keep=keep, clock=clock)
    if size:
        logger.info("%s has %d pages from before", path, len(memory.adopted))
    return memory


def _usable(fd: int, size: int, geometry: Geometry) -> FileHeader | None:
    """Header of a file that can be adopted; None if the file is empty.

    Raises:
        ForeignError: it is not ours.
        FormatError: it is of no use; the message says why.
    """
    if os.fstat(fd).st_uid != os.geteuid():
        raise ForeignError("it belongs to another user")
    if not size:
        return None
    header = header_of(fd, size)
    if header is None:
        raise FormatError("a process was killed when it began to make it")
    there = header.geometry
    if there.contents != geometry.contents:
        raise FormatError("its pages are another model's, or of other settings")
    if there != geometry:
        raise FormatError(
            f"it is rank {there.rank} of {there.ranks} with {there.slots} slots of "
            f"{there.slot_bytes} bytes, and this is rank {geometry.rank} of {geometry.ranks} with "
            f"{geometry.slots} of {geometry.slot_bytes}"
        )
    return header


def _make(path: Path, fd: int, geometry: Geometry) -> FileHeader:
    """Make a file of an empty one. What a killed process leaves is known as ours by the magic,
    which comes first."""
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
    _write_owner(path, fd)  # who waits for the lock meanwhile is told whose it is
    os.posix_fallocate(fd, 0, size)
    return header


def _write_owner(path: Path, fd: int) -> None:
    """Write who has a file into its first block. Files on hugetlbfs take no other writes."""
    with _map(path, fd, min(block_of(fd), os.fstat(fd).st_size)) as first:
        first[OWNER_AT:BLOCK] = describe_owner(OWNER_BYTES).ljust(OWNER_BYTES, b"\0")


def _map(path: Path, fd: int, size: int) -> mmap.mmap:
    """Map a file by a descriptor of its own, every page of it at once."""
    with opened(path, os.O_RDWR) as other:
        if not is_current(fd, path) or not os.path.samestat(os.fstat(fd), os.fstat(other)):
            raise OSError(errno.ESTALE, "it was replaced just now", str(path))
        return mmap.mmap(other, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _no_room(path: Path, geometry: Geometry) -> ConfigError:
    free, wanted = RealFiles().free(path.parent), geometry.nbytes
    has = f"has room for {free / GIB:.2f} GiB" if free < wanted else "gives no more memory"
    return ConfigError(
        f"{path.parent} {has}, and the CPU memory of rank {geometry.rank} takes "
        f"{wanted / GIB:.2f} GiB: lower TIERED_KV_CPU_GIB, make the file system larger (a "
        "container's /dev/shm has 64 MiB: start it with --shm-size), or set another "
        f"{SETTING}"
    )
