"""Files of a trace: the newest has its name, older ones have a number behind it, 1 the newest."""

from __future__ import annotations

import contextlib
from pathlib import Path

FILE_BYTES = 64 << 20
"""Size that a file does not exceed. A turn takes about half a KiB, so it has some 120,000. A step
takes some 200 bytes."""
FILES = 8
"""Files that are kept; the oldest is deleted for a new one."""


def steps_of(path: Path) -> Path:
    """The newest file of a trace's steps, which are in files of their own."""
    return path.with_name(f"{path.name}.steps")


def files_of(path: Path) -> list[Path]:
    """The files of a trace that may be there, the newest first."""
    return [path, *(_older(path, age) for age in range(1, FILES))]


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


def _older(path: Path, age: int) -> Path:
    return path.with_name(f"{path.name}.{age}")
