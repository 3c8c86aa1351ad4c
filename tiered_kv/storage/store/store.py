"""The SSD tier of one rank: pages by key, in append-only segments that outlive the process.

A put encodes pages on several threads, appends them to the active segment in large writes and
makes them durable together; only then are they found. A get reads neighbouring pages in one
go, and checks key, lengths and checksum of each before it counts as read. A full segment is
sealed with a footer and never changes again: room comes from deleting whole segments, the
owner deciding (``proposal``, ``reclaim``) which of their pages are worth writing once more.
Nothing is ever appended to a segment of an earlier process.

One thread owns a store and makes all calls; ``put`` and ``get`` use threads of their own.

The parts: ``catalogue`` (which page is where), ``putting``, ``getting``, ``segment_maker``
(segments begin and are sealed), ``reclaiming``, ``recovery``.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tiered_kv.codecs.base import Bytes, Codec
from tiered_kv.keys import PageKey
from tiered_kv.messages import Proposal
from tiered_kv.storage.base import PageStore
from tiered_kv.storage.disk.aligned import BufferPool
from tiered_kv.storage.disk.files import BLOCK, FileLayer, RealFiles, takes_direct

from .capacity import Capacity
from .catalogue import Catalogue
from .codec_training import Training
from .context import WRITE_BYTES, StoreMeans, is_full
from .locks import StoreError, StoreLock, root_locked
from .options import StoreOptions, StoreStats
from .page_reader import Getter
from .page_writer import Putter
from .reclaimer import Reclaimer
from .recovery import CodecFrom, Recovery
from .segment_folder import SegmentFolder
from .segment_lifecycle import SegmentMaker

logger = logging.getLogger(__name__)

_TOUCH_S = 60.0


class SegmentStore(PageStore):
    """Pages of one rank on disk.

    Opening makes the folders, takes the lock and finds every page that is there.

    Args:
        codec: encodes new pages; if it wants training, it gets it from the first pages put,
            or from the newest segment of an earlier process.
        codec_from: the codec of stored pages, from its id, table and page format.

    Attributes:
        stats: what it did so far.
        direct: whether files are read and written past the page cache.

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
        self._closed = False
        self._training = Training(codec)
        self._capacity = capacity = Capacity(files, options)
        try:
            with ExitStack() as undo:
                self._lock = _begin(options, files, capacity)
                undo.callback(self._lock.release)
                means = _means(options, self.stats, files, self._lock.path)
                self.direct = means.direct
                self._folder = folder = SegmentFolder(means, capacity)
                self._catalogue = catalogue = Catalogue(means, folder)
                undo.callback(catalogue.close_all)
                undo.callback(means.threads.shutdown)
                self._maker = maker = SegmentMaker(means, folder, catalogue, capacity, self._lock)
                self._getter = Getter(means, catalogue)
                self._putter = Putter(means, catalogue, maker, self._training)
                self._reclaimer = Reclaimer(means, catalogue, capacity, self._getter, self._putter)
                recovery = Recovery(means, folder, catalogue, maker, codec_from)
                recovery.run()
                if (trained := recovery.trained(codec)) is not None:
                    self._training.skip(trained)
                self._resources = undo.pop_all()
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise StoreError(
                    f"{error.filename} is no plain file: remove it, or set another "
                    "TIERED_KV_SSD_PATH"
                ) from error
            raise StoreError(
                f"{options.folder} cannot be used ({error.strerror or error}): make it writable, "
                "or set another TIERED_KV_SSD_PATH"
            ) from error

    # -- what is there ------------------------------------------------------------

    def __contains__(self, key: object) -> bool:
        return key in self._catalogue.pages

    def __len__(self) -> int:
        return len(self._catalogue.pages)

    def keys(self) -> list[PageKey]:
        """Every page, the one written longest ago first; a rewritten page counts as new."""
        return list(self._catalogue.pages)

    @property
    def raw_bytes(self) -> int:
        """Bytes of the live pages as ``get`` gives them."""
        return len(self) * self.options.page_format.page_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of the live pages on disk, without headers and padding."""
        return self._catalogue.stored_bytes

    def counters(self) -> dict[str, int]:
        """Totals so far, by names of ``metrics.COUNTERS``."""
        stats = self.stats
        return {
            "ssd_bytes_written": stats.bytes_written,
            "ssd_bytes_read": stats.bytes_read,
            "ssd_pages_bad": stats.pages_bad,
            "ssd_segments_bad": stats.segments_bad,
            "ssd_pages_refused": stats.pages_refused,
            "ssd_errors": stats.write_errors + stats.read_errors,
        }

    @property
    def codec(self) -> Codec:
        """What new pages are encoded with."""
        return self._training.codec

    # -- pages --------------------------------------------------------------------

    def put(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        """Store pages, all of them durable when this returns; blocks on the disk.

        A page stored before is replaced. The pages must not change until this returns.

        Args:
            pages: keys of 16 to 255 bytes, pages of ``page_bytes`` bytes.

        Returns:
            Indices of the pages that are not stored, because the disk failed, there is no room
            (see ``proposal``) or the store is closed. Of a key given twice the last page is
            stored, and speaks for both. A page that is not stored leaves what was stored under
            its key before.
        """
        if self._closed:
            self.stats.pages_refused += len(pages)
            return frozenset(range(len(pages)))
        return self._putter.put(pages)

    def get(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        """Read pages into buffers of ``page_bytes`` bytes; blocks on the disk.

        Returns:
            Indices of the pages that are absent, as all are once the store is closed, or turned
            out bad and are absent now. Their buffers may hold anything.
        """
        failed = self._getter.get(pages)
        self._lock.touch(_TOUCH_S)
        return failed

    def exists(self, keys: Sequence[PageKey], deadline_s: float) -> frozenset[int]:
        """Look pages up in memory; the deadline is met always."""
        return frozenset(i for i, key in enumerate(keys) if key not in self)

    def drop(self, keys: Iterable[PageKey]) -> None:
        """Forget pages; a segment whose last page goes is deleted. Unknown keys are ignored.

        Dropped pages may be found again by the next process: no harm, since what a key stands
        for never changes.
        """
        for key in keys:
            self._catalogue.forget(key)

    # -- room ---------------------------------------------------------------------

    @property
    def segment_bytes(self) -> int:
        """What the next segment will take."""
        return self._capacity.segment_bytes

    @property
    def group_bytes(self) -> int:
        """Bytes of a segment: a small store could not make room for more at a time."""
        return self.segment_bytes

    def proposal(self) -> Proposal | None:
        """The segment that should die next, if less than about two segments' room is left or
        the store has more than its share. Changes nothing."""
        return None if self._closed else self._reclaimer.proposal()

    def reclaim(self, segment: int, survivors: Collection[PageKey]) -> list[PageKey]:
        """Delete a segment after writing those of its pages that survive once more.

        Returns:
            The pages that are gone: all others, and survivors that could not be rewritten. As
            with ``drop``, the next process may find one again, in an older record.
        """
        return self._reclaimer.reclaim(segment, survivors)

    # -- the end ------------------------------------------------------------------

    def clear(self) -> None:
        """Invalidate every page on disk, durably.

        Raises:
            StoreError: some may be left. The store is empty nonetheless, but the next process
                could find them.
        """
        if self._closed:
            raise StoreError("a closed store cannot be cleared: open it first")
        self._training.forget()
        for segment in list(self._catalogue.segments.values()):
            self._catalogue.delete(segment)
        try:
            self._folder.delete_all()
        except OSError as error:
            raise StoreError(
                f"pages of before the reset may be left in {self.options.folder} ({error}): "
                "remove it before the next start"
            ) from error

    def close(self) -> None:
        """Seal, stop the threads and unlock. Idempotent; the store is empty afterwards."""
        self._closed = True
        with self._resources:
            if (active := self._catalogue.active) is not None:
                self._maker.seal(active)


def _begin(options: StoreOptions, files: FileLayer, capacity: Capacity) -> StoreLock:
    """The lock of the store, whose folder is made if need be. Where even that has no room, stores
    that nobody has open give way."""
    while True:
        try:
            files.make_folders(options.folder)
            with root_locked(options.root):
                return StoreLock(options.folder)
        except OSError as error:
            if not is_full(error):
                raise
            with root_locked(options.root):
                if not capacity.delete_dead(1):
                    raise


def _means(options: StoreOptions, stats: StoreStats, files: FileLayer, known: Path) -> StoreMeans:
    buffers = BufferPool(WRITE_BYTES * 5 // 4, keep=2 * options.io_threads + 4)
    block = buffers.take(BLOCK)
    direct = takes_direct(files, known, block.data[:BLOCK])
    buffers.give(block)
    if not direct:
        logger.warning(
            "%s does not take O_DIRECT: the SSD tier goes through the page cache, which is "
            "slower and takes memory from others",
            options.root,
        )
    threads = ThreadPoolExecutor(options.io_threads, "tiered-kv-ssd")
    return StoreMeans(options, stats, files, direct, buffers, threads)
