"""Files of snapshots: names, durable writes, bounded reads, and error messages."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from tiered_kv.codecs.base import Bytes
from tiered_kv.plain_files import FOLDER_MODE, opened, write_all
from tiered_kv.storage.disk.files import RealFiles

from .manifest import SnapshotError

MANIFEST = "manifest.json"
PAGES = "pages"
POOL = ".pages"
ZIP = ".zip"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(name: str) -> None:
    """Check that a name is valid for a snapshot.

    Raises:
        SnapshotError: the name is empty, has more than 100 characters, contains other characters
            than letters, digits, dots, dashes and underscores, does not start with a letter or
            digit, or ends with ``.zip``.
    """
    if _NAME.fullmatch(name) is None:
        raise SnapshotError(
            f"{name!r:.120} is not a valid snapshot name: use 1 to 100 letters, digits, dots, "
            "dashes and underscores, and start with a letter or digit"
        )
    if name.lower().endswith(ZIP):
        raise SnapshotError(
            f"{name!r} is not a valid snapshot name: leave out {name[-4:]} at the end"
        )


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Convert errors of the operating system in a ``with`` block to ``SnapshotError``.

    Args:
        what: the operation that failed, as the beginning of the message.

    Raises:
        SnapshotError: the operating system reported an error.
    """
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise SnapshotError(f"{what}: {error.strerror or error}{where}") from error


def write_new(path: Path, parts: Iterable[bytes | memoryview], *, durable: bool = False) -> int:
    """Write a new file.

    Args:
        durable: True to sync the file. The file is durable once its folder is synced too.

    Returns:
        Size of the file, bytes.

    Raises:
        OSError: the file exists, or could not be written.
    """
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        nbytes = write_all(fd, parts)
        if durable:
            os.fsync(fd)
    return nbytes


def write_manifest(folder: Path, data: bytes) -> None:
    """Write the manifest of a snapshot's folder, and make the names of all files in the folder
    durable.

    Raises:
        OSError: the manifest exists, or could not be written.
    """
    write_new(folder / MANIFEST, [data], durable=True)
    for one in (folder / PAGES, folder):
        RealFiles().sync_folder(one)


def sync_file(path: Path) -> None:
    """Make the contents of a file durable, even if another process wrote them.

    Raises:
        OSError: the disk failed.
    """
    with opened(path) as fd:
        os.fsync(fd)


def make_folder(path: Path) -> None:
    """Create a folder that only its owner can access.

    Raises:
        OSError: the folder exists, or cannot be created.
    """
    path.mkdir(mode=FOLDER_MODE)


def fill(fd: int, offset: int, out: Bytes) -> None:
    """Read exactly ``out.nbytes`` bytes of a file.

    Raises:
        OSError: the disk failed.
        SnapshotError: the file is too short.
    """
    view, at = out.data, 0
    while at < view.nbytes:
        count = os.preadv(fd, [view[at:]], offset + at)
        if count == 0:
            raise SnapshotError(f"a file of the snapshot is {view.nbytes - at} bytes too short")
        at += count


def read_whole(fd: int, most: int, what: str) -> bytes:
    """Read a whole file of limited size.

    Raises:
        OSError: the disk failed.
        SnapshotError: the file is larger than ``most`` bytes.
    """
    size = os.fstat(fd).st_size
    if size > most:
        raise SnapshotError(f"{what} has {size} bytes, more than the maximum of {most}")
    data = np.empty(size, np.uint8)
    fill(fd, 0, data)
    return data.tobytes()
