"""Lock of a memory file: one process has the file, and the file says which.

The lock is flock on the file itself, so that it goes with the process, however that ends. The
descriptor is not the one that the file is mapped by: Python keeps a copy of that, which a forked
child would inherit, and the lock with it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from tiered_kv.errors import ConfigError
from tiered_kv.json_fields import mapping, read_json
from tiered_kv.storage.disk.files import BLOCK, open_plain
from tiered_kv.storage.store.locks import RETRY_S, try_lock

from .memory_format import OWNER_AT

SETTING = "TIERED_KV_CPU_PATH"
"""Variable that names the folder of memory files."""

_TRIES = 5
_MOST_OF_COMMAND = 500


class MemoryBusyError(ConfigError):
    """Another process has the file."""


def lock_file(path: Path, *, make: bool) -> int:
    """Open a file and lock it for as long as the descriptor is open.

    Args:
        make: make an empty file if there is none.

    Raises:
        MemoryBusyError: another process has it; the sentence names that.
        OSError: the file is missing, or cannot be opened.
    """
    flags = os.O_RDWR | (os.O_CREAT if make else 0)
    for _ in range(_TRIES):
        fd = open_plain(path, flags)
        if try_lock(fd) and is_current(fd, path):
            return fd
        os.close(fd)
        time.sleep(RETRY_S)  # somebody may only be looking, or deleting it
    raise MemoryBusyError(
        f"{path} is in use by {owner_in_words(read_owner(path))}: stop it, or give this engine "
        f"another {SETTING}"
    )


def is_current(fd: int, path: Path) -> bool:
    """True if an open file is still the one of that name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.lstat())
    return False


def owner_words() -> bytes:
    """Words of this process about itself, for the file."""
    words = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": " ".join(sys.argv)[:_MOST_OF_COMMAND],
    }
    text = json.dumps(words).encode()
    if len(text) > BLOCK - OWNER_AT:  # of characters that JSON makes long
        text = json.dumps({**words, "command": ""}).encode()
    return text.ljust(BLOCK - OWNER_AT, b"\0")


def parse_owner(block: bytes) -> dict[str, object]:
    """Parse the words in a file's first block; empty if there are none, or they are torn."""
    try:
        return dict(mapping(read_json(block[OWNER_AT:BLOCK].rstrip(b"\0"))))
    except ValueError:
        return {}


def read_owner(path: Path) -> dict[str, object]:
    """Read the words of the process that has or had a file; empty if unknown."""
    try:
        fd = open_plain(path, os.O_RDONLY)
        try:
            return parse_owner(os.pread(fd, BLOCK, 0))
        finally:
            os.close(fd)
    except OSError:
        return {}


def owner_in_words(owner: dict[str, object]) -> str:
    """Phrase that names a process."""
    try:
        return "process {pid} on {host} ({command}) since {since}".format(**owner)
    except KeyError:
        return "another process"
