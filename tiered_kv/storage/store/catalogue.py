"""Which pages live in which segment, and which segments there are.

A segment whose last page goes is deleted, unless it is the active one. The active segment is
the newest, if it has a writer; during a put the one before it may have one too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tiered_kv.codecs.base import Codec
from tiered_kv.keys import PageKey
from tiered_kv.storage.disk.files import Access
from tiered_kv.storage.segment.format import FooterEntry, SegmentHeader
from tiered_kv.storage.segment.writer import SegmentWriter

from .context import StoreMeans
from .segment_folder import SegmentFolder

OPEN_FILES = 128
"""How many segments are kept open between calls."""


@dataclass(slots=True, eq=False)
class Segment:
    """A segment of this store.

    Attributes:
        end: where the last record ends.
        writer: of the active segment.
        live: the pages whose newest record lies here.
    """

    path: Path
    header: SegmentHeader
    table_id: int
    codec: Codec
    end: int
    fd: int | None = None
    writer: SegmentWriter | None = None
    live: dict[PageKey, Entry] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.header.number

    @property
    def live_bytes(self) -> int:
        return sum(entry.place.nbytes for entry in self.live.values())

    def places(self) -> list[FooterEntry]:
        """Of the live pages, in the order of the file."""
        return sorted((entry.place for entry in self.live.values()), key=lambda p: p.offset)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A live page."""

    segment: Segment
    place: FooterEntry


class Catalogue:
    """The pages and segments of a store. Owns their descriptors.

    Attributes:
        pages: the live pages, the one written longest ago first; read only.
        segments: by number, oldest first; read only.
        stored_bytes: of the live pages on disk, without headers and padding.
    """

    def __init__(self, means: StoreMeans, folder: SegmentFolder) -> None:
        self.pages: dict[PageKey, Entry] = {}
        self.segments: dict[int, Segment] = {}
        self.stored_bytes = 0
        self._means = means
        self._folder = folder

    @property
    def active(self) -> Segment | None:
        """The segment that new pages are appended to."""
        newest = next(reversed(self.segments.values()), None)
        return newest if newest is not None and newest.writer is not None else None

    # -- pages --------------------------------------------------------------------

    def insert(self, segment: Segment, places: Iterable[FooterEntry]) -> set[Segment]:
        """Pages are durable there; returns segments which that left without a page."""
        emptied = set()
        for place in places:
            before = self._remove(place.key)
            if before is not None and not before.live:
                emptied.add(before)
            self.pages[place.key] = segment.live[place.key] = Entry(segment, place)
            self.stored_bytes += place.stored_bytes
        return {one for one in emptied if not one.live}

    def forget(self, key: PageKey) -> None:
        """Unknown keys are ignored."""
        segment = self._remove(key)
        if segment is not None:
            self.delete_if_empty(segment)

    def _remove(self, key: PageKey) -> Segment | None:
        """Returns the segment the page was in."""
        entry = self.pages.pop(key, None)
        if entry is None:
            return None
        self.stored_bytes -= entry.place.stored_bytes
        del entry.segment.live[key]
        return entry.segment

    # -- segments -----------------------------------------------------------------

    def add(self, segment: Segment) -> None:
        """A segment that is newer than all others. It stays open if few are."""
        self.segments[segment.number] = segment
        if segment.writer is None and len(self.segments) > OPEN_FILES:
            self.close(segment)

    def delete_if_empty(self, segment: Segment) -> None:
        if not segment.live and segment.writer is None:
            self.delete(segment)

    def delete(self, segment: Segment) -> None:
        """With its pages. Idempotent."""
        for key in list(segment.live):
            self._remove(key)
        segment.writer = None
        self.close(segment)
        if self.segments.pop(segment.number, None) is not None:
            self._folder.delete(segment.path)

    def open(self, segment: Segment) -> int:
        """A descriptor to read from, valid until the next ``close_some``.

        Raises:
            OSError: the disk failed, or the segment is gone.
        """
        if segment.fd is None:
            files, direct = self._means.files, self._means.direct
            segment.fd = files.open(segment.path, Access.READ, direct=direct)
        return segment.fd

    def close(self, segment: Segment) -> None:
        fd, segment.fd = segment.fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                self._means.files.close(fd)

    def close_some(self) -> None:
        """Keep few enough files open; no thread may be using one."""
        held = [s for s in self.segments.values() if s.fd is not None and s.writer is None]
        for segment in held[: max(0, len(held) - OPEN_FILES)]:
            self.close(segment)

    def close_all(self) -> None:
        """The catalogue is empty afterwards; the files stay."""
        for segment in self.segments.values():
            self.close(segment)
        self.segments.clear()
        self.pages.clear()
        self.stored_bytes = 0
