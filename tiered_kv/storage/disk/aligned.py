"""Memory for direct I/O: reusable buffers aligned to memory pages."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

from tiered_kv.codecs.base import Bytes

from .files import BLOCK, FileLayer, write_exactly

HUGE_PAGE = 2 << 20


def aligned(nbytes: int) -> int:
    """Round ``nbytes`` up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


def aligned_bytes(nbytes: int) -> Bytes:
    """Allocate at least ``nbytes`` bytes, aligned to a memory page.

    A disk transfers one contiguous piece of physical memory at a time, and a large buffer in small
    pages is hundreds of pieces. So large buffers use huge pages, where the system has them.
    """
    room = max(aligned(nbytes), mmap.PAGESIZE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if room < HUGE_PAGE // 2:
        return np.frombuffer(mmap.mmap(-1, room, flags=flags), dtype=np.uint8)
    memory = mmap.mmap(-1, room + HUGE_PAGE, flags=flags)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    found = np.frombuffer(memory, dtype=np.uint8)
    start = -found.ctypes.data % HUGE_PAGE
    return found[start : start + room]


def is_blocks(content: Bytes) -> bool:
    """True if a disk can transfer the content in place, because it consists of whole, aligned
    blocks."""
    address: int = content.__array_interface__["data"][0]
    return content.nbytes % BLOCK == 0 and address % BLOCK == 0


class BufferPool:
    """Pool of aligned buffers, because fresh memory costs a page fault per page. Thread-safe.

    Args:
        nbytes: size of a normal buffer, bytes; larger buffers are allocated on demand.
        keep: number of idle buffers kept.
    """

    def __init__(self, nbytes: int, keep: int) -> None:
        self._nbytes = nbytes
        self._keep = keep
        self._rest: list[Bytes] = []

    def take(self, nbytes: int) -> Bytes:
        """Take a buffer of at least ``nbytes`` bytes, with undefined contents."""
        try:
            buffer = self._rest.pop()
        except IndexError:
            return aligned_bytes(max(nbytes, self._nbytes))
        return buffer if buffer.nbytes >= nbytes else aligned_bytes(nbytes)

    def give(self, buffer: Bytes) -> None:
        """Return a buffer to the pool."""
        if len(self._rest) < self._keep:
            self._rest.append(buffer)


def write_content(
    files: FileLayer, fd: int, content: bytes, offset: int, buffers: BufferPool
) -> None:
    """Write whole blocks through an aligned buffer.

    Raises:
        OSError: the disk failed.
    """
    buffer = buffers.take(len(content))
    try:
        buffer[: len(content)] = np.frombuffer(content, np.uint8)
        write_exactly(files, fd, [buffer.data[: len(content)]], offset)
    finally:
        buffers.give(buffer)
