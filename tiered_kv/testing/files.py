"""A file layer that fails, returns wrong data, or loses data that was not synced, on request."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tiered_kv.plain_files import FILE_MODE
from tiered_kv.storage.disk.files import BLOCK, Access, Buffers, FileLayer, RealFiles

WRITING = (
    "make_folders",
    "create",
    "open_to_write",
    "preallocate",
    "truncate",
    "pwrite",
    "fdatasync",
    "unlink",
)
_OPENING = {Access.READ: "open", Access.WRITE: "open_to_write", Access.CREATE: "create"}


@dataclass(slots=True)
class _Fault:
    """A fault of an operation.

    Attributes:
        error: errno of the failure.
        after: number of calls before the fault.
        times: number of calls that fail then.
    """

    error: int
    after: int
    times: float


class FaultyFiles:
    """Passes all calls on to ``inner``, except for requested faults. Thread-safe.

    Operations are named after the methods. Calls of ``open`` are three operations, by access:
    ``open``, ``open_to_write`` and ``create``.

    Attributes:
        struck: number of faults that have occurred, so that a test can check that its fault did.
        calls: number of calls of each operation.
        most_bytes: maximum number of bytes that a read or write reports; None for no limit.
    """

    def __init__(self, inner: FileLayer | None = None) -> None:
        self.inner = inner or RealFiles()
        self.struck = 0
        self.calls: dict[str, int] = {}
        self.most_bytes: int | None = None
        self._faults: dict[str, _Fault] = {}
        self._flips: list[tuple[int, int]] = []
        self._direct = True
        self._mutex = threading.Lock()

    def fail(self, operation: str, error: int, *, after: int = 0, times: float = 1) -> None:
        """Make calls of an operation fail.

        Args:
            error: errno of the failure.
            after: number of further calls that succeed first.
            times: number of calls that fail then.
        """
        with self._mutex:
            self._faults[operation] = _Fault(error, after, times)

    def fail_writing(self, error: int) -> None:
        """Make every change fail from now on, like a read-only mount or an exhausted quota."""
        for operation in WRITING:
            self.fail(operation, error, times=float("inf"))

    def refuse_direct(self) -> None:
        """Behave like a file system without O_DIRECT."""
        self._direct = False

    def heal(self) -> None:
        """End all faults except ``refuse_direct``."""
        with self._mutex:
            self._faults.clear()
            self._flips.clear()
            self.most_bytes = None

    def flip(self, bit: int, *, after: int = 0) -> None:
        """Flip one bit of the data of one read.

        Args:
            bit: number of the bit in the data.
            after: number of further reads that return correct data first.
        """
        with self._mutex:
            self._flips.append((self.calls.get("pread", 0) + after + 1, bit))

    def _call(self, operation: str) -> int:
        with self._mutex:
            self.calls[operation] = count = self.calls.get(operation, 0) + 1
            fault = self._faults.get(operation)
            if fault is None:
                return count
            if fault.after > 0:
                fault.after -= 1
                return count
            fault.times -= 1
            if fault.times <= 0:
                del self._faults[operation]
            self.struck += 1
        raise OSError(fault.error, os.strerror(fault.error))

    def make_folders(self, folder: Path) -> None:
        self._call("make_folders")
        self.inner.make_folders(folder)

    def names(self, folder: Path) -> list[str]:
        self._call("names")
        return self.inner.names(folder)

    def free(self, folder: Path) -> int:
        self._call("free")
        return self.inner.free(folder)

    def open(self, path: Path, access: Access, *, direct: bool) -> int:
        self._call(_OPENING[access])
        if direct and not self._direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return self.inner.open(path, access, direct=direct)

    def close(self, fd: int) -> None:
        self.inner.close(fd)

    def size(self, fd: int) -> int:
        self._call("size")
        return self.inner.size(fd)

    def preallocate(self, fd: int, nbytes: int) -> None:
        self._call("preallocate")
        self.inner.preallocate(fd, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._call("truncate")
        self.inner.truncate(fd, nbytes)

    def pread(self, fd: int, buffers: Buffers, offset: int) -> int:
        number = self._call("pread")
        count = self._shortened(self.inner.pread(fd, buffers, offset))
        with self._mutex:
            bits = [bit for at, bit in self._flips if at == number]
            self._flips = [flip for flip in self._flips if flip[0] != number]
        for bit in bits:
            if count:
                self.struck += 1
                at = bit // 8 % count
                for buffer in buffers:
                    if at < len(buffer):
                        buffer[at] ^= 1 << bit % 8
                        break
                    at -= len(buffer)
        return count

    def pwrite(self, fd: int, buffers: Buffers, offset: int) -> int:
        self._call("pwrite")
        return self._shortened(self.inner.pwrite(fd, buffers, offset))

    def _shortened(self, count: int) -> int:
        if self.most_bytes is None or count <= self.most_bytes:
            return count
        with self._mutex:
            self.struck += 1
        return self.most_bytes

    def fdatasync(self, fd: int) -> None:
        self._call("fdatasync")
        self.inner.fdatasync(fd)

    def sync_folder(self, folder: Path) -> None:
        self._call("sync_folder")
        self.inner.sync_folder(folder)

    def unlink(self, path: Path) -> None:
        self._call("unlink")
        self.inner.unlink(path)

    def uncache(self, fd: int, offset: int, nbytes: int) -> None:
        self.inner.uncache(fd, offset, nbytes)


class SmallDisk(FaultyFiles):
    """A disk of limited size. Preallocations that exceed the size fail.

    Args:
        folder: folder whose contents are on the disk.
        nbytes: size of the disk, bytes.
        tells: True if the disk reports its free space, False to behave like a quota, which does
            not.
    """

    def __init__(
        self, folder: Path, nbytes: int, *, tells: bool = True, inner: FileLayer | None = None
    ) -> None:
        super().__init__(inner)
        self.nbytes = nbytes
        self._folder = folder
        self._tells = tells

    @property
    def left(self) -> int:
        """Free space, bytes."""
        used = 0
        for path in self._folder.rglob("*"):
            try:
                used += path.lstat().st_size if path.is_file() else 0
            except FileNotFoundError:
                continue
        return max(0, self.nbytes - used)

    def free(self, folder: Path) -> int:
        found = super().free(folder)
        return min(found, self.left) if self._tells else found

    def preallocate(self, fd: int, nbytes: int) -> None:
        if self.left < nbytes - self.inner.size(fd):
            self.struck += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().preallocate(fd, nbytes)


class UnsafeFiles(RealFiles):
    """Files that are never synced, for tests that open many stores and simulate no crash."""

    def fdatasync(self, fd: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


class Crash(Enum):
    """Outcomes of a crash for changes that were not synced."""

    KILLED = "the process was killed: all were made, the last one in part"
    POWER_CUT = "the power was cut: none were made"
    TORN = "the power was cut: any of them were made, any of them in part"


class Change(Enum):
    CREATE = "create"
    LENGTH = "length"
    WRITE = "write"
    SYNC = "sync"
    UNLINK = "unlink"
    SYNC_FOLDER = "sync folder"


@dataclass(frozen=True, slots=True)
class Step:
    """One change to the disk.

    Attributes:
        file: number that distinguishes files that had the same path at different times.
        at: an offset or a length.
    """

    change: Change
    path: Path
    file: int = 0
    at: int = 0
    content: bytes = b""


class RecordedFiles(FaultyFiles):
    """Records all changes in order, so that the disk after a crash at any point can be recreated:
    ``steps[:n]`` were issued, but some of them may not have reached the disk.

    With one I/O thread the order is the same in every run, except for the sync of a folder, which
    runs concurrently with the first writes to a new segment.
    """

    def __init__(self, inner: FileLayer | None = None) -> None:
        super().__init__(inner)
        self.steps: list[Step] = []
        self._files: dict[int, tuple[Path, int]] = {}
        self._names: dict[Path, int] = {}

    def _record(
        self, change: Change, fd: int, path: Path, at: int = 0, content: bytes = b""
    ) -> None:
        if fd >= 0:
            path, file = self._files[fd]
        else:
            file = self._names.get(path, 0)
        with self._mutex:
            self.steps.append(Step(change, path, file, at, content))

    def open(self, path: Path, access: Access, *, direct: bool) -> int:
        fd = super().open(path, access, direct=direct)
        if access is Access.CREATE:
            self._names[path] = len(self.steps) + 1
            self._record(Change.CREATE, -1, path)
        self._files[fd] = (path, self._names.get(path, 0))
        return fd

    def preallocate(self, fd: int, nbytes: int) -> None:
        super().preallocate(fd, nbytes)
        self._record(Change.LENGTH, fd, Path(), nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        super().truncate(fd, nbytes)
        self._record(Change.LENGTH, fd, Path(), nbytes)

    def pwrite(self, fd: int, buffers: Buffers, offset: int) -> int:
        count = super().pwrite(fd, buffers, offset)
        self._record(Change.WRITE, fd, Path(), offset, b"".join(buffers)[:count])
        return count

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self._record(Change.SYNC, fd, Path())

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._record(Change.UNLINK, -1, path)

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self._record(Change.SYNC_FOLDER, -1, folder)

    def after_crash(
        self, count: int, crash: Crash, rng: random.Random, root: Path, copy: Path
    ) -> None:
        """Recreate a possible state of the disk after a crash of the machine or the process.

        Contents and lengths are durable once the file was synced, and names once their folder was
        synced. Files that existed before the recording are not in the copy.

        Args:
            count: index of the step during which the crash happens.
            crash: what happened to changes that were not synced.
            root: folder of the recorded files.
            copy: folder in which the state is recreated.
        """
        disk = _Disk()
        for i, step in enumerate(self.steps[: count + 1]):
            dying = i == count
            if step.change in (Change.SYNC, Change.SYNC_FOLDER):
                if not dying:
                    disk.sync(step)
                continue
            disk.pending.append((step, dying))
        disk.settle(crash, rng)
        for path, file in disk.names.items():
            target = copy / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(disk.contents.get(file, b""))
            target.chmod(FILE_MODE)


class _Disk:
    """Changes that are durable, and changes that were only issued."""

    def __init__(self) -> None:
        self.names: dict[Path, int] = {}
        self.contents: dict[int, bytearray] = {}
        self.pending: list[tuple[Step, bool]] = []

    def sync(self, point: Step) -> None:
        """Make the changes before the sync point durable, in order."""
        waiting = []
        for step, dying in self.pending:
            if _covers(point, step):
                self._apply(step)
            else:
                waiting.append((step, dying))
        self.pending = waiting

    def settle(self, crash: Crash, rng: random.Random) -> None:
        """Decide which of the unsynced changes reached the disk."""
        for step, dying in self.pending:
            if crash is Crash.POWER_CUT or (crash is Crash.TORN and rng.random() < 0.5):
                continue
            torn = dying if crash is Crash.KILLED else rng.random() < 0.5
            self._apply(step, rng if torn else None, in_order=crash is Crash.KILLED)

    def _apply(self, step: Step, rng: random.Random | None = None, in_order: bool = False) -> None:
        content = self.contents.setdefault(step.file, bytearray())
        if step.change is Change.CREATE:
            self.names[step.path] = step.file
        elif step.change is Change.UNLINK:
            if self.names.get(step.path) == step.file:
                del self.names[step.path]
        elif step.change is Change.LENGTH:
            del content[step.at :]
            content.extend(bytes(step.at - len(content)))
        else:
            blocks = range(0, len(step.content), BLOCK)
            for start in _some(blocks, rng, in_order):
                block = step.content[start : start + BLOCK]
                end = step.at + start + len(block)
                content.extend(bytes(max(0, end - len(content))))
                content[step.at + start : end] = block


def _covers(point: Step, step: Step) -> bool:
    if point.change is Change.SYNC:
        return step.file == point.file and step.change in (Change.WRITE, Change.LENGTH)
    return step.path.parent == point.path and step.change in (Change.CREATE, Change.UNLINK)


def _some(blocks: range, rng: random.Random | None, in_order: bool) -> Sequence[int]:
    if rng is None:
        return blocks
    if in_order:
        return blocks[: rng.randint(0, len(blocks))]
    return [start for start in blocks if rng.random() < 0.5]
