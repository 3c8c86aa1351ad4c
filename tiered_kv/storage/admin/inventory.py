"""What the stores under a path hold, told from their segments alone.

Nothing here locks or writes: a store may be in use, and gain and lose segments meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.codecs.base import Codec, CodecError
from tiered_kv.codecs.choice import codec_from
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.files import Access, RealFiles
from tiered_kv.storage.disk.folders import FINGERPRINT_NAME
from tiered_kv.storage.segment.headers import FooterEntry, FormatError, SegmentHeader, footer_bytes
from tiered_kv.storage.segment.loader import BlankSegment, LoadedSegment, StoreInfo, load_segment
from tiered_kv.storage.store.locks import CAPACITY_LOCK, LOCK_NAME, StoreError

from .discovery import Listing, list_stores


def find_stores(path: Path) -> Listing:
    """The stores under a root, under one fingerprint of it, or the one that ``path`` is.

    Returns:
        The one used last at the end, and what had to be left out; nothing if it is a root that
        was emptied.

    Raises:
        StoreError: no such folder, or nothing of a store in it.
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
    """Whether stores are, or once were, under this folder."""
    return (path / CAPACITY_LOCK).exists()


def _root_of(path: Path) -> Path:
    if (path / LOCK_NAME).exists():
        return path.parent.parent
    return path.parent if FINGERPRINT_NAME.fullmatch(path.name) else path


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A segment that can be read.

    Attributes:
        codec_name: of the codec of its pages; its number if it is not known here.
    """

    path: Path
    loaded: LoadedSegment
    codec_name: str

    @property
    def header(self) -> SegmentHeader:
        return self.loaded.header

    @property
    def records_end(self) -> int:
        """Where the records end, those that died before it was sealed included."""
        loaded = self.loaded
        if not loaded.sealed:
            return loaded.end
        keys = sum(len(entry.key) for entry in loaded.entries)
        return loaded.size - footer_bytes(len(loaded.entries), keys)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the newest record of a page lies."""

    segment: Segment
    entry: FooterEntry


@dataclass(frozen=True, slots=True)
class Survey:
    """What a store holds.

    Attributes:
        segments: those that can be read, oldest first.
        unreadable: why the others cannot.
        pages: the newest record of each page, the one written longest ago first: what the
            next process will find.
    """

    info: StoreInfo
    segments: Sequence[Segment]
    unreadable: dict[Path, str]
    pages: dict[PageKey, Place]

    @property
    def stored_bytes(self) -> int:
        """Of the pages, encoded, without headers and padding."""
        return sum(place.entry.stored_bytes for place in self.pages.values())

    @property
    def raw_bytes(self) -> int:
        """Of the pages, decoded."""
        return sum(place.segment.header.page_format.page_bytes for place in self.pages.values())

    @property
    def dead_bytes(self) -> int:
        """Of records that no longer count, in segments that still do."""
        records = sum(one.records_end - one.header.header_bytes for one in self.segments)
        return records - sum(place.entry.nbytes for place in self.pages.values())

    @property
    def ranks(self) -> int:
        """Of the engine, as its newest segment says; 0 if there is none."""
        return self.segments[-1].header.ranks if self.segments else 0

    @property
    def codecs(self) -> list[str]:
        """Names, without repeats."""
        return sorted({segment.codec_name for segment in self.segments})


def survey(info: StoreInfo) -> Survey:
    """Read what a store holds. Segments that vanish meanwhile are left out."""
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
    return Survey(info, segments, unreadable, pages)


def load(info: StoreInfo, path: Path) -> Segment:
    """A segment of a store. It may be begun, written and sealed meanwhile: damage is only what
    is there twice.

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
    try:
        name = codec_of(header).name
    except FormatError:
        name = f"codec {header.codec_id}"
    return Segment(path, loaded, name)


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if there is none, or it cannot be looked at."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def codec_of(header: SegmentHeader) -> Codec:
    """What decodes the pages of a segment.

    Raises:
        FormatError: it is not known here.
    """
    try:
        return codec_from(header.codec_id, header.table, header.page_format)
    except CodecError as error:
        raise FormatError(str(error)) from error


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A file to read through the page cache, which gives alignment and takes memory: see
    ``FileLayer.uncache``."""
    files = RealFiles()
    fd = files.open(path, Access.READ, direct=False)
    try:
        yield fd
    finally:
        files.close(fd)
