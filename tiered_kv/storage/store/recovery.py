"""Recovery of the pages that earlier processes stored.

The segments are the only source of truth. Opening reads their footers. Segments that a killed
process left unsealed are scanned for complete records, and sealed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from tiered_kv.codecs.base import Codec, CodecError, PageFormat
from tiered_kv.codecs.registry import UnknownCodecError
from tiered_kv.storage.disk.files import Access
from tiered_kv.storage.segment.format import FormatError, SegmentHeader
from tiered_kv.storage.segment.loader import LoadedSegment, load_segment

from .catalogue import NEARLY_LAST_NUMBER, Catalogue, Segment
from .options import StoreContext
from .segment_lifecycle import SegmentLifecycle

logger = logging.getLogger(__name__)

CodecFrom: TypeAlias = Callable[[int, bytes, PageFormat], Codec]
"""Creates the codec of stored pages from its id, table and page format."""


class Recovery:
    """Fills the empty catalogue of a store that is being opened."""

    def __init__(
        self,
        context: StoreContext,
        catalogue: Catalogue,
        lifecycle: SegmentLifecycle,
        codec_from: CodecFrom,
    ) -> None:
        self._context = context
        self._catalogue = catalogue
        self._lifecycle = lifecycle
        self._codec_from = codec_from

    def run(self) -> None:
        """Find every page, and seal the segments that are not sealed. Unusable segments are
        deleted. Segments that cannot be read now are set aside.

        Raises:
            OSError: the folder cannot be read.
        """
        unsealed = []
        for number in self._catalogue.numbers():
            path = self._catalogue.path(number)
            try:
                segment, loaded = self._load(path, number)
            except FormatError as error:
                logger.warning("%s is unusable and was deleted: %s", path, error)
                self._context.stats.segments_bad += 1
                self._catalogue.delete_file(path)
            except Exception as error:  # its pages are not known to be bad
                logger.warning("%s cannot be read, so its pages are not used: %s", path, error)
                self._context.stats.segments_bad += 1
                self._catalogue.set_aside(path)
            else:
                self._catalogue.add(segment)
                self._catalogue.insert(segment, loaded.entries)
                if not loaded.sealed:
                    unsealed.append(segment)
        if any(number > NEARLY_LAST_NUMBER for number in self._catalogue.segments):
            logger.warning(
                "all pages in %s are deleted, because the store has no segment numbers left",
                self._context.options.folder,
            )
            self._catalogue.delete_segments()
            self._lifecycle.restart_numbering()
        for segment in list(self._catalogue.segments.values()):
            if segment in unsealed or not segment.live:
                self._lifecycle.seal(segment)
        self._catalogue.close_some()

    def _load(self, path: Path, number: int) -> tuple[Segment, LoadedSegment]:
        """Load a segment of an earlier process.

        Raises:
            UnknownCodecError: the codec of the segment is not available.
            FormatError: the segment is unusable.
            OSError: the disk failed.
        """
        files = self._context.files
        fd = files.open(path, Access.READ, direct=self._context.direct)
        try:
            loaded = load_segment(files, fd, partial(self._check, number))
            header = loaded.header
            codec = self._codec_of(header)
        except BaseException:
            files.close(fd)
            raise
        return Segment(path, header, codec, loaded.end, fd=fd), loaded

    def _check(self, number: int, header: SegmentHeader) -> None:
        """Check that a segment belongs to this store.

        Raises:
            FormatError: the segment belongs to another store, or has pages of another format.
        """
        options = self._context.options
        found = (header.fingerprint, header.replica, header.rank, header.ranks, header.number)
        here = (options.fingerprint, options.replica, options.rank, options.ranks, number)
        if found != here:
            raise FormatError("the segment belongs to another store, or its number is wrong")
        if header.page_format != options.page_format.outline:
            raise FormatError("the segment contains pages of another format")

    def _codec_of(self, header: SegmentHeader) -> Codec:
        """Find or create the codec of a segment. Segments with the same table share one codec.

        Raises:
            UnknownCodecError: the codec is not available.
            FormatError: the segment cannot be decoded.
        """
        for segment in self._catalogue.segments.values():
            known = segment.header
            if (known.codec_id, known.table) == (header.codec_id, header.table):
                return segment.codec
        page_format = self._context.options.page_format
        try:
            codec = self._codec_from(header.codec_id, header.table, page_format)
        except UnknownCodecError:
            raise
        except CodecError as error:
            raise FormatError(
                f"codec {header.codec_id} of the segment cannot be created: {error}"
            ) from error
        if codec.page_format != page_format:  # known from the table, not from the header
            raise FormatError("the segment contains pages of another format")
        return codec
