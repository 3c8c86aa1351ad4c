"""Lifecycle of a segment while it can change: it is created if there is space, and sealed when
full."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from tiered_kv.codecs.base import Codec
from tiered_kv.storage.disk.files import Access
from tiered_kv.storage.segment.format import SegmentHeader, seconds_now
from tiered_kv.storage.segment.writer import SegmentWriter, write_footer

from .capacity import Capacity
from .catalogue import LAST_NUMBER, NEARLY_LAST_NUMBER, Catalogue, Segment
from .locks import StoreLock, root_locked
from .options import StoreContext, is_full

_T = TypeVar("_T")


class SegmentLifecycle:
    """Creates and numbers the segments of one store.

    Args:
        lock: lock of the store. Once a person has removed its file, no segment is created any more.

    Raises:
        OSError: the disk failed.
    """

    def __init__(
        self,
        context: StoreContext,
        catalogue: Catalogue,
        capacity: Capacity,
        lock: StoreLock,
    ) -> None:
        self._context = context
        self._catalogue = catalogue
        self._capacity = capacity
        self._lock = lock
        # Numbers that no store reaches in practice are ignored.
        numbers = [number for number in catalogue.numbers() if number <= NEARLY_LAST_NUMBER]
        self._next_number = max(numbers, default=0) + 1

    def begin(self, codec: Codec, *, while_reclaiming: bool) -> Segment | None:
        """Create a segment while none is active. Returns None if there is no space, or if the disk
        failed."""
        context = self._context
        segment: Segment | None = None
        try:
            self._catalogue.retry_deletions()
            if not self._lock.held:
                raise FileNotFoundError(f"the store's lock file {self._lock.path} was removed")
            with root_locked(context.options.root):
                size = self._make_room(while_reclaiming)
                if size is None:
                    context.no_room(self._capacity.limit)
                    return None
                segment = self._with_room(size, lambda: self._create(codec))
                fd = self._catalogue.open(segment)
                self._with_room(size, lambda: context.files.preallocate(fd, size))
            named = context.threads.submit(self._catalogue.sync)
            segment.writer = SegmentWriter(
                context.files, fd, segment.header, size, context.buffers, named
            )
            segment.writer.begin()
        except OSError as error:
            context.write_failed("a segment cannot be created", error)
            if segment is not None:
                self._catalogue.close(segment)
                self._catalogue.delete_file(segment.path)
            self._capacity.failed(error)
            return None
        self._capacity.granted()
        self._lock.touch()
        self._catalogue.add(segment)
        return segment

    def _create(self, codec: Codec) -> Segment:
        """Create a segment file under the next free number."""
        while True:
            header = self._header(codec)
            path = self._catalogue.path(header.number)
            self._next_number += 1
            with suppress(FileExistsError):  # a file that is not a segment of ours
                fd = self._context.files.open(path, Access.CREATE, direct=self._context.direct)
                return Segment(path, header, codec, header.header_bytes, fd=fd)

    def _with_room(self, nbytes: int, act: Callable[[], _T]) -> _T:
        """Run an action that allocates ``nbytes`` bytes on the disk, and return its result. If the
        disk has less space than it reported, delete segments that no process uses, and run the
        action again.

        Raises:
            OSError: the action failed, or no segment is left to delete.
        """
        while True:
            try:
                return act()
            except OSError as error:
                if not is_full(error) or not (
                    self._capacity.delete_dead(nbytes) or self._catalogue.delete_set_aside()
                ):
                    raise

    def restart_numbering(self) -> None:
        """Restart segment numbers at one, after the store ran out of numbers and was emptied."""
        self._next_number = 1

    def _header(self, codec: Codec) -> SegmentHeader:
        if self._next_number > LAST_NUMBER:
            raise OSError(errno.ERANGE, "the store has no segment numbers left")
        options = self._context.options
        return SegmentHeader(
            fingerprint=options.fingerprint,
            nonce=int.from_bytes(os.urandom(8), "little"),
            number=self._next_number,
            created=seconds_now(),
            page_format=options.page_format.outline,
            codec_id=codec.codec_id,
            rank=options.rank,
            ranks=options.ranks,
            replica=options.replica,
            table=codec.table,
        )

    def _make_room(self, while_reclaiming: bool) -> int | None:
        size = self._capacity.make_room(while_reclaiming=while_reclaiming)
        if size is None and self._catalogue.delete_set_aside():
            return self._capacity.make_room(while_reclaiming=while_reclaiming)
        return size

    def fail(self, segment: Segment, error: OSError) -> None:
        """Retire a segment after a failed write, because no record may follow records that may be
        torn."""
        self._context.write_failed(f"pages cannot be written to {segment.path}", error)
        self.seal(segment)
        self._capacity.failed(error)

    def seal(self, segment: Segment) -> None:
        """Write a segment's footer, or delete the segment if it has no live page.

        Nothing is appended to the segment afterwards. If the footer cannot be written, the segment
        is scanned at the next start.
        """
        context, writable = self._context, segment.writer is not None
        segment.writer = None
        if not segment.live:
            self._catalogue.delete(segment)
            return
        try:
            if not writable:
                self._catalogue.close(segment)
                segment.fd = context.files.open(segment.path, Access.WRITE, direct=context.direct)
            fd = self._catalogue.open(segment)
            places = segment.places()
            write_footer(context.files, fd, segment.header, segment.end, places, context.buffers)
        except OSError as error:
            context.write_failed(f"{segment.path} cannot be sealed", error)
        self._capacity.changed()
