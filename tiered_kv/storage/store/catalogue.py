"""Catalogue of a store: its segments on disk, and the segment of each page.

A segment is deleted with its last page, unless it is the active segment. The active segment is the
newest, if it has a writer. During a put the previous segment may have a writer too.
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

from .capacity import Capacity
from .folders import SEGMENT_NAME, SEGMENT_SUFFIX
from .options import StoreContext

OPEN_FILES = 128
"""Number of segments that stay open between calls."""
LAST_NUMBER = 99_999_999
"""Largest number of a segment, since its name has eight digits."""
NEARLY_LAST_NUMBER = LAST_NUMBER - 10_000_000
"""Largest segment number that is accepted from an earlier process.

No disk lives long enough to reach this number, and no process writes enough segments to get from
this number to ``LAST_NUMBER``.
"""


@dataclass(slots=True, eq=False)
class Segment:
    """A segment of this store.

    Attributes:
        end: offset of the end of the last record, bytes.
        writer: writer of the active segment; None for other segments.
        live: pages whose newest record is in this segment, by key.
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
    """A live page: the segment that contains it, and its location there."""

    segment: Segment
    place: FooterEntry


class Catalogue:
    """The pages and segments of a store. Owns the segments' files and descriptors.

    Attributes:
        pages: the live pages, oldest first. Callers must not change this mapping.
        segments: segments by number, oldest first. Callers must not change this mapping.
        stored_bytes: size of the live pages on disk, without headers and padding, bytes.
        closed: True once ``close`` was called.
    """

    def __init__(self, context: StoreContext, capacity: Capacity) -> None:
        self.pages: dict[PageKey, Entry] = {}
        self.segments: dict[int, Segment] = {}
        self.stored_bytes = 0
        self.closed = False
        self._context = context
        self._capacity = capacity
        self._doomed: list[Path] = []  # files whose deletion failed and is retried
        self._unreadable: list[Path] = []  # perhaps only temporarily

    @property
    def active(self) -> Segment | None:
        """Segment to which new pages are appended; None if there is no such segment."""
        newest = next(reversed(self.segments.values()), None)
        return newest if newest is not None and newest.writer is not None else None

    # -- pages --------------------------------------------------------------------

    def insert(self, segment: Segment, places: Iterable[FooterEntry]) -> None:
        """Add durable pages. Segments left without a page are deleted."""
        emptied = set()
        for place in places:
            emptied.add(self._remove(place.key))
            self.pages[place.key] = segment.live[place.key] = Entry(segment, place)
            self.stored_bytes += place.stored_bytes
        for one in emptied:
            self._delete_if_empty(one)

    def forget(self, key: PageKey) -> None:
        """Remove a page. An unknown key is ignored."""
        self._delete_if_empty(self._remove(key))

    def _remove(self, key: PageKey) -> Segment | None:
        """Remove a page. Returns its segment; None for an unknown key."""
        entry = self.pages.pop(key, None)
        if entry is None:
            return None
        self.stored_bytes -= entry.place.stored_bytes
        del entry.segment.live[key]
        return entry.segment

    # -- segments -----------------------------------------------------------------

    def add(self, segment: Segment) -> None:
        """Add a segment that is newer than all others. Its file stays open unless too many files
        are open."""
        self.segments[segment.number] = segment
        if segment.writer is None and len(self.segments) > OPEN_FILES:
            self.close(segment)

    def _delete_if_empty(self, segment: Segment | None) -> None:
        if segment is not None and not segment.live and segment.writer is None:
            self.delete(segment)

    def delete(self, segment: Segment) -> None:
        """Delete a segment with its pages. Idempotent."""
        for key in list(segment.live):
            self._remove(key)
        segment.writer = None
        self.close(segment)
        if self.segments.pop(segment.number, None) is not None:
            self.delete_file(segment.path)

    def delete_segments(self) -> None:
        """Delete every segment with its pages."""
        for segment in list(self.segments.values()):
            self.delete(segment)

    def open(self, segment: Segment) -> int:
        """Open a segment for reading; the descriptor is valid until the next ``close_some``.

        Raises:
            OSError: the disk failed, or the segment does not exist.
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
        """Close files of segments without a writer until at most ``OPEN_FILES`` of these files are
        open. No thread may be using one of these files."""
        held = [s for s in self.segments.values() if s.fd is not None and s.writer is None]
        for segment in held[: max(0, len(held) - OPEN_FILES)]:
            self.close(segment)

    def close_all(self) -> None:
        """Close all files and forget all pages. The files are kept."""
        self.closed = True
        for segment in self.segments.values():
            self.close(segment)
        self.segments.clear()
        self.pages.clear()
        self.stored_bytes = 0

    # -- files --------------------------------------------------------------------

    def path(self, number: int) -> Path:
        return self._context.options.folder / f"{number:08}{SEGMENT_SUFFIX}"

    def numbers(self) -> list[int]:
        """Return the numbers of the segments in the folder, oldest first.

        Raises:
            OSError: the disk failed.
        """
        names = self._context.files.names(self._context.options.folder)
        return sorted(int(Path(name).stem) for name in names if SEGMENT_NAME.fullmatch(name))

    def sync(self) -> None:
        """Make the creation and deletion of files durable.

        Raises:
            OSError: the disk failed.
        """
        self._context.files.sync_folder(self._context.options.folder)

    def delete_file(self, path: Path) -> None:
        """Delete a file, or schedule a retry if the deletion fails. A missing file is ignored."""
        try:
            self._context.files.unlink(path)
            self.sync()
        except FileNotFoundError:
            self._capacity.changed()
        except OSError as error:
            self._context.write_failed(f"{path} cannot be deleted", error)
            self._doomed.append(path)
            self._capacity.changed()
        else:
            self._capacity.granted()

    def retry_deletions(self) -> None:
        """Retry deletions that failed before."""
        doomed, self._doomed = self._doomed, []
        for path in doomed:
            self.delete_file(path)

    def set_aside(self, path: Path) -> None:
        """Keep a segment that cannot be read now, until its space is needed."""
        self._unreadable.append(path)

    def delete_set_aside(self) -> bool:
        """Delete the segments set aside. Returns False if there are none."""
        unreadable, self._unreadable = self._unreadable, []
        for path in unreadable:
            self.delete_file(path)
        return bool(unreadable)

    def delete_all(self) -> None:
        """Delete every segment of the store, including unreadable ones, durably.

        Raises:
            OSError: some segments may be left.
        """
        self.delete_segments()
        self._doomed = [self.path(number) for number in self.numbers()]
        self.retry_deletions()
        self.sync()
        if self._doomed:
            raise FileExistsError(f"{self._doomed[0]} cannot be deleted")
