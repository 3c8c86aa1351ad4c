"""Speed of the disk under a path, measured before pages are written to it."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes per second of large reads and writes that bypass the page cache."""

    read: float
    write: float


def measure_disk(folder: Path, threads: int, nbytes: int = 64 << 20) -> DiskSpeed:
    """Measure a disk by writing and reading a temporary file of ``nbytes`` bytes in ``folder``, on
    ``threads`` threads.

    The measurement takes a tenth of a second on a fast disk. Without direct I/O the result includes
    the page cache.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    path = folder / f".probe-{os.getpid()}"
    buffer = mmap.mmap(-1, CHUNK)  # aligned, as direct I/O requires
    try:
        file = _open(path)
        try:
            path.unlink()  # so that no file is left if this process is killed
            os.posix_fallocate(file, 0, nbytes)
            offsets = range(0, nbytes, CHUNK)
            write = _time(threads, offsets, lambda offset: os.pwrite(file, buffer, offset))
            os.fdatasync(file)
            buffers = [mmap.mmap(-1, CHUNK) for _ in range(threads)]

            def read_one(offset: int) -> int:
                mine = buffers.pop()
                try:
                    return os.preadv(file, [mine], offset)
                finally:
                    buffers.append(mine)

            read = _time(threads, offsets, read_one)
        finally:
            os.close(file)
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
    return DiskSpeed(nbytes / read, nbytes / write)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        with suppress(FileNotFoundError):  # some file systems create the file before they refuse
            path.unlink()
        return os.open(path, flags, 0o600)


def _time(threads: int, offsets: range, work: Callable[[int], int]) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        if sum(pool.map(work, offsets)) != len(offsets) * CHUNK:
            raise OSError("a read or write was incomplete")
    return time.perf_counter() - began
