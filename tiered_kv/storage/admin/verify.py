"""Verification of a store by reading every page.

A store can be verified while another process has it open. Records are made durable in groups. In a
segment without a footer, which is being written or was left by a killed process, incomplete records
of the last group are not reported: the process may have been writing them, and no process reads
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tiered_kv.codecs.base import Bytes, Codec
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.aligned import aligned_bytes
from tiered_kv.storage.disk.files import BLOCK, RealFiles, read_exactly
from tiered_kv.storage.segment.format import (
    TRAILER_BYTES,
    FooterEntry,
    FormatError,
    RecordHeader,
    footer_bytes,
)
from tiered_kv.storage.segment.headers import (
    pack_footer,
    pack_record_header,
    pack_segment_header,
    parse_record_header,
    parse_trailer,
)
from tiered_kv.storage.segment.loader import LoadedSegment
from tiered_kv.storage.segment.record import decode_record, read_blocks

from .inventory import StoreInfo, codec_of, faults_noted, opened_segment

_FILES = RealFiles()


@dataclass(frozen=True, slots=True)
class BadPage:
    """A damaged page.

    Attributes:
        key: key of the page; None if the key itself cannot be read.
    """

    segment: Path
    offset: int
    key: PageKey | None
    reason: str


@dataclass(slots=True)
class VerifyResult:
    """Result of verifying segments.

    Attributes:
        segments, pages: number of segments and of pages that were checked.
        nbytes: bytes read.
        bad_segments: faults of whole segments, by path: the segment is unreadable, or its header
            or footer is damaged.
    """

    segments: int = 0
    pages: int = 0
    nbytes: int = 0
    bad_pages: list[BadPage] = field(default_factory=list)
    bad_segments: dict[Path, str] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return not (self.bad_pages or self.bad_segments)

    def confirming(self, earlier: VerifyResult) -> VerifyResult:
        """Return this result with only the faults that an earlier check also found. A store in
        use writes, seals and deletes segments, and a check may read intermediate states. Real
        damage is found twice."""
        both = {path for path in self.bad_segments if path in earlier.bad_segments}
        return replace(
            self,
            bad_pages=[bad for bad in self.bad_pages if bad in earlier.bad_pages],
            bad_segments={path: self.bad_segments[path] for path in both},
        )

    def add(self, other: VerifyResult) -> None:
        """Add another result to this result."""
        self.segments += other.segments
        self.pages += other.pages
        self.nbytes += other.nbytes
        self.bad_pages += other.bad_pages
        self.bad_segments |= other.bad_segments


def verify_store(info: StoreInfo, advance: Callable[[int], None]) -> VerifyResult:
    """Read and check every page of a store.

    Args:
        advance: called with the size of each finished segment, bytes.
    """
    checked = VerifyResult()
    for path in info.segments:
        found = _check_segment(info, path)
        if not found.good:
            found = _check_segment(info, path).confirming(found)
        checked.add(found)
        with suppress(OSError):  # the segment has vanished, or cannot be read
            advance(path.lstat().st_size)
    return checked


def _check_segment(info: StoreInfo, path: Path) -> VerifyResult:
    found = VerifyResult()
    with faults_noted(path, found.bad_segments), opened_segment(info, path) as (fd, loaded):
        found.segments += 1
        with faults_noted(path, found.bad_segments):
            _check_frame(fd, loaded)
        records = _check_records(fd, path, loaded, found)
        if not loaded.sealed:
            found.bad_pages += _lost(path, loaded, records)
    return found


def _check_frame(fd: int, loaded: LoadedSegment) -> None:
    """Check the header and the footer, padding included.

    Raises:
        FormatError: the header or the footer differs from what was written, or the file is
            truncated.
    """
    header = loaded.header
    if read_blocks(_FILES, fd, 0, header.header_bytes) != pack_segment_header(header):
        raise FormatError("the padding after the segment's header is not zero")
    if not loaded.sealed:
        if _ends_like_sealed(fd, loaded):
            raise FormatError(
                "the footer is damaged, so the pages were found by scanning the records"
            )
        if _is_cut_off(fd, loaded):
            raise FormatError("the file is truncated, so the pages after its end are lost")
        return
    offset = parse_trailer(header, loaded.size, read_blocks(_FILES, fd, loaded.size - BLOCK, BLOCK))
    footer = read_blocks(_FILES, fd, offset, loaded.size - offset)
    if footer != pack_footer(header, offset, loaded.entries):
        raise FormatError("the padding of the footer is not zero")


def _ends_like_sealed(fd: int, loaded: LoadedSegment) -> bool:
    """Return True if the file ends with a trailer, even a damaged one, which is recognized by its
    magic or its nonce."""
    size = loaded.size // BLOCK * BLOCK
    trailer = bytes(read_blocks(_FILES, fd, size - BLOCK, BLOCK)[-TRAILER_BYTES:])
    nonce = loaded.header.nonce.to_bytes(8, "little")
    return trailer[8:16] == nonce or trailer.startswith(b"TKVFOOT")


def _is_cut_off(fd: int, loaded: LoadedSegment) -> bool:
    """Return True if the file was truncated: it ends within a record, or lacks space for a
    footer."""
    keys = sum(len(entry.key) for entry in loaded.entries)
    room = loaded.size - loaded.end
    if loaded.size % BLOCK or room < footer_bytes(len(loaded.entries), keys):
        return True
    try:
        start = read_blocks(_FILES, fd, loaded.end, BLOCK)
        return parse_record_header(loaded.header, start).nbytes > room
    except FormatError:
        return False


def _check_records(
    fd: int, path: Path, loaded: LoadedSegment, checked: VerifyResult
) -> dict[int, RecordHeader]:
    """Read and check the records of a segment. Returns the headers of the good records, by offset.
    The bad records, and the numbers of pages and bytes, are added to ``checked``.

    Raises:
        FormatError: the codec of the segment is unknown.
    """
    codec = codec_of(loaded.header)
    page = np.empty(loaded.header.page_format.page_bytes, np.uint8)
    buffer = aligned_bytes(max((entry.nbytes for entry in loaded.entries), default=0))
    good = {}
    for entry in loaded.entries:
        checked.pages += 1
        checked.nbytes += entry.nbytes
        stored = buffer.data[: entry.nbytes]
        try:
            read_exactly(_FILES, fd, [stored], entry.offset)
            good[entry.offset] = _check_record(loaded, codec, entry, stored, page)
        except (OSError, FormatError) as error:
            checked.bad_pages.append(BadPage(path, entry.offset, entry.key, str(error)))
        _FILES.uncache(fd, entry.offset, entry.nbytes)
    return good


def _check_record(
    loaded: LoadedSegment, codec: Codec, entry: FooterEntry, stored: memoryview, page: Bytes
) -> RecordHeader:
    record = decode_record(loaded.header, codec, entry.key, stored, page)
    if (record.plane_bytes, record.frame_bytes) != (entry.plane_bytes, entry.frame_bytes):
        raise FormatError("the length of the record differs from its length in the footer")
    header = pack_record_header(loaded.header, record)
    end = len(header) + entry.stored_bytes
    if stored[: len(header)] != header or np.any(np.frombuffer(stored[end:], np.uint8)):
        raise FormatError("the padding of the record is damaged, but the page itself is intact")
    return record


def _lost(path: Path, loaded: LoadedSegment, good: Mapping[int, RecordHeader]) -> Iterator[BadPage]:
    """Yield the gaps between the records of a scanned segment, as damaged pages. Gaps in the last
    group are left out, because its records are written in parallel."""
    last_group = max((record.group for record in good.values()), default=0)
    end, ordinal = loaded.header.header_bytes, 0
    for entry in loaded.entries:
        if entry.offset > end and ordinal < last_group:
            yield BadPage(path, end, None, "no record can be read here")
        end = entry.offset + entry.nbytes
        ordinal = 1 + (good[entry.offset].ordinal if entry.offset in good else ordinal)
