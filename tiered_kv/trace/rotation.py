"""Files of a trace: the newest has its name, older ones have a number behind it, 1 the newest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

FILE_BYTES = 64 << 20
"""Size that a file does not exceed. A turn takes about half a KiB, so it has some 120,000. A step
takes some 200 bytes."""
FILES = 8
"""Files that are kept; the oldest is deleted for a new one."""


PACKED = ".gz"
"""End of the name of a file that somebody packed."""


def steps_of(path: Path) -> Path:
    """The newest file of a trace's steps, which are in files of their own."""
    return path.with_name(f"{path.name}.steps")


def steps_to_read(path: Path) -> Path:
    """The newest file of the steps of a trace that is read, whose own newest file may be packed."""
    named = steps_of(path)
    return named if named.exists() else steps_of(_unpacked(path))


def files_of(path: Path) -> list[Path]:
    """The files of a trace that may be there, the newest first."""
    return [path, *(_older(path, age) for age in range(1, FILES))]


def files_to_read(path: Path) -> Iterator[Path]:
    """The files of a trace that are there, the newest first. Each may have been packed with gzip;
    one that is there twice is given once."""
    plain = _unpacked(path)
    for age in range(FILES):
        names = (path, plain) if age == 0 else (_older(path, age), _older(plain, age))
        for name in (*names, _packed(names[-1])):
            if name.exists():
                yield name
                break


def make_room(path: Path) -> None:
    """Move every file one place on, so that a new one can be begun; the oldest is gone.

    A place may be empty, where somebody deleted a file or a process ended in between.

    Raises:
        OSError: the folder cannot be written to.
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
