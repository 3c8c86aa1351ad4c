"""Writes of pages, which are encoded on several threads, written in large writes, and made durable
together."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from itertools import islice

from tiered_kv.codecs.base import Bytes, Codec, EncodedPage
from tiered_kv.codecs.training import CodecTraining
from tiered_kv.keys import PageKey
from tiered_kv.storage.segment.format import MAX_KEY_BYTES, MIN_KEY_BYTES, seconds_now
from tiered_kv.storage.segment.packing import Batch, PageToWrite, batch_in_place, pack_batch

from .catalogue import Catalogue, Segment
from .options import WRITE_BYTES, StoreContext
from .segment_lifecycle import SegmentLifecycle

logger = logging.getLogger(__name__)


class PageWriter:
    """Appends pages to the active segment, and creates and seals segments as needed."""

    def __init__(
        self,
        context: StoreContext,
        catalogue: Catalogue,
        lifecycle: SegmentLifecycle,
        training: CodecTraining,
    ) -> None:
        self._context = context
        self._catalogue = catalogue
        self._lifecycle = lifecycle
        self._training = training
        self._full: Segment | None = None  # a full segment, during a put

    def put(self, pages: Sequence[tuple[PageKey, Bytes | EncodedPage]]) -> frozenset[int]:
        """See ``SegmentStore.put``. Pages that are already encoded must use the codec of new
        pages."""
        if self._catalogue.closed:
            self._context.stats.pages_refused += len(pages)
            return frozenset(range(len(pages)))
        last = {key: i for i, (key, _) in enumerate(pages)}
        now = seconds_now()
        is_page = self._context.options.is_page
        fit: Iterator[PageToWrite] = (  # evaluated while earlier pages are being written
            PageToWrite(i, key, page, now)
            for i, (key, page) in enumerate(pages)
            if last[key] == i
            and MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES
            and (isinstance(page, EncodedPage) or is_page(page))
        )
        if self._training.wanted:
            active, seen = self._catalogue.active, list(fit)
            raw = [item.page for item in seen if not isinstance(item.page, EncodedPage)]
            if self._training.see(raw) and active is not None:
                self._lifecycle.seal(active)
            fit = iter(seen)
        stored = self.append(fit)
        failed = frozenset(i for i, (key, _) in enumerate(pages) if last[key] not in stored)
        self._context.stats.pages_refused += len(failed)
        return failed

    def adopt(self, codecs: Iterable[Codec]) -> None:
        """Adopt the first of these codecs that is usable, unless a codec is trained already."""
        if any(map(self._training.adopt, codecs)) and (active := self._catalogue.active):
            self._lifecycle.seal(active)

    def append(self, items: Iterable[PageToWrite], *, while_reclaiming: bool = False) -> set[int]:
        """Encode pages, and write them while further pages are encoded.

        Args:
            while_reclaiming: True if the pages come from a segment that is then deleted.

        Returns:
            Indices of the pages that are durable.
        """
        context = self._context
        stored: set[int] = set()
        page_bytes = context.options.page_format.page_bytes
        source = _slices(items, max(1, WRITE_BYTES // page_bytes))
        packing: deque[Future[Batch] | Batch] = deque()
        going_on = True
        while True:
            while going_on and len(packing) <= context.options.io_threads:
                if (pages := next(source, None)) is None:
                    break
                packing.append(self._pack(pages))
                if isinstance(packing[0], Batch):
                    break
            if not packing:
                break
            try:
                first = packing.popleft()
                batch = first if isinstance(first, Batch) else first.result()
            except OSError as error:  # out of memory
                context.write_failed("pages cannot be encoded", error)
                going_on = False
            else:
                going_on = going_on and self._place(batch, stored, while_reclaiming)
        self._commit_full(stored)
        if (active := self._catalogue.active) is not None:
            self._commit(active, stored)
        return stored

    def _pack(self, pages: Sequence[PageToWrite]) -> Future[Batch] | Batch:
        context, codec = self._context, self._training.codec
        with suppress(OSError):  # out of memory; the other path fails too
            if (batch := batch_in_place(codec, pages, context.buffers)) is not None:
                return batch
        return context.threads.submit(pack_batch, codec, pages, context.buffers)

    def _place(self, batch: Batch, stored: set[int], while_reclaiming: bool) -> bool:
        """Start writing a batch, in as many segments as needed. Returns False if no further batch
        can be written."""
        context, records = self._context, batch.records
        earlier = list[Future[None]]()
        while records:
            active = self._catalogue.active
            if active is None or active is self._full:
                active = self._lifecycle.begin(
                    self._training.codec, while_reclaiming=while_reclaiming
                )
            if active is None or active.writer is None:
                return False
            count = active.writer.fitting(records)
            if count == 0 and active.writer.empty:
                logger.error(
                    "a page of %d bytes is too large for a segment, and is not stored",
                    records[0].nbytes,
                )
                records = records[1:]
            elif count == 0:
                # The segment is sealed once its pending writes are done, so that the disk does
                # not idle.
                if not self._commit_full(stored):
                    return False
                self._full = active
            else:
                write = active.writer.append(
                    batch.buffer, records[:count], context.threads, 2 * context.options.io_threads
                )
                records = records[count:]
                if records:
                    earlier.append(write)
                else:
                    # A future keeps its done callback. If the callback referred back to the future,
                    # both would keep the buffer alive until Python collects cycles, minutes later.
                    write.add_done_callback(partial(self._give, batch.buffer, tuple(earlier)))
        return True

    def _give(self, buffer: Bytes, earlier: Sequence[Future[None]], _: Future[None]) -> None:
        """Return the buffer of a batch to the pool after its last write.

        The earlier writes of the batch go to other segments, and may take longer.
        """
        wait(earlier)
        self._context.buffers.give(buffer)

    def _commit_full(self, stored: set[int]) -> bool:
        """Commit and seal the previous segment, if it is full. Returns False if the commit
        failed."""
        full, self._full = self._full, None
        if full is None or not self._commit(full, stored):
            return full is None
        self._lifecycle.seal(full)
        return True

    def _commit(self, segment: Segment, stored: set[int]) -> bool:
        """Make the pages that were written to a segment durable, and then visible. Returns False if
        some of these pages are not durable."""
        assert segment.writer is not None
        commit = segment.writer.commit()
        segment.end = segment.writer.end
        self._catalogue.insert(segment, commit.durable)
        stored.update(commit.indices)
        written = sum(place.stored_bytes for place in commit.durable)
        self._context.stats.bytes_written += written
        if commit.error is None:
            return True
        self._lifecycle.fail(segment, commit.error)
        return False


def _slices(items: Iterable[PageToWrite], step: int) -> Iterator[Sequence[PageToWrite]]:
    """Yield slices of the pages, each for one write."""
    source = iter(items)
    while pages := list(islice(source, step)):
        yield pages
