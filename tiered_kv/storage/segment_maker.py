"""The life of a segment while it can change: begun where there is room, sealed when full."""

from __future__ import annotations

import os
import time

from tiered_kv.codecs.base import Codec
from tiered_kv.storage.capacity import Capacity
from tiered_kv.storage.catalogue import Catalogue, Segment
from tiered_kv.storage.files import Access
from tiered_kv.storage.locks import StoreLock
from tiered_kv.storage.segment_folder import SegmentFolder
from tiered_kv.storage.segment_format import SegmentHeader
from tiered_kv.storage.segment_writer import SegmentWriter, write_footer
from tiered_kv.storage.store_means import StoreMeans


class SegmentMaker:
    """Makes the segments of one store, and numbers them.

    Args:
        lock: of the store; once its file is removed by hand, nothing is begun any more.

    Raises:
        OSError: the disk failed.
    """

    def __init__(
        self,
        means: StoreMeans,
        folder: SegmentFolder,
        catalogue: Catalogue,
        capacity: Capacity,
        lock: StoreLock,
    ) -> None:
        self._means = means
        self._folder = folder
        self._catalogue = catalogue
        self._capacity = capacity
        self._lock = lock
        self._next_number = max(folder.numbers(), default=0) + 1

    def begin(self, codec: Codec, *, while_reclaiming: bool) -> Segment | None:
        """Another active segment; None if there is no room, or the disk failed. There is no
        active one yet."""
        means, size = self._means, self._means.options.segment_bytes
        header = self._header(codec)
        path = self._folder.path(header.number)
        segment = Segment(path, header, header.table_id, codec, header.header_bytes)
        try:
            self._folder.retry()
            if not self._lock.held:
                raise FileNotFoundError(f"{self._lock.path} was removed")
            with self._capacity.locked():
                if not self._make_room(while_reclaiming):
                    means.stats.no_room += 1
                    return None
                self._next_number += 1
                segment.fd = means.files.open(path, Access.CREATE, direct=means.direct)
                means.files.preallocate(segment.fd, size)
            named = means.threads.submit(self._folder.sync)
            segment.writer = SegmentWriter(
                means.files, segment.fd, header, size, means.buffers, named
            )
            segment.writer.begin()
        except OSError as error:
            means.write_failed("a segment cannot be created", error)
            if segment.fd is not None:
                self._catalogue.close(segment)
                self._folder.delete(path)
            return None
        finally:
            self._capacity.changed()
        self._lock.touch()
        self._catalogue.add(segment)
        return segment

    def _header(self, codec: Codec) -> SegmentHeader:
        options = self._means.options
        return SegmentHeader(
            fingerprint=options.fingerprint,
            nonce=int.from_bytes(os.urandom(8), "little"),
            number=self._next_number,
            created=int(time.time()),
            page_format=options.page_format,
            codec_id=codec.codec_id,
            rank=options.rank,
            ranks=options.ranks,
            replica=options.replica,
            table=codec.table,
        )

    def _make_room(self, while_reclaiming: bool) -> bool:
        if self._capacity.make_room(while_reclaiming=while_reclaiming):
            return True
        return self._folder.delete_set_aside() and self._capacity.make_room(
            while_reclaiming=while_reclaiming
        )

    def seal(self, segment: Segment) -> None:
        """Nothing more is appended to the segment: give it a footer, or delete it if it is of
        no use. A footer that cannot be written is done without."""
        means, writable = self._means, segment.writer is not None
        segment.writer = None
        if not segment.live:
            self._catalogue.delete(segment)
            return
        try:
            if not writable:
                self._catalogue.close(segment)
                segment.fd = means.files.open(segment.path, Access.WRITE, direct=means.direct)
            fd = self._catalogue.open(segment)
            places = segment.places()
            write_footer(means.files, fd, segment.header, segment.end, places, means.buffers)
        except OSError as error:
            means.write_failed(f"{segment.path} cannot be sealed", error)
        self._capacity.changed()
