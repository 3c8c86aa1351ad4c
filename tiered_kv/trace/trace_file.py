"""The newest file of a trace, to which records are appended. Several processes may write to one
trace.

These processes are replicas of one server, with the same settings. Each locks the file for a write.
A process continues with the new file if another process has renamed the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from tiered_kv.file_lock import is_current, unlock
from tiered_kv.plain_files import check_owner

from .rotation import FILE_BYTES, make_room

TRIES = 100
"""Maximum number of times that a file is reopened because it was renamed. Without a limit, the
reopening would never end on file systems without stable inode numbers."""


class TraceFile:
    """Appends lines to a trace. Single-threaded. Only the owner can read the files.

    Args:
        path: the newest file of the trace.
        header: first line of each file. It is also written when this process starts to use a file.
        most_bytes: maximum size of a file, bytes. Only a single larger write exceeds it.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, header: str, most_bytes: int = FILE_BYTES) -> None:
        self._path = path
        self._header = header.encode("ascii") + b"\n"
        self._most_bytes = most_bytes
        self._fd: int | None = None
        self._open()

    def _open(self) -> None:
        self.close()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o600)
        self._plain = stat.S_ISREG(os.fstat(self._fd).st_mode)
        if self._plain:
            try:
                check_owner(self._path)  # the owner of the file could read the trace
            except OSError:
                self.close()
                raise
        self._introduced = self._torn = False

    def append(self, lines: Sequence[str]) -> None:
        """Write ASCII lines, in a new file if the current file would grow too large. May block.

        Raises:
            OSError: some lines were not written. The next write starts a new line.
        """
        data = "".join(f"{line}\n" for line in lines).encode("ascii")
        if self._fd is None:
            self._open()
        with contextlib.ExitStack() as held:
            if self._plain:
                held.callback(self._unlock)
                self._lock()
                if self._is_full(len(data)):
                    make_room(self._path)
                    self._lock()
            self._write(data)

    def _is_full(self, more: int) -> bool:
        """Return True if the file is not empty and has no space for ``more`` bytes."""
        there = os.fstat(self._fd_now).st_size
        header = 0 if self._introduced else len(self._header)
        return there > 0 and there + header + more > self._most_bytes

    @property
    def _fd_now(self) -> int:
        assert self._fd is not None
        return self._fd

    def _lock(self) -> None:
        """Lock the newest file, even if it is renamed meanwhile."""
        for _ in range(TRIES):
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(self._fd_now, fcntl.LOCK_EX)
            if is_current(self._fd_now, self._path):
                return
            self._open()  # this closed the old file, which released its lock

    def _unlock(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                unlock(self._fd)

    def _write(self, data: bytes) -> None:
        if not self._introduced:
            data = self._header + data
            # Checked under the lock, so that a write in progress does not look torn.
            self._torn = self._torn or (self._plain and _is_torn(self._path))
        if self._torn:
            data = b"\n" + data
        self._torn = True  # until everything is written
        left = memoryview(data)
        while left:
            left = left[os.write(self._fd_now, left) :]
        self._torn, self._introduced = False, True

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def _is_torn(path: Path) -> bool:
    """Return True if a file does not end with a line feed."""
    with contextlib.suppress(PermissionError), path.open("rb") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"
    return False
