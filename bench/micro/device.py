"""A disk without a store, and contests of something against it.

The disk's figure is that of its best setting, and both sides take turns within one run, so
that a neighbour on the disk hits both.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiered_kv.codecs.base import Bytes

DEVICE_THREADS = (1, 2, 4, 8)
DEVICE_BLOCKS = (128 << 10, 512 << 10, 1 << 20, 4 << 20)
SWEEPS, SWEEP_BYTES, FINALISTS = 3, 64 << 20, 3
KEEP_FILES = 8
"""Files that the device keeps before it deletes them, so that the room of a file is not that
of the one before it."""
HUGE_PAGE = 2 << 20
ROUNDS, SLICES = 5, 4
"""Ratios are taken over rounds; within one, store and device change places after a slice."""

Pass = Callable[[], float]
"""Moves a fixed number of bytes and gives MB/s."""
Tick = Callable[[str], None]
Setting = tuple[int, int]
"""Threads, and bytes of a block."""


def huge_bytes(nbytes: int) -> Bytes:
    """Memory in huge pages, where the system has them: the kernel hands a disk one piece of
    memory at a time, and with small pages there are hundreds of pieces in a block."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    found = np.frombuffer(memory, np.uint8)
    start = -found.ctypes.data % HUGE_PAGE
    found = found[start : start + nbytes]
    found[:] = 0
    return found


class Device:
    """Files of random bytes, read and written past the page cache, with as much skill as it
    takes.

    Args:
        folder: for the files, which are left there.
        nbytes: of the file that is read, a multiple of ``content.nbytes``.
        content: what to write.
    """

    def __init__(self, folder: Path, nbytes: int, content: Bytes) -> None:
        self._folder = folder
        self._nbytes = nbytes
        self._content = content.data
        self._buffers = [huge_bytes(max(DEVICE_BLOCKS)).data for _ in range(max(DEVICE_THREADS))]
        self._random = np.random.default_rng(1)
        self._written: list[Path] = []
        self._fd = self._create("read", nbytes)
        self._threads = ThreadPoolExecutor(max(DEVICE_THREADS), "bench-device")
        self._fill(self._fd, 4, 4 << 20, nbytes)

    def _create(self, name: str, nbytes: int) -> int:
        fd = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(fd, 0, nbytes)
        os.fsync(fd)
        return fd

    def _fill(self, fd: int, threads: int, block: int, nbytes: int) -> float:
        """Write a file from its beginning; MB/s, fdatasync included."""

        def work(thread: int) -> None:
            for offset in range(thread * block, nbytes, threads * block):
                begin = offset % len(self._content)
                if os.pwrite(fd, self._content[begin : begin + block], offset) != block:
                    raise OSError("the disk took less than was asked")

        began = time.perf_counter()
        list(self._threads.map(work, range(threads)))
        os.fdatasync(fd)
        return nbytes / (time.perf_counter() - began) / 1e6

    def write(self, threads: int, block: int, nbytes: int) -> float:
        """Fill a new file; MB/s."""
        return self._write(threads, block, nbytes, again=False)

    def rewrite(self, threads: int, block: int, nbytes: int) -> float:
        """Fill a file that was filled before; MB/s."""
        return self._write(threads, block, nbytes, again=True)

    def _write(self, threads: int, block: int, nbytes: int, *, again: bool) -> float:
        path = self._folder / f"{len(self._written)}"
        self._written.append(path)
        fd = self._create(path.name, nbytes)
        try:
            speed = self._fill(fd, threads, block, nbytes)
            return self._fill(fd, threads, block, nbytes) if again else speed
        finally:
            os.close(fd)
            if len(self._written) >= KEEP_FILES:
                self._written[-KEEP_FILES].unlink()

    def read(self, threads: int, block: int, nbytes: int) -> float:
        """Read so many bytes, at random; MB/s."""
        blocks = self._random.choice(self._nbytes // block, nbytes // block, replace=False)
        offsets = (blocks * block).tolist()

        def work(thread: int) -> None:
            buffer = self._buffers[thread][:block]
            for offset in offsets[thread::threads]:
                if os.preadv(self._fd, [buffer], offset) != block:
                    raise OSError("the disk gave less than was asked")

        began = time.perf_counter()
        list(self._threads.map(work, range(threads)))
        return nbytes / (time.perf_counter() - began) / 1e6

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._fd)


@dataclass(frozen=True)
class Outcome:
    """A contest: MB/s, medians over the rounds, and the device's best setting."""

    fraction: float
    store_mbs: float
    device_mbs: float
    threads: int
    block: int


def judge(store: Sequence[float], device: Mapping[Setting, Sequence[float]]) -> Outcome:
    """The store against the setting of the device that is best over all rounds.

    Args:
        store: MB/s of each round.
        device: the same of each setting.
    """
    best = max(device, key=lambda setting: statistics.median(device[setting]))
    ratios = [ours / theirs for ours, theirs in zip(store, device[best], strict=True)]
    return Outcome(
        fraction=statistics.median(ratios),
        store_mbs=statistics.median(store),
        device_mbs=statistics.median(device[best]),
        threads=best[0],
        block=best[1],
    )


def finalists(device: Callable[[int, int, int], float], tick: Tick) -> list[Setting]:
    """The best settings of the device, from short passes."""
    settings = [(threads, block) for threads in DEVICE_THREADS for block in DEVICE_BLOCKS]
    speeds: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for _ in range(SWEEPS):
        for setting in settings:
            speeds[setting].append(device(*setting, SWEEP_BYTES))
        tick("the device's settings")
    return sorted(settings, key=lambda one: -statistics.median(speeds[one]))[:FINALISTS]


def contest(store: Pass, device: Mapping[Setting, Pass], tick: Tick) -> Outcome:
    """Store and device in turn; who begins changes from slice to slice."""
    everyone: dict[Setting | None, Pass] = {None: store}
    everyone.update(device.items())
    rounds: dict[Setting | None, list[float]] = {one: [] for one in everyone}
    for _ in range(ROUNDS):
        slices: dict[Setting | None, list[float]] = {one: [] for one in everyone}
        for turn in range(SLICES):
            order = list(everyone)[turn % len(everyone) :] + list(everyone)[: turn % len(everyone)]
            for one in order:
                slices[one].append(everyone[one]())
        for one, speeds in slices.items():
            rounds[one].append(statistics.harmonic_mean(speeds))
        tick("store and device in turn")
    return judge(rounds[None], {setting: rounds[setting] for setting in device})
