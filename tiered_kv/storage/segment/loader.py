"""Contents of a segment, from its footer or, without one, from its records.

Loading takes no lock and writes nothing, so it works on a segment in use. Such a file may grow,
shrink or vanish between two reads, which is reported as damage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tiered_kv.storage.disk.files import BLOCK, FileLayer

from .format import FooterEntry, FormatError, SegmentHeader, most_segment_bytes
from .headers import parse_footer, parse_segment_header, parse_trailer, segment_header_bytes
from .record import read_blocks
from .scanner import scan

_START_BYTES = 64 << 10
END_BYTES = 512 << 10
"""Number of bytes read in one call from the end of a segment. Most footers are shorter."""


class BlankSegment(FormatError):
    """A segment without a header: it is new, or its process died before writing the header."""


@dataclass(frozen=True, slots=True)
class LoadedSegment:
    """Contents of a segment.

    Attributes:
        entries: records in file order; for a sealed segment, the records live when it was sealed.
        end: end of the last record, bytes.
        size: size of the file, bytes.
        sealed: True if a footer was found. Otherwise the records were scanned: records of the last
            group in full, other records by their headers. Torn records are left out.
    """

    header: SegmentHeader
    entries: list[FooterEntry]
    end: int
    size: int
    sealed: bool


def load_segment(
    files: FileLayer, fd: int, check: Callable[[SegmentHeader], None] | None = None
) -> LoadedSegment:
    """Load the contents of an open segment.

    Args:
        check: called with the header before anything else is read.

    Raises:
        BlankSegment: the segment has no header yet.
        FormatError: the header is incomplete or damaged, or the file is longer than any segment; or
            ``check`` raised a ``FormatError``.
        OSError: the disk failed.
    """
    size = files.size(fd)
    whole = size // BLOCK * BLOCK
    start = read_blocks(files, fd, 0, min(whole, _START_BYTES))
    if not any(start[:BLOCK]):
        raise BlankSegment("the segment has no header")
    header_bytes = segment_header_bytes(start)
    if len(start) < header_bytes <= whole:
        start = read_blocks(files, fd, 0, header_bytes)
    header = parse_segment_header(start)
    if check is not None:
        check(header)
    if size > most_segment_bytes(header.page_format):
        raise FormatError("the file is longer than a segment can be")
    try:
        entries = _footer(files, fd, header, size)
    except (FormatError, OSError):
        entries = scan(files, fd, header, whole)
        sealed = False
    else:
        sealed = True
    end = entries[-1].offset + entries[-1].nbytes if entries else header_bytes
    return LoadedSegment(header, entries, end, size, sealed)


def _footer(files: FileLayer, fd: int, header: SegmentHeader, size: int) -> list[FooterEntry]:
    if size % BLOCK:
        raise FormatError("the segment is not sealed")
    known_from = max(header.header_bytes, size - END_BYTES)
    if known_from >= size:
        raise FormatError("the segment ends after its header")
    end = read_blocks(files, fd, known_from, size - known_from)
    offset = parse_trailer(header, size, end)
    if offset < header.header_bytes:
        raise FormatError("the footer overlaps the header")
    if offset < known_from:
        return parse_footer(header, read_blocks(files, fd, offset, size - offset))
    return parse_footer(header, end[offset - known_from :])
