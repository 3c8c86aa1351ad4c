"""File locks, and descriptions of the processes that hold them.

A lock is flock on an open file: a lock file next to the data, or the data file itself. It lasts
until the descriptor is closed, so it ends with its process, however the process ends. A descriptor
that is also mapped or inherited keeps the lock longer.

The library filelock (4.2) is not used, because it could only replace ``try_lock`` and ``unlock``,
10 lines, and takes 10 ms to import. Its locks do not name their owner, cannot be tested without
being acquired, require write access even for a test, and do not detect that the locked file was
replaced.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from errno import EACCES, EWOULDBLOCK
from pathlib import Path

from .json_fields import mapping, read_json
from .plain_files import open_plain, opened

RETRY_S = 0.01
"""Pause between two attempts to lock, seconds."""
TRIES = 5
MOST_OWNER_BYTES = 64 << 10
_MOST_OF_COMMAND = 500


def try_lock(fd: int) -> bool:
    """Lock an open file for as long as it stays open. Returns False if the file is locked through
    another descriptor.

    Raises:
        OSError: the file system does not support locks.
    """
    return _flock(fd, fcntl.LOCK_EX)


def _flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (EWOULDBLOCK, EACCES):
            return False
        raise
    return True


def unlock(fd: int) -> None:
    """Unlock an open file, including copies of its descriptor.

    A forked child process has such a copy until it executes another program.
    """
    fcntl.flock(fd, fcntl.LOCK_UN)


def open_locked(path: Path, flags: int, tries: int = TRIES) -> int | None:
    """Open a plain file and lock it. Returns its descriptor; None if every attempt found that
    another process had locked the file, or that another file had replaced it.

    Args:
        tries: number of attempts, since a process that tests the lock holds it for a moment.

    Raises:
        OSError: the file is missing or cannot be opened, or the file system does not support locks.
    """
    for attempt in range(tries):
        if attempt:
            time.sleep(RETRY_S)
        fd, locked = open_plain(path, flags), False
        try:
            locked = try_lock(fd) and is_current(fd, path)
        finally:
            if not locked:
                os.close(fd)
        if locked:
            return fd
    return None


def is_current(fd: int, path: Path) -> bool:
    """True if the file at ``path`` is still the file that is open as ``fd``."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


def is_locked(path: Path) -> bool:
    """True if a process has locked the file. To test this, the file need only be readable.

    Raises:
        OSError: the file is missing, or cannot be read.
    """
    with opened(path) as fd:
        return not _flock(fd, fcntl.LOCK_SH)


def describe_owner(most: int = MOST_OWNER_BYTES) -> bytes:
    """Describe this process in at most ``most`` bytes of JSON, to be written to its locked file."""
    words = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": " ".join(sys.argv)[:_MOST_OF_COMMAND],
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    text = json.dumps(words).encode()
    # Characters outside ASCII take up to 12 bytes.
    return text if len(text) <= most else json.dumps({**words, "command": ""}).encode()


def read_owner(path: Path, offset: int = 0, nbytes: int = MOST_OWNER_BYTES) -> Mapping[str, object]:
    """Read the description that a process wrote to its locked file at ``offset``, padded with
    zeros. The process may have ended. Returns an empty mapping if the description is missing or
    incomplete."""
    try:
        with opened(path) as fd:
            return dict(mapping(read_json(os.pread(fd, nbytes, offset).rstrip(b"\0"))))
    except (OSError, ValueError):
        return {}


def owner_in_words(owner: Mapping[str, object]) -> str:
    """Return a phrase that names a process, its host, its command and its start time; "another
    process" if ``owner`` lacks one of these."""
    try:
        return "process {pid} on {host} ({command}) since {since}".format_map(owner)
    except KeyError:
        return "another process"


def short_owner(owner: Mapping[str, object]) -> str:
    """Return a phrase that names a process and its host."""
    if "pid" not in owner:
        return "another process"
    return f"process {owner['pid']} on {owner.get('host', 'another host')}"
