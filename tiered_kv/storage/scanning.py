"""Finding the records of a segment that was never sealed, whatever became of its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tiered_kv.storage.files import BLOCK, FileLayer
from tiered_kv.storage.records import open_record, read_blocks
from tiered_kv.storage.segment_format import (
    RECORD_MAGIC,
    FooterEntry,
    FormatError,
    RecordHeader,
    SegmentHeader,
    parse_record_header,
)

_SEARCH_BYTES = 1 << 20


def scan(files: FileLayer, fd: int, header: SegmentHeader, size: int) -> list[FooterEntry]:
    """Where the records lie, in the order of the file.

    Those of the last group are read in whole, since the process may have died while it wrote
    them; the others are found by their headers alone. Behind a damaged one no other is lost.

    Args:
        size: of the file, in whole blocks.

    Raises:
        OSError: the disk failed.
    """
    segment = _Segment(files, fd, header, header.table_id, size)
    found = list(segment.records())
    last_group = found[-1][1].group if found else 0
    return [
        FooterEntry(record.key, at, record.plane_bytes, record.frame_bytes, record.written)
        for at, record in found
        if record.ordinal < last_group or segment.is_whole(at, record)
    ]


@dataclass(frozen=True, slots=True)
class _Segment:
    """A file that begins like a segment."""

    files: FileLayer
    fd: int
    header: SegmentHeader
    table_id: int
    size: int

    def records(self) -> Iterator[tuple[int, RecordHeader]]:
        """Every record from the first on, and where it begins."""
        offset, ordinal = self.header.header_bytes, 0
        while offset < self.size:
            start = read_blocks(self.files, self.fd, offset, BLOCK)
            record = self._parse(start, ordinal, self.size - offset)
            if record is None:
                later = self._search(offset + BLOCK, ordinal)
                if later is None:
                    return
                offset, record = later
            yield offset, record
            offset, ordinal = offset + record.nbytes, record.ordinal + 1

    def is_whole(self, offset: int, record: RecordHeader) -> bool:
        stored = read_blocks(self.files, self.fd, offset, record.nbytes)
        try:
            open_record(self.header, self.table_id, record.key, stored)
        except FormatError:
            return False
        return True

    def _parse(self, start: memoryview, least: int, room: int) -> RecordHeader | None:
        """The record that begins so, if its ordinal is at least that, and it has room."""
        try:
            record = parse_record_header(self.header, self.table_id, start)
        except FormatError:
            return None
        return record if record.ordinal >= least and record.nbytes <= room else None

    def _search(self, offset: int, least: int) -> tuple[int, RecordHeader] | None:
        """The next record behind something that is none, and where it begins."""
        while offset < self.size:
            nbytes = min(_SEARCH_BYTES, self.size - offset)
            chunk = read_blocks(self.files, self.fd, offset, nbytes)
            firsts = np.frombuffer(chunk, "S4")[:: BLOCK // 4]
            for at in (np.flatnonzero(firsts == RECORD_MAGIC) * BLOCK).tolist():
                room = self.size - offset - at
                record = self._parse(chunk[at : at + BLOCK], least, room)
                if record is not None:
                    return offset + at, record
            offset += nbytes
        return None
