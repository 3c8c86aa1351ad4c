"""Catalogue of a store: its segments, and the segment of each page.

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

from .options import StoreContext
from .segment_folder import SegmentFolder

OPEN_FILES = 128
"""Number of segments that are kept open between calls."""


@dataclass(slots=True, eq=False)
class Segment:
    """A segment of this store.

    Attributes:
        end: offset behind the last record.
        writer: writer of the active segment; None for others.
        live: pages whose newest record lies here, by key.
    """

    path: Path
    header: SegmentHeader
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
        """Places of the live pages, in the order of the file."""
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
        segments: segments by number, oldest first; read only.
        stored_bytes: size of the live pages on disk, without headers and padding.
    """

    def __init__(self, context: StoreContext, folder: SegmentFolder) -> None:
        self.pages: dict[PageKey, Entry] = {}
        self.segments: dict[int, Segment] = {}
        self.stored_bytes = 0
        self._context = context
        self._folder = folder

    @property
    def active(self) -> Segment | None:
        """Segment that new pages are appended to; None if there is none."""
        newest = next(reversed(self.segments.values()), None)
        return newest if newest is not None and newest.writer is not None else None

    # -- pages --------------------------------------------------------------------

    def insert(self, segment: Segment, places: Iterable[FooterEntry]) -> set[Segment]:
        """Add pages that are durable; give the segments that this left without a page."""
        emptied = set()
        for place in places:
            before = self._remove(place.key)
            if before is not None and not before.live:
                emptied.add(before)
            self.pages[place.key] = segment.live[place.key] = Entry(segment, place)
            self.stored_bytes += place.stored_bytes
        return {one for one in emptied if not one.live}

    def forget(self, key: PageKey) -> None:
        """Remove a page. An unknown key is ignored."""
        segment = self._remove(key)
        if segment is not None:
            self.delete_if_empty(segment)

    def _remove(self, key: PageKey) -> Segment | None:
        """Remove a page; give the segment it was in."""
        entry = self.pages.pop(key, None)
        if entry is None:
            return None
        self.stored_bytes -= entry.place.stored_bytes
        del entry.segment.live[key]
        return entry.segment

    # -- segments -----------------------------------------------------------------

    def add(self, segment: Segment) -> None:
        """Add a segment that is newer than all others. It stays open if few are."""
        self.segments[segment.number] = segment
        if segment.writer is None and len(self.segments) > OPEN_FILES:
            self.close(segment)

    def delete_if_empty(self, segment: Segment) -> None:
        if not segment.live and segment.writer is None:
            self.delete(segment)

    def delete(self, segment: Segment) -> None:
        """Delete a segment with its pages. Idempotent."""
        for key in list(segment.live):
            self._remove(key)
        segment.writer = None
        self.close(segment)
        if self.segments.pop(segment.number, None) is not None:
            self._folder.delete(segment.path)

    def open(self, segment: Segment) -> int:
        """Open a segment for reading; the descriptor is valid until the next ``close_some``.

        Raises:
            OSError: the disk failed, or the segment is gone.
        """
        if segment.fd is None:
            files, direct = self._context.files, self._context.direct
            segment.fd = files.open(segment.path, Access.READ, direct=direct)
        return segment.fd

    def close(self, segment: Segment) -> None:
        fd, segment.fd = segment.fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                self._context.files.close(fd)

    def close_some(self) -> None:
        """Close files until few enough are open; no thread may be using one."""
        held = [s for s in self.segments.values() if s.fd is not None and s.writer is None]
        for segment in held[: max(0, len(held) - OPEN_FILES)]:
            self.close(segment)

    def close_all(self) -> None:
        """Close all files and forget all pages; the files stay."""
        for segment in self.segments.values():
            self.close(segment)
        self.segments.clear()
        self.pages.clear()
        self.stored_bytes = 0
