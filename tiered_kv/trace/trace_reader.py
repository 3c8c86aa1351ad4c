"""Reader of a trace. It yields records from the oldest file to the newest, even while the trace is
written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Generic, TypeVar

from tiered_kv.json_fields import lines_of, open_lines, read_json

from .rotation import files_to_read
from .trace_header import TraceHeader
from .turn_record import TurnRecord

MOST_NAMED = 20
"""Maximum number of bad lines that are kept. Further bad lines are only counted."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not a record.

    Attributes:
        file: the file that contains the line.
        line: number of the line in its file, from 1.
        reason: why the line is not a record.
    """

    file: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


Record = TypeVar("Record")


class RecordReader(Generic[Record]):
    """Records in the files of a trace, each once, in the order in which they were written.

    An incomplete last line is skipped. Records of later schemas are read as far as this version
    knows their fields. A file may be compressed with gzip.

    Args:
        path: the newest file of a trace, or a single older file.
        read: creates a record from parsed JSON, or raises ``ValueError``.

    Attributes:
        headers: headers seen so far, one for each engine and file.
        bad: the first bad lines so far.
        bad_lines: number of bad lines so far.

    Raises:
        FileNotFoundError: on iteration, if the trace does not exist.
    """

    def __init__(self, path: Path, read: Callable[[object], Record]) -> None:
        self.path = path
        self._read = read
        self.headers: list[TraceHeader] = []
        self.bad: list[BadLine] = []
        self.bad_lines = 0

    def __iter__(self) -> Iterator[Record]:
        with ExitStack() as opened:
            for path, file in reversed(self._open_all(opened)):
                yield from self._records(path, file)

    def _open_all(self, opened: ExitStack) -> list[tuple[Path, IO[bytes]]]:
        """Open the files, newest first. A file that is rotated while the files are being opened can
        appear twice; the second occurrence is skipped.
        """
        files, seen = list[tuple[Path, IO[bytes]]](), set[tuple[int, int]]()
        for path in files_to_read(self.path):
            try:
                file = opened.enter_context(open_lines(path))
            except FileNotFoundError:
                continue
            found = os.fstat(file.fileno())
            if (found.st_dev, found.st_ino) not in seen:
                seen.add((found.st_dev, found.st_ino))
                files.append((path, file))
        if not files:
            raise FileNotFoundError(2, "there is no trace file", str(self.path))
        return files

    def _records(self, path: Path, file: IO[bytes]) -> Iterator[Record]:
        number = 0
        try:
            for number, line in enumerate(lines_of(file), start=1):
                if line == b"\n":
                    continue
                try:
                    found = read_json(line)
                    if isinstance(found, dict) and "schema" in found:
                        self.headers.append(TraceHeader.from_json(found))
                        continue
                    record = self._read(found)
                except ValueError as error:
                    if line.endswith(b"\n"):
                        self._note(BadLine(path, number, _reason(error)))
                    continue
                yield record
        except ValueError as error:  # an error of the file, not of a line
            self._note(BadLine(path, number + 1, str(error)))

    def _note(self, bad: BadLine) -> None:
        self.bad_lines += 1
        if len(self.bad) < MOST_NAMED:
            self.bad.append(bad)


class TraceReader(RecordReader[TurnRecord]):
    """The turns of a trace; see ``RecordReader``.

    Args:
        path: trace file (the value of ``TIERED_KV_TRACE``), or one file of a trace.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, TurnRecord.from_json)


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "the line is not JSON"
    return str(error)
