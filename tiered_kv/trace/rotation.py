"""Files of a trace: the newest has the trace's name, older files have a numeric suffix from 1."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

FILE_BYTES = 64 << 20
"""Maximum size of a file, bytes. A turn takes about half a KiB, so a file has some 120,000 turns. A
step takes some 200 bytes."""
FILES = 8
"""Number of files kept. The oldest is deleted when a new one is created."""


PACKED = ".gz"
"""Suffix of a file that was compressed with gzip."""


def steps_of(path: Path) -> Path:
    """The newest file of a trace's steps, which are in separate files."""
    return path.with_name(f"{path.name}.steps")


def steps_to_read(path: Path) -> Path:
    """The newest file of a trace's steps, for a trace whose own newest file may be compressed."""
    named = steps_of(path)
    return named if named.exists() else steps_of(_unpacked(path))


def files_of(path: Path) -> list[Path]:
    """All possible files of a trace, newest first."""
    return [path, *(_older(path, age) for age in range(1, FILES))]


def files_to_read(path: Path) -> Iterator[Path]:
    """Existing files of a trace, newest first. Each may be compressed with gzip. If both versions
    of a file exist, only one is returned."""
    plain = _unpacked(path)
    for age in range(FILES):
        names = (path, plain) if age == 0 else (_older(path, age), _older(plain, age))
        for name in (*names, _packed(names[-1])):
            if name.exists():
                yield name
                break


def make_room(path: Path) -> None:
    """Rename every file to the next number, so that a new one can be created. Deletes the oldest.

    A number may be unused if a file was deleted, or a process ended in between.

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
