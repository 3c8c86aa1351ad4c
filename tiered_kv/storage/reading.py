"""Reading segments: what the store recovers from, and what tools look at.

Nothing here takes a lock or writes, so all of it works on a store that is in use: files
may then grow, shrink or vanish between two reads, which looks like damage and is reported
as such.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiered_kv.codecs.base import Bytes, Codec, EncodedPage, PageFormat
from tiered_kv.keys import PageKey
from tiered_kv.storage.aligned import aligned_bytes, payload_digest
from tiered_kv.storage.capacity import LOCK_NAME, SEGMENT_SUFFIX, is_locked, store_folders
from tiered_kv.storage.files import (
    BLOCK,
    Access,
    FileLayer,
    RealFiles,
    read_exactly,
)
from tiered_kv.storage.segment_format import (
    RECORD_MAGIC,
    FooterEntry,
    FormatError,
    RecordHeader,
    SegmentHeader,
    parse_footer,
    parse_record_header,
    parse_segment_header,
    parse_trailer,
    segment_header_bytes,
)

_START_BYTES = 64 << 10
_END_BYTES = 512 << 10
_SEARCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadedSegment:
    """What a segment holds.

    Attributes:
        entries: its records in the order of the file; of a sealed one, those that lived then.
        end: where the last record ends.
        size: of the file.
        sealed: whether a footer was found. If not, the records were scanned: all but those
            of the last group by their headers alone, and what was torn is left out.
    """

    header: SegmentHeader
    table_id: int
    entries: list[FooterEntry]
    end: int
    size: int
    sealed: bool


def load_segment(files: FileLayer, fd: int) -> LoadedSegment:
    """What an open segment holds.

    Raises:
        FormatError: it has no whole header.
        OSError: the disk failed.
    """
    size = files.size(fd)
    whole = size // BLOCK * BLOCK
    start = _read(files, fd, 0, min(whole, _START_BYTES))
    header_bytes = segment_header_bytes(start)
    if len(start) < header_bytes <= whole:
        start = _read(files, fd, 0, header_bytes)
    header = parse_segment_header(start)
    table_id = header.table_id
    try:
        entries = _footer(files, fd, header, size)
    except (FormatError, OSError):
        entries = _scan(files, fd, header, table_id, whole)
        sealed = False
    else:
        sealed = True
    end = entries[-1].offset + entries[-1].nbytes if entries else header_bytes
    return LoadedSegment(header, table_id, entries, end, size, sealed)


def _footer(files: FileLayer, fd: int, header: SegmentHeader, size: int) -> list[FooterEntry]:
    if size % BLOCK:
        raise FormatError("the segment is not sealed")
    known_from = max(header.header_bytes, size - _END_BYTES)
    if known_from >= size:
        raise FormatError("the segment ends with its header")
    end = _read(files, fd, known_from, size - known_from)
    offset = parse_trailer(header, size, end)
    if offset < header.header_bytes:
        raise FormatError("the footer lies in the header")
    if offset < known_from:
        return parse_footer(header, _read(files, fd, offset, size - offset))
    return parse_footer(header, end[offset - known_from :])


def _scan(
    files: FileLayer, fd: int, header: SegmentHeader, table_id: int, size: int
) -> list[FooterEntry]:
    """Every record from the first on. Those of the last group are read in whole, since the
    process may have died while it wrote them; before a damaged one no other may be lost."""
    found: list[tuple[int, RecordHeader]] = []
    offset, ordinal = header.header_bytes, 0
    while offset < size:
        start = _read(files, fd, offset, BLOCK)
        record = _record_at(header, table_id, start, ordinal, size - offset)
        if record is None:
            later = _search(files, fd, header, table_id, offset + BLOCK, size, ordinal)
            if later is None:
                break
            offset, record = later
        found.append((offset, record))
        offset, ordinal = offset + record.nbytes, record.ordinal + 1
    last_group = found[-1][1].group if found else 0
    return [
        FooterEntry(record.key, at, record.plane_bytes, record.frame_bytes, record.written)
        for at, record in found
        if record.ordinal < last_group or _is_whole(files, fd, header, table_id, at, record)
    ]


def _record_at(
    header: SegmentHeader, table_id: int, start: memoryview, least: int, room: int
) -> RecordHeader | None:
    """The record that begins so, if its ordinal is at least that, and it has room."""
    try:
        record = parse_record_header(header, table_id, start)
    except FormatError:
        return None
    return record if record.ordinal >= least and record.nbytes <= room else None


def _search(
    files: FileLayer,
    fd: int,
    header: SegmentHeader,
    table_id: int,
    offset: int,
    size: int,
    ordinal: int,
) -> tuple[int, RecordHeader] | None:
    """The next record behind something that is none, and where it begins."""
    while offset < size:
        chunk = _read(files, fd, offset, min(_SEARCH_BYTES, size - offset))
        firsts = np.frombuffer(chunk, "S4")[:: BLOCK // 4]
        for at in (np.flatnonzero(firsts == RECORD_MAGIC) * BLOCK).tolist():
            start = chunk[at : at + BLOCK]
            record = _record_at(header, table_id, start, ordinal, size - offset - at)
            if record is not None:
                return offset + at, record
        offset += len(chunk)
    return None


def _is_whole(
    files: FileLayer,
    fd: int,
    header: SegmentHeader,
    table_id: int,
    offset: int,
    record: RecordHeader,
) -> bool:
    try:
        open_record(header, table_id, record.key, _read(files, fd, offset, record.nbytes))
    except FormatError:
        return False
    return True


def _read(files: FileLayer, fd: int, offset: int, nbytes: int) -> memoryview:
    buffer = aligned_bytes(nbytes).data[:nbytes]
    read_exactly(files, fd, buffer, offset)
    return buffer


def open_record(
    header: SegmentHeader, table_id: int, key: PageKey, record: memoryview
) -> tuple[RecordHeader, EncodedPage]:
    """The stored page in the bytes of a record, which it aliases.

    Raises:
        FormatError: they are no record of that page and segment, or damaged.
    """
    found = parse_record_header(header, table_id, record)
    if found.key != key:
        raise FormatError("a record of another page")
    middle = found.header_bytes + found.plane_bytes
    end = middle + found.frame_bytes
    if end > len(record):
        raise FormatError("the record is cut off")
    if payload_digest(record[found.header_bytes : end]) != found.digest:
        raise FormatError("the page is damaged")
    payload = np.frombuffer(record, np.uint8)
    return found, EncodedPage(payload[found.header_bytes : middle], payload[middle:end])


def decode_record(
    header: SegmentHeader,
    table_id: int,
    codec: Codec,
    key: PageKey,
    record: memoryview,
    out: Bytes,
) -> RecordHeader:
    """Check the bytes of a record and decode its page into ``out``.

    Raises:
        FormatError: they are no whole record of that page; ``out`` may hold anything.
    """
    found, encoded = open_record(header, table_id, key, record)
    try:
        codec.decode(encoded, out)
    except Exception as error:
        # CodecError by contract; but whatever a codec thinks of a page, its neighbours must not
        # suffer from it.
        raise FormatError(f"the page cannot be decoded: {error}") from error
    return found


# -- for tools --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """A store under a root.

    Attributes:
        locked: whether a process has it open.
        holder: what that process (or the last one) says of itself; empty if unknown.
        last_use: seconds since 1970.
        segments: paths of its segments, oldest first.
        nbytes: of the segments on disk.
    """

    path: Path
    fingerprint: bytes
    replica: int
    rank: int
    locked: bool
    holder: dict[str, object]
    last_use: float
    segments: tuple[Path, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """A record of a store.

    Attributes:
        written: seconds since 1970; the age of the page follows from it.
        nbytes: room the record takes, of which ``stored_bytes`` are the encoded page.
    """

    key: PageKey
    path: Path
    segment: int
    offset: int
    nbytes: int
    stored_bytes: int
    raw_bytes: int
    written: int
    codec_id: int


def list_stores(root: Path) -> list[StoreInfo]:
    """Every store under a root, the one used last at the end."""
    stores = []
    for folder in store_folders(root):
        fingerprint, place = folder.parent.name, folder.name
        try:
            replica, rank = (int(number) for number in place.split("-"))
            paths = sorted(path for path in folder.iterdir() if path.suffix == SEGMENT_SUFFIX)
            lock = folder / LOCK_NAME
            stores.append(
                StoreInfo(
                    path=folder,
                    fingerprint=bytes.fromhex(fingerprint),
                    replica=replica,
                    rank=rank,
                    locked=is_locked(lock),
                    holder=_holder(lock),
                    last_use=lock.stat().st_mtime,
                    segments=tuple(paths),
                    nbytes=sum(path.stat().st_size for path in paths),
                )
            )
        except (OSError, ValueError):
            continue  # no store, or one that vanished meanwhile
    return sorted(stores, key=lambda store: store.last_use)


def _holder(lock: Path) -> dict[str, object]:
    try:
        holder = json.loads(lock.read_text())
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


class SegmentFile:
    """A segment that is only looked at. A context manager.

    Attributes:
        header: what the segment says of itself.
        sealed: whether it has a footer.
        records: its records in the order they were written.

    Raises:
        FormatError: it is no segment.
        OSError: it cannot be read, or is gone.
    """

    def __init__(self, path: Path, files: FileLayer | None = None) -> None:
        self.path = path
        self._files = files or RealFiles()
        self._fd = self._files.open(path, Access.READ, direct=False)
        try:
            loaded = load_segment(self._files, self._fd)
        except BaseException:
            self.close()
            raise
        self.header = loaded.header
        self.sealed = loaded.sealed
        self._table_id = loaded.table_id
        self.records = [
            RecordInfo(
                key=entry.key,
                path=path,
                segment=loaded.header.number,
                offset=entry.offset,
                nbytes=entry.nbytes,
                stored_bytes=entry.stored_bytes,
                raw_bytes=loaded.header.page_format.page_bytes,
                written=entry.written,
                codec_id=loaded.header.codec_id,
            )
            for entry in loaded.entries
        ]

    def __enter__(self) -> SegmentFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            self._files.close(self._fd)
            self._fd = -1

    def codec(self, codec_from: Callable[[int, bytes, PageFormat], Codec]) -> Codec:
        """The codec of the records, made once for all of them.

        Raises:
            FormatError: there is no such codec.
        """
        try:
            return codec_from(self.header.codec_id, self.header.table, self.header.page_format)
        except Exception as error:
            raise FormatError(f"no codec {self.header.codec_id}: {error}") from error

    def read(self, record: RecordInfo, codec: Codec) -> Bytes:
        """A page: read, checked and decoded.

        Raises:
            FormatError: the record is damaged.
            OSError: the disk failed, or the record is gone.
        """
        stored = _read(self._files, self._fd, record.offset, record.nbytes)
        page = np.empty(record.raw_bytes, np.uint8)
        decode_record(self.header, self._table_id, codec, record.key, stored, page)
        return page


def list_records(store: Path, files: FileLayer | None = None) -> Iterator[RecordInfo]:
    """Every record of a store in the order it was written, superseded ones included.

    Segments that cannot be read are left out; opening them as a ``SegmentFile`` says why.
    """
    for path in sorted(store.glob(f"*{SEGMENT_SUFFIX}")):
        try:
            with SegmentFile(path, files) as segment:
                records = segment.records
        except (OSError, FormatError):
            continue
        yield from records


def verify_segment(
    path: Path,
    codec_from: Callable[[int, bytes, PageFormat], Codec],
    files: FileLayer | None = None,
) -> Iterator[tuple[RecordInfo, str]]:
    """Read, check and decode every record; with each, what is wrong with it: empty if nothing.

    Raises:
        FormatError: it is no segment, or of no known codec.
        OSError: it cannot be read, or is gone.
    """
    with SegmentFile(path, files) as segment:
        codec = segment.codec(codec_from)
        for record in segment.records:
            try:
                segment.read(record, codec)
            except (OSError, FormatError) as error:
                yield record, str(error)
            else:
                yield record, ""
