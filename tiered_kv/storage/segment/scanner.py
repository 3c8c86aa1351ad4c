"""Finds the records of an unsealed segment, whatever state the segment was left in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tiered_kv.storage.disk.files import BLOCK, FileLayer

from .format import RECORD_MAGIC, FooterEntry, FormatError, RecordHeader, SegmentHeader
from .headers import parse_record_header
from .record import open_record, read_blocks

_READ_BYTES = 1 << 20
_SMALL_BYTES = 128 << 10
"""Size up to which a record is read together with its neighbours, bytes. Of a larger record, only
the header is read."""


def scan(files: FileLayer, fd: int, header: SegmentHeader, size: int) -> list[FooterEntry]:
    """Locate the records, in file order.

    Records of the last group are read in full, since the process may have died while writing them.
    The other records are found by their headers. A damaged record does not hide the records after
    it.

    Args:
        size: size of the file, in whole blocks, bytes.

    Raises:
        OSError: the disk failed.
    """
    segment = _Segment(files, fd, header, size)
    found = list(segment.records())
    last_group = found[-1][1].group if found else 0
    return [
        FooterEntry(record.key, at, record.plane_bytes, record.frame_bytes, record.written)
        for at, record in found
        if record.ordinal < last_group or segment.is_whole(at, record)
    ]


@dataclass(slots=True)
class _Window:
    """The bytes that were last read from a file of ``size`` bytes."""

    files: FileLayer
    fd: int
    size: int
    begin: int = 0
    content: memoryview = field(default_factory=lambda: memoryview(b""))

    def from_(self, offset: int, nbytes: int) -> memoryview:
        """Return whole blocks starting at ``offset``, at least one. If these blocks are not
        buffered yet, reads ``nbytes`` bytes."""
        if not self.begin <= offset < self.begin + len(self.content):
            nbytes = min(nbytes, self.size - offset)
            self.content = read_blocks(self.files, self.fd, offset, nbytes)
            self.begin = offset
        return self.content[offset - self.begin :]


@dataclass(frozen=True, slots=True)
class _Segment:
    """A file that starts with a segment header."""

    files: FileLayer
    fd: int
    header: SegmentHeader
    size: int

    def records(self) -> Iterator[tuple[int, RecordHeader]]:
        """Yield every record in order, with its offset."""
        window = _Window(self.files, self.fd, self.size)
        offset, ordinal, ahead = self.header.header_bytes, 0, BLOCK
        while offset < self.size:
            start = window.from_(offset, ahead)[:BLOCK]
            record = self._parse(start, ordinal, self.size - offset)
            if record is None:
                later = self._search(window, offset + BLOCK, ordinal)
                if later is None:
                    return
                offset, record = later
            yield offset, record
            offset, ordinal = offset + record.nbytes, record.ordinal + 1
            ahead = _READ_BYTES if record.nbytes <= _SMALL_BYTES else BLOCK

    def is_whole(self, offset: int, record: RecordHeader) -> bool:
        stored = read_blocks(self.files, self.fd, offset, record.nbytes)
        try:
            open_record(self.header, record.key, stored)
        except FormatError:
            return False
        return True

    def _parse(self, start: memoryview, least: int, room: int) -> RecordHeader | None:
        """Parse a record with an ordinal of at least ``least`` that fits into ``room`` bytes.
        Returns None if there is no such record."""
        try:
            record = parse_record_header(self.header, start)
        except FormatError:
            return None
        return record if record.ordinal >= least and record.nbytes <= room else None

    def _search(self, window: _Window, offset: int, least: int) -> tuple[int, RecordHeader] | None:
        """Return the next record from ``offset`` on whose ordinal is at least ``least``, with its
        offset; None if there is no such record. Used to skip damage."""
        while offset < self.size:
            chunk = window.from_(offset, _READ_BYTES)
            firsts = np.frombuffer(chunk, "S4")[:: BLOCK // 4]
            for at in (np.flatnonzero(firsts == RECORD_MAGIC) * BLOCK).tolist():
                room = self.size - offset - at
                record = self._parse(chunk[at : at + BLOCK], least, room)
                if record is not None:
                    return offset + at, record
            offset += len(chunk)
        return None
