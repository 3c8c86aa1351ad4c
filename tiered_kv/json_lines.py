"""Files that users name, with JSON on each line: plain or gzipped."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

GZIPPED = b"\x1f\x8b"
"""First bytes of gzipped data."""


def open_lines(path: Path) -> IO[bytes]:
    """Open a file for reading; of gzipped data, whatever the file is called, what was packed.

    Read it with ``lines_of``, whose errors are the same for both.

    Raises:
        OSError: the file cannot be opened.
    """
    file = path.open("rb")
    try:
        is_packed = file.peek(len(GZIPPED)).startswith(GZIPPED)
    except BaseException:
        file.close()
        raise
    return cast("IO[bytes]", _Unpacked(file)) if is_packed else file


def lines_of(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of an open file, each with its end. A line ends with a line feed and with nothing
    else: in a text of JSON, U+2028 and U+0085 may stand as they are.

    Raises:
        OSError: the file cannot be read.
        ValueError: its gzipped data is damaged or cut off. The lines before that were given.
    """
    try:
        yield from file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError("the gzipped data is damaged or cut off") from error


class _Unpacked(gzip.GzipFile):
    """Reads gzipped data, and closes the file that holds it."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._packed = file

    def close(self) -> None:
        super().close()
        self._packed.close()
