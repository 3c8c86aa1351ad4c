"""Reader of segment files for tests, which works even while a store has them open."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tiered_kv.codecs.base import Bytes, Codec
from tiered_kv.storage.disk.files import Access, RealFiles
from tiered_kv.storage.segment.format import FooterEntry
from tiered_kv.storage.segment.loader import load_segment
from tiered_kv.storage.segment.record import decode_record, read_blocks


class SegmentFile:
    """Contents of a segment file, read when the object is created.

    Attributes:
        header: the segment's header.
        sealed: True if the segment has a footer.
        entries: positions of the segment's records, in the order in which they were written.

    Raises:
        FormatError: the file is not a segment.
        OSError: the file cannot be read, or is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = RealFiles().open(path, Access.READ, direct=False)
        try:
            loaded = load_segment(RealFiles(), fd)
        finally:
            RealFiles().close(fd)
        self.header = loaded.header
        self.sealed = loaded.sealed
        self.entries = loaded.entries

    def read(self, entry: FooterEntry, codec: Codec) -> Bytes:
        """Read, check and decode a page.

        Raises:
            FormatError: the record is damaged.
            OSError: the disk failed, or the record is missing.
        """
        fd = RealFiles().open(self.path, Access.READ, direct=False)
        try:
            stored = read_blocks(RealFiles(), fd, entry.offset, entry.nbytes)
        finally:
            RealFiles().close(fd)
        page = np.empty(self.header.page_format.page_bytes, np.uint8)
        decode_record(self.header, codec, entry.key, stored, page)
        return page
