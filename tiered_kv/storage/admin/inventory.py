"""Stores under a path, and their contents, read only from their segments.

The module takes no lock and writes nothing. A store may be in use, and gain and lose segments
meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.codecs.base import Codec, CodecError
from tiered_kv.codecs.registry import codec_name, from_table
from tiered_kv.config import ENV_PREFIX
from tiered_kv.file_lock import is_locked, read_owner
from tiered_kv.keys import PageKey
from tiered_kv.plain_files import opened
from tiered_kv.storage.disk.files import RealFiles
from tiered_kv.storage.segment.format import FooterEntry, FormatError, SegmentHeader, footer_bytes
from tiered_kv.storage.segment.loader import BlankSegment, LoadedSegment, load_segment
from tiered_kv.storage.store.folders import FINGERPRINT_NAME, segment_files, store_folders
from tiered_kv.storage.store.locks import CAPACITY_LOCK, LOCK_NAME, StoreError


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """A store under a root.

    Attributes:
        locked: True if a process has the store open.
        holder: description of the process that has the store open, or of the last process that had
            it open; empty if unknown.
        last_use: time of last use, seconds since 1970.
        segments: paths of its segments, oldest first.
        nbytes: size of its segments on disk, bytes.
    """

    path: Path
    fingerprint: bytes
    replica: int
    rank: int
    locked: bool
    holder: Mapping[str, object]
    last_use: float
    segments: tuple[Path, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Listing:
    """The stores under a root, most recently used last.

    Attributes:
        odd: reasons why paths that are named like a store or a segment were skipped, by path.
    """

    stores: list[StoreInfo]
    odd: dict[Path, str]


def list_stores(root: Path) -> Listing:
    """Return the stores under a root, and the paths that were skipped."""
    folders = store_folders(root)
    stores, odd = [], dict(folders.odd)
    for folder in folders.paths:
        found, lock = segment_files(folder), folder / LOCK_NAME
        odd |= found.odd
        if folder in found.odd:
            continue
        replica, rank = (int(number) for number in folder.name.split("-"))
        try:
            stores.append(
                StoreInfo(
                    path=folder,
                    fingerprint=bytes.fromhex(folder.parent.name),
                    replica=replica,
                    rank=rank,
                    locked=is_locked(lock),
                    holder=read_owner(lock),
                    last_use=lock.lstat().st_mtime,
                    segments=tuple(found.sizes),
                    nbytes=found.nbytes,
                )
            )
        except FileNotFoundError:
            continue  # the store vanished meanwhile
        except OSError as error:
            odd[lock] = error.strerror or str(error)
    return Listing(sorted(stores, key=lambda store: store.last_use), odd)


def find_stores(path: Path) -> Listing:
    """Find the stores under a root, under one of its fingerprints, or the store at ``path``.

    Returns:
        The stores, most recently used last, and the skipped paths. Empty for a root whose stores
            were all deleted.

    Raises:
        StoreError: the folder does not exist, or has no store.
        OSError: the folder itself cannot be read.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - users know links by their names
    if not path.exists():
        raise StoreError(f"{path} does not exist: use the value of TIERED_KV_SSD_PATH")
    if not path.is_dir():
        raise StoreError(f"{path} is not a folder: use the value of TIERED_KV_SSD_PATH")
    with os.scandir(path):  # an unreadable folder must not look empty
        found = list_stores(_root_of(path))
    stores = [store for store in found.stores if store.path.is_relative_to(path)]
    odd = {where: why for where, why in found.odd.items() if where.is_relative_to(path)}
    if not stores and not odd and not is_root(path):
        raise StoreError(f"{path} contains no store: use the value of TIERED_KV_SSD_PATH")
    return Listing(stores, odd)


def is_root(path: Path) -> bool:
    """True if the folder has stores, or once had stores."""
    return (path / CAPACITY_LOCK).exists()


