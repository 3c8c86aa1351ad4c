"""Files of a trace: the newest file has the trace's name, and older files have a numeric suffix
from 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

FILE_BYTES = 64 << 20
"""Maximum size of a file, bytes. A turn takes about half a KiB, so a file has about 120,000 turns.
A step takes about 200 bytes."""
FILES = 8
"""Number of files that are kept. The oldest file is deleted when another one is created."""


PACKED = ".gz"
"""Suffix of a file that was compressed with gzip."""


def steps_of(path: Path) -> Path:
    """Return the path of the newest file with a trace's steps, which have separate files."""
    return path.with_name(f"{path.name}.steps")


def steps_to_read(path: Path) -> Path:
    """Return the path of the newest file with a trace's steps, also if ``path`` names a compressed
    file of the trace.
    """
    named = steps_of(path)
    return named if named.exists() else steps_of(_unpacked(path))


def files_of(path: Path) -> list[Path]:
    """Return the paths of all files that a trace can have, newest first."""
    return [path, *(_older(path, age) for age in range(1, FILES))]


def files_to_read(path: Path) -> Iterator[Path]:
    """Yield the existing files of a trace, newest first. Each file may be compressed with gzip. If
    a file exists both plain and compressed, only one of the two is yielded.
    """
    plain = _unpacked(path)
    for age in range(FILES):
        names = (path, plain) if age == 0 else (_older(path, age), _older(plain, age))
        for name in (*names, _packed(names[-1])):
            if name.exists():
                yield name
                break


def make_room(path: Path) -> None:
    """Rename every file to the next number, so that a new file can be created, and delete the
    oldest.

    A number is unused if its file was deleted, or if a process was killed while renaming.

    Raises:
        OSError: the folder cannot be written.
    """
    files = files_of(path)
    for newer, older in zip(files[-2::-1], files[:0:-1], strict=True):
        with contextlib.suppress(FileNotFoundError):
            newer.replace(older)


def _packed(path: Path) -> Path:
    return path.with_name(f"{path.name}{PACKED}")


def _unpacked(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(PACKED))


def _older(path: Path, age: int) -> Path:
    return path.with_name(f"{path.name}.{age}")
