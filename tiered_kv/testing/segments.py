"""Segments as a test looks at them, beside the store that may have them open."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tiered_kv.codecs.base import Bytes, Codec
from tiered_kv.storage.disk.files import Access, RealFiles
from tiered_kv.storage.segment.format import FooterEntry
from tiered_kv.storage.segment.loader import load_segment
from tiered_kv.storage.segment.record import decode_record, read_blocks


class SegmentFile:
    """Content of a segment at this moment.

    Attributes:
        header: its header.
        sealed: True if it has a footer.
        entries: places of its records, in the order they were written.

    Raises:
        FormatError: it is no segment.
        OSError: it cannot be read, or is gone.
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
        """A page: read, checked and decoded.

        Raises:
            FormatError: the record is damaged.
            OSError: the disk failed, or the record is gone.
        """
        fd = RealFiles().open(self.path, Access.READ, direct=False)
        try:
            stored = read_blocks(RealFiles(), fd, entry.offset, entry.nbytes)
        finally:
            RealFiles().close(fd)
        page = np.empty(self.header.page_format.page_bytes, np.uint8)
        decode_record(self.header, codec, entry.key, stored, page)
        return page
