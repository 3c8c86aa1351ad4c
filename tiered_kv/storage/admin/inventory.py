"""Inventory of the stores under a path, read from their segments alone.

Takes no lock and writes nothing: a store may be in use, and gain and lose segments meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.codecs.base import Codec, CodecError
from tiered_kv.codecs.registry import codec_name, from_table
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.files import Access, RealFiles
from tiered_kv.storage.segment.format import FooterEntry, FormatError, SegmentHeader, footer_bytes
from tiered_kv.storage.segment.loader import BlankSegment, LoadedSegment, load_segment
from tiered_kv.storage.store.folders import FINGERPRINT_NAME
from tiered_kv.storage.store.locks import CAPACITY_LOCK, LOCK_NAME, StoreError

from .discovery import Listing, StoreInfo, list_stores


def find_stores(path: Path) -> Listing:
    """Find the stores under a root, under one of its fingerprints, or the store at ``path``.

    Returns:
        The stores, the most recently used one last, and the skipped paths. Empty for a root that
            was emptied.

    Raises:
        StoreError: the folder does not exist, or holds no store.
        OSError: the folder itself cannot be read.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - a link is what its owner calls it
    if not path.exists():
        raise StoreError(f"there is no {path}: give the folder that TIERED_KV_SSD_PATH names")
    if not path.is_dir():
        raise StoreError(f"{path} is no folder: give the one that TIERED_KV_SSD_PATH names")
    with os.scandir(path):  # one that may not be read must not look empty
        found = list_stores(_root_of(path))
    stores = [store for store in found.stores if store.path.is_relative_to(path)]
    odd = {where: why for where, why in found.odd.items() if where.is_relative_to(path)}
    if not stores and not odd and not is_root(path):
        raise StoreError(f"{path} holds no store: give the folder that TIERED_KV_SSD_PATH names")
    return Listing(stores, odd)


def is_root(path: Path) -> bool:
    """True if the folder holds stores, or once did."""
    return (path / CAPACITY_LOCK).exists()


def _root_of(path: Path) -> Path:
    if (path / LOCK_NAME).exists():
        return path.parent.parent
    return path.parent if FINGERPRINT_NAME.fullmatch(path.name) else path


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A readable segment.

    Attributes:
        codec_name: name of its pages' codec; the id of one that has no name here.
    """

    path: Path
    loaded: LoadedSegment
    codec_name: str

    @property
    def header(self) -> SegmentHeader:
        return self.loaded.header

    @property
    def records_end(self) -> int:
        """End of the records, including those superseded before it was sealed."""
        loaded = self.loaded
        if not loaded.sealed:
            return loaded.end
        keys = sum(len(entry.key) for entry in loaded.entries)
        return loaded.size - footer_bytes(len(loaded.entries), keys)


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a page's newest record."""

    segment: Segment
    entry: FooterEntry


@dataclass(frozen=True, slots=True)
class Inventory:
    """Contents of a store.

    Attributes:
        segments: readable segments, oldest first.
        unreadable: reasons for the others.
        pages: newest record of each page, the one written first first: what the next process will
            find.
    """

    info: StoreInfo
    segments: Sequence[Segment]
    unreadable: dict[Path, str]
    pages: dict[PageKey, Place]

    @property
    def stored_bytes(self) -> int:
        """Size of the encoded pages without headers and padding, bytes."""
        return sum(place.entry.stored_bytes for place in self.pages.values())

    @property
    def raw_bytes(self) -> int:
        """Size of the decoded pages, bytes."""
        return sum(place.segment.header.page_format.page_bytes for place in self.pages.values())

    @property
    def dead_bytes(self) -> int:
        """Size of superseded records in live segments, bytes."""
        records = sum(one.records_end - one.header.header_bytes for one in self.segments)
        return records - sum(place.entry.nbytes for place in self.pages.values())

    @property
    def ranks(self) -> int:
        """Number of the engine's ranks, from its newest segment; 0 without one."""
        return self.segments[-1].header.ranks if self.segments else 0

    @property
    def codecs(self) -> list[str]:
        """Names of the codecs, each once."""
        return sorted({segment.codec_name for segment in self.segments})


def take_inventory(info: StoreInfo) -> Inventory:
    """Read a store's contents. Segments that vanish meanwhile are left out."""
    segments: list[Segment] = []
    unreadable: dict[Path, str] = {}
    pages: dict[PageKey, Place] = {}
    for path in info.segments:
        try:
            segment = load(info, path)
        except (FileNotFoundError, BlankSegment):
            continue
        except (OSError, FormatError) as error:
            unreadable[path] = str(error)
            continue
        segments.append(segment)
        for entry in segment.loaded.entries:
            pages.pop(entry.key, None)
            pages[entry.key] = Place(segment, entry)
    return Inventory(info, segments, unreadable, pages)


def load(info: StoreInfo, path: Path) -> Segment:
    """Load a segment of a store. As it may be created, written or sealed meanwhile, it is damaged
    only if two reads find it so.

    Raises:
        BlankSegment: it has no header yet.
        FormatError: it is damaged, or another store's.
        OSError: the disk failed, or the segment is gone.
    """
    before = None
    while True:
        try:
            return _load(info, path)
        except BlankSegment:
            raise
        except (OSError, FormatError):
            now = size_of(path)
            if now == before:  # else it was sealed just now, and has another end
                raise
            before = now


def _load(info: StoreInfo, path: Path) -> Segment:
    with opened(path) as fd:
        loaded = load_segment(RealFiles(), fd)
    header = loaded.header
    found = (header.fingerprint, header.replica, header.rank, f"{header.number:08}")
    if found != (info.fingerprint, info.replica, info.rank, path.stem):
        raise FormatError("it belongs to another store")
    return Segment(path, loaded, codec_name(header.codec_id, header.table))


def size_of(path: Path) -> int:
    """Size of a file, bytes; 0 if it is missing or cannot be read."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def codec_of(header: SegmentHeader) -> Codec:
    """Codec of a segment's pages.

    Raises:
        FormatError: the codec is unknown.
    """
    try:
        return from_table(header.codec_id, header.table, header.page_format)
    except CodecError as error:
        raise FormatError(str(error)) from error


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file for reading through the page cache, without alignment (see
    ``FileLayer.uncache``)."""
    files = RealFiles()
    fd = files.open(path, Access.READ, direct=False)
    try:
        yield fd
    finally:
        files.close(fd)
