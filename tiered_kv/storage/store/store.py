"""The SSD store of one rank: pages by key, in append-only segments that outlive the process.

A put encodes pages on several threads, appends them to the active segment in large writes and makes
them durable together; only then are they found. A get reads adjacent pages together, and checks
key, lengths and checksum of each page. A full segment is sealed with a footer and never changes
again. Space is freed by deleting whole segments: the caller decides (``proposal``, ``reclaim``)
which of their pages to write once more. Nothing is ever appended to a segment of an earlier
process.

``put`` and ``get`` use the store's own threads. The parts of a store: ``catalogue`` (the segments,
and the segment of each page), ``page_writer``, ``page_reader``, ``segment_lifecycle`` (creating and
sealing segments), ``recovery``.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tiered_kv.codecs.base import Bytes, Codec, CodedPage, EncodedPage
from tiered_kv.codecs.training import CodecTraining
from tiered_kv.keys import PageKey
from tiered_kv.messages import Proposal
from tiered_kv.plain_files import check_owner
from tiered_kv.storage.base import PageStore, put_present
from tiered_kv.storage.disk.aligned import BufferPool, aligned_bytes
from tiered_kv.storage.disk.files import BLOCK, FileLayer, RealFiles, takes_direct
from tiered_kv.storage.segment.format import MIN_PAGES
from tiered_kv.storage.segment.packing import PageToWrite

from .capacity import Capacity, Outlook
from .catalogue import Catalogue, Segment
from .locks import StoreError, StoreLock, root_locked
from .options import WRITE_BYTES, StoreContext, StoreOptions, StoreStats, is_full
from .page_reader import PageReader
from .page_writer import PageWriter
from .recovery import CodecFrom, Recovery
from .segment_lifecycle import SegmentLifecycle

logger = logging.getLogger(__name__)

_TOUCH_S = 60.0
_MOVE_BYTES = 8 << 20


class SegmentStore(PageStore):
    """Pages of one rank on disk.

    Opening creates the folders, takes the lock and finds every stored page.

    Args:
        options: location and owner of the store.
        codec: codec of new pages. If it needs training, it is trained on the first pages put, or
            adopted from the newest segment of an earlier process.
        codec_from: creates the codec of stored pages from its id, table and page format.
        files: access to files; a test may pass its own implementation.

    Attributes:
        options: the options as passed.
        stats: totals since the store was opened.
        direct: True if files are read and written with direct I/O.

    Raises:
        StoreBusyError: another process has the store open.
        StoreError: the folder or the capacity cannot be used.
    """

    def __init__(
        self,
        options: StoreOptions,
        codec: Codec,
        codec_from: CodecFrom,
        files: FileLayer | None = None,
    ) -> None:
        options.check(codec)
        files = files or RealFiles()
        self.options = options
        self.stats = StoreStats()
        self._training = CodecTraining(codec)
        self._capacity = capacity = Capacity(files, options)
        try:
            with ExitStack() as undo:
                self._lock = _begin(options, files, capacity)
                undo.callback(self._lock.release)
                context = _context(options, self.stats, files, self._lock.path)
                self.direct = context.direct
                self._catalogue = catalogue = Catalogue(context, capacity)
                undo.callback(catalogue.close_all)
                undo.callback(context.threads.shutdown)
                self._lifecycle = lifecycle = SegmentLifecycle(
                    context, catalogue, capacity, self._lock
                )
                self._reader = PageReader(context, catalogue)
                self._writer = PageWriter(context, catalogue, lifecycle, self._training)
                Recovery(context, catalogue, lifecycle, codec_from).run()
                for segment in reversed(catalogue.segments.values()):
                    if self._training.adopt(segment.codec):
                        break
                self._resources = undo.pop_all()
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise StoreError(
                    f"{error.filename} is not a regular file: remove it, or set another "
                    "TIERED_KV_SSD_PATH"
                ) from error
            raise StoreError(
                f"{options.folder} cannot be used ({error.strerror or error}): check the folder's "
                "permissions and its disk, or set another TIERED_KV_SSD_PATH"
            ) from error

    # -- contents -----------------------------------------------------------------

    def __contains__(self, key: object) -> bool:
        return key in self._catalogue.pages

    def __len__(self) -> int:
        return len(self._catalogue.pages)

    def keys(self) -> list[PageKey]:
        """Keys of all pages, oldest first. A page that was written once more counts as new."""
        return list(self._catalogue.pages)

    @property
    def raw_bytes(self) -> int:
        """Size of the live pages as returned by ``get``, bytes."""
        return len(self) * self.options.page_format.page_bytes

    @property
    def stored_bytes(self) -> int:
        """Size of the live pages on disk without headers and padding, bytes."""
        return self._catalogue.stored_bytes

    def counters(self) -> dict[str, int]:
        """Return the totals so far, by the names of ``metrics.COUNTERS``."""
        stats = self.stats
        return {
            "ssd_bytes_written": stats.bytes_written,
            "ssd_bytes_read": stats.bytes_read,
            "ssd_pages_bad": stats.pages_bad,
            "ssd_segments_bad": stats.segments_bad,
            "ssd_pages_refused": stats.pages_refused,
            "ssd_pages_kept_compressed": stats.pages_kept_coded,
            "ssd_pages_recompressed": stats.pages_recoded,
            "ssd_errors": stats.write_errors + stats.read_errors,
        }

    @property
    def codec(self) -> Codec:
        """Codec of new pages."""
        return self._training.codec

    @property
    def codec_of_new_pages(self) -> Codec | None:
        return None if self._training.wanted else self._training.codec

    # -- pages --------------------------------------------------------------------

    def put(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        """Store pages. All stored pages are durable when the call returns.

        Returns:
            The indices of the pages that are not stored, because the disk failed, there is no space
            (see ``proposal``) or the store is closed.
        """
        return self._writer.put(pages)

    def put_coded(self, pages: Sequence[tuple[PageKey, CodedPage]]) -> frozenset[int]:
        """Store pages that are already encoded. Pages that use the codec of new pages are stored
        unchanged; other pages are decoded and encoded again.

        A store that has not trained a codec adopts the codec of these pages, so that no page is
        encoded twice.
        """
        codecs = [coded.codec for _, coded in pages]
        self._writer.adopt(codec for codec in codecs if codec is not None)
        own = self.codec_of_new_pages
        kept = {i for i, codec in enumerate(codecs) if codec is not None and codec == own}
        as_stored = list[tuple[PageKey, Bytes | EncodedPage] | None]()
        for i, (key, coded) in enumerate(pages):
            page = coded.page if i in kept else coded.decoded()
            as_stored.append(None if page is None else (key, page))
        failed = put_present(self._writer.put, as_stored)
        recoded = {i for i, codec in enumerate(codecs) if codec is not None and i not in kept}
        self.stats.pages_kept_coded += len(kept - failed)
        self.stats.pages_recoded += len(recoded - failed)
        return failed

    def get(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        """Read pages. Pages that turn out to be bad are dropped."""
        failed = self._reader.get(pages)
        self._lock.touch(_TOUCH_S)
        return failed

    def exists(self, keys: Sequence[PageKey], deadline_s: float) -> frozenset[int]:
        """Look pages up in the catalogue, without I/O."""
        return frozenset(i for i, key in enumerate(keys) if key not in self)

    def drop(self, keys: Iterable[PageKey]) -> None:
        """Forget pages. A segment is deleted with its last page.

        The next process may find dropped pages again, which is harmless, because a key always
        stands for the same bytes.
        """
        for key in keys:
            self._catalogue.forget(key)

    # -- room ---------------------------------------------------------------------

    @property
    def group_bytes(self) -> int:
        """Size of the next segment, bytes. A small store cannot free more space at a time than one
        segment."""
        return self._capacity.outlook().segment

    def proposal(self) -> Proposal | None:
        """Return the segment that should be reclaimed next; None if there is enough space.

        The space is enough while two segments fit into it (one, if the share is small) and the
        store does not exceed its share. The victim is the segment with the fewest live bytes if
        more than half of it is dead, otherwise the oldest. The active segment is reclaimed only if
        it is full and the only one.
        """
        victim = None if self._catalogue.closed else self._victim()
        if victim is None:
            return None
        return Proposal(victim.number, tuple(place.key for place in victim.places()))

    def _victim(self) -> Segment | None:
        outlook, active = self._capacity.outlook(), self._catalogue.active
        left = active.writer.room if active is not None and active.writer is not None else 0
        if not _is_short(outlook, left):
            return None
        sealed = [s for s in self._catalogue.segments.values() if s.writer is None]
        if not sealed:
            return active if left < outlook.segment // MIN_PAGES else None
        emptiest = min(sealed, key=lambda segment: segment.live_bytes)
        return emptiest if 2 * emptiest.live_bytes < emptiest.end else sealed[0]

    def reclaim(self, segment: int, survivors: Collection[PageKey]) -> list[PageKey]:
        """Delete a segment after writing the survivors among its pages once more.

        Returns:
            The pages that are lost: all pages except the survivors, and survivors that could not be
            written. As with ``drop``, the next process may find such a page again, in an older
            record.
        """
        victim = self._catalogue.segments.get(segment)
        if victim is None:
            return []
        victim.writer = None  # survivors are written to another segment
        keys = [place.key for place in victim.places()]
        surviving = set(survivors)
        moving = [key for key in keys if key in surviving]
        per_batch = max(1, _MOVE_BYTES // self.options.page_format.page_bytes)
        for start in range(0, len(moving), per_batch):
            self._rewrite(moving[start : start + per_batch])
        self._catalogue.delete(victim)
        return [key for key in keys if key not in self._catalogue.pages]

    def _rewrite(self, keys: Sequence[PageKey]) -> None:
        """Write pages once more, with the codec of new pages. Damaged pages are dropped instead."""
        written = [self._catalogue.pages[key].place.written for key in keys]
        nbytes = len(keys) * self.options.page_format.page_bytes
        pages = aligned_bytes(nbytes)[:nbytes].reshape(len(keys), -1)
        bad = self._reader.get(list(zip(keys, pages, strict=True)))
        items = [
            PageToWrite(i, key, pages[i], written[i]) for i, key in enumerate(keys) if i not in bad
        ]
        self._writer.append(items, while_reclaiming=True)

    # -- the end ------------------------------------------------------------------

    def clear(self) -> None:
        """Invalidate every page on disk, durably.

        Raises:
            StoreError: the store is closed, or some pages may be left on disk. In the latter case
                the store is empty nonetheless, but the next process could find these pages.
        """
        if self._catalogue.closed:
            raise StoreError("a closed store cannot be cleared: open it first")
        self._training.forget()
        try:
            self._catalogue.delete_all()
        except OSError as error:
            raise StoreError(
                f"pages from before the reset may remain in {self.options.folder} ({error}): "
                "remove the folder before the next start"
            ) from error

    def close(self) -> None:
        """Seal the active segment, stop the threads, close all files and release the lock."""
        with self._resources:
            if (active := self._catalogue.active) is not None:
                self._lifecycle.seal(active)


def _is_short(outlook: Outlook, left: int) -> bool:
    """Return True if a store must free space, given the bytes left in its active segment."""
    segment = outlook.segment
    enough = 2 * segment if outlook.share >= 8 * segment else segment
    if outlook.owed >= enough:
        # Other stores exceed their shares and will shrink. This store gives up pages only when it
        # can write nothing at all.
        return outlook.blocked and left < segment // MIN_PAGES
    return outlook.room // segment * segment + left < enough  # only whole segments count


def _begin(options: StoreOptions, files: FileLayer, capacity: Capacity) -> StoreLock:
    """Lock the store, and create its folder if needed.

    If the disk is too full even for the folder, segments of unused stores are deleted.
    """
    while True:
        try:
            files.make_folders(options.folder)
            check_owner(options.folder.parent)
            check_owner(options.folder)
            with root_locked(options.root):
                return StoreLock(options.folder)
        except OSError as error:
            if not is_full(error):
                raise
            with root_locked(options.root):
                if not capacity.delete_dead(1):
                    raise


def _context(
    options: StoreOptions, stats: StoreStats, files: FileLayer, known: Path
) -> StoreContext:
    buffers = BufferPool(WRITE_BYTES * 5 // 4, keep=2 * options.io_threads + 4)
    block = buffers.take(BLOCK)
    direct = takes_direct(files, known, block.data[:BLOCK])
    buffers.give(block)
    if not direct:
        logger.warning(
            "the file system of %s does not support O_DIRECT: the SSD tier uses the page "
            "cache, which is slower and uses more memory",
            options.root,
        )
    threads = ThreadPoolExecutor(options.io_threads, "tiered-kv-ssd")
    return StoreContext(options, stats, files, direct, buffers, threads)