def _root_of(path: Path) -> Path:
    if (path / LOCK_NAME).exists():
        return path.parent.parent
    return path.parent if FINGERPRINT_NAME.fullmatch(path.name) else path


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A readable segment."""

    path: Path
    loaded: LoadedSegment

    @property
    def codec_name(self) -> str:
        """Name of the codec of its pages; the codec's id if the codec is unknown here."""
        return codec_name(self.loaded.header.codec_id, self.loaded.header.table)

    @property
    def records_end(self) -> int:
        """End position of the last record in the segment file, bytes. The last record counts even
        if it was superseded before the segment was sealed."""
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
        unreadable: reasons why segments are unreadable, by path.
        pages: newest record of each page, oldest first: the pages that the next process will find.
    """

    info: StoreInfo
    segments: list[Segment]
    unreadable: dict[Path, str]
    pages: dict[PageKey, Place]

    @property
    def stored_bytes(self) -> int:
        """Size of the encoded pages without headers and padding, bytes."""
        return sum(place.entry.stored_bytes for place in self.pages.values())

    @property
    def raw_bytes(self) -> int:
        """Size of the decoded pages, bytes."""
        headers = (place.segment.loaded.header for place in self.pages.values())
        return sum(header.page_format.page_bytes for header in headers)

    @property
    def dead_bytes(self) -> int:
        """Size of the superseded or dropped records in readable segments, bytes."""
        records = sum(one.records_end - one.loaded.header.header_bytes for one in self.segments)
        return records - sum(place.entry.nbytes for place in self.pages.values())

    @property
    def ranks(self) -> int:
        """Number of the engine's ranks, from the newest readable segment; 0 without a readable
        segment."""
        return self.segments[-1].loaded.header.ranks if self.segments else 0

    @property
    def codecs(self) -> list[str]:
        """Names of the codecs, each once."""
        return sorted({segment.codec_name for segment in self.segments})


def take_inventory(info: StoreInfo) -> Inventory:
    """Read a store's contents. Unreadable segments are listed in ``Inventory.unreadable``. Segments
    that vanish meanwhile are left out."""
    found = Inventory(info, [], {}, {})
    for path in info.segments:
        with faults_noted(path, found.unreadable):
            with opened_segment(info, path) as (_, loaded):
                found.segments.append(segment := Segment(path, loaded))
            for entry in loaded.entries:
                found.pages.pop(entry.key, None)
                found.pages[entry.key] = Place(segment, entry)
    return found


@contextmanager
def faults_noted(path: Path, faults: dict[Path, str]) -> Iterator[None]:
    """Suppress the ``OSError`` or ``FormatError`` that a ``with`` block raises while it reads a
    segment, and record the error in ``faults``. A segment that has vanished, or has no header yet,
    is not a fault."""
    try:
        yield
    except (FileNotFoundError, BlankSegment):
        pass
    except (OSError, FormatError) as error:
        faults[path] = str(error)


@contextmanager
def opened_segment(info: StoreInfo, path: Path) -> Iterator[tuple[int, LoadedSegment]]:
    """Open a segment of a store for reading through the page cache, and load its contents.

    A segment may be written or sealed meanwhile, so it counts as damaged only if two reads fail.

    Raises:
        BlankSegment: the segment has no header yet.
        FormatError: the segment is damaged, or belongs to another store.
        OSError: the disk failed, or the segment has vanished.
    """
    before = None
    with opened(path) as fd:
        while True:
            try:
                loaded = load_segment(RealFiles(), fd)
                break
            except (OSError, FormatError) as error:
                now = RealFiles().size(fd)
                # A changed size means that the segment was just sealed, and ends elsewhere.
                if now == before or isinstance(error, BlankSegment):
                    raise
                before = now
        header = loaded.header
        found = (header.fingerprint, header.replica, header.rank, f"{header.number:08}")
        if found != (info.fingerprint, info.replica, info.rank, path.stem):
            raise FormatError("the segment belongs to another store")
        yield fd, loaded


def codec_of(header: SegmentHeader) -> Codec:
    """Return the codec of a segment's pages. A codec from another package is imported only if
    TIERED_KV_CODEC names it.

    Raises:
        FormatError: the codec is unknown, or from another package and not named or not available.
    """
    trusted = os.environ.get(f"{ENV_PREFIX}CODEC", "")
    try:
        return from_table(header.codec_id, header.table, header.page_format, trusted)
    except CodecError as error:
        raise FormatError(str(error)) from error
