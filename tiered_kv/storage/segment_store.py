"""The SSD tier of one rank: pages by key, in append-only segments that outlive the process.

A put encodes pages on several threads, appends them to the active segment in large writes and
makes them durable together; only then are they found. A get reads neighbouring pages in one
go, and checks key, lengths and checksum of each before it counts as read. A full segment is
sealed with a footer and never changes again: room comes from deleting whole segments, the
owner deciding (``proposal``, ``reclaim``) which of their pages are worth writing once more.

The segments are the only truth. Opening reads their footers; the one segment a killed process
leaves unsealed is scanned, cut behind its last whole record, and sealed. Nothing is ever
appended to a segment of an earlier process.

One thread owns a store and makes all calls; ``put`` and ``get`` use threads of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from tiered_kv.codecs.base import Bytes, Codec, PageFormat
from tiered_kv.keys import PageKey
from tiered_kv.storage.aligned import (
    Batch,
    BufferPool,
    PageToWrite,
    SegmentWriter,
    pack_batch,
    write_footer,
)
from tiered_kv.storage.capacity import (
    SEGMENT_SUFFIX,
    Capacity,
    StoreBusyError,
    StoreError,
    StoreLock,
)
from tiered_kv.storage.files import (
    BLOCK,
    Access,
    FileLayer,
    RealFiles,
    read_exactly,
    takes_direct,
)
from tiered_kv.storage.reading import LoadedSegment, decode_record, load_segment
from tiered_kv.storage.segment_format import (
    MAX_KEY_BYTES,
    MIN_KEY_BYTES,
    FooterEntry,
    FormatError,
    SegmentHeader,
    footer_bytes,
    record_bytes,
)

__all__ = [
    "Proposal",
    "SegmentStore",
    "StoreBusyError",
    "StoreError",
    "StoreOptions",
    "StoreStats",
]

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20
MIN_PAGES = 8
"""Pages for which every segment has room."""
MIN_SAMPLE = 16
MAX_SAMPLE = 64
"""Pages from which a codec is trained."""

_WRITE_BYTES = 2 << 20
_WRITES_IN_FLIGHT = 2  # as many as a device needs; more would only wait for a core
_READ_BYTES = (128 << 10, 5 << 19)
_MOVE_BYTES = 8 << 20
_OPEN_FILES = 128
_TOUCH_S = 60.0


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Where a store lies, whose pages it holds and how much room it may take.

    Attributes:
        root: folder shared by all ranks, replicas and fingerprints.
        fingerprint: 16 bytes; pages of other fingerprints are in other folders.
        capacity_bytes: for everything under the root.
        io_threads: threads that encode, decode, read and write.
    """

    root: Path
    fingerprint: bytes
    replica: int
    rank: int
    ranks: int
    page_format: PageFormat
    capacity_bytes: int
    io_threads: int = 4

    @property
    def folder(self) -> Path:
        return self.root / self.fingerprint.hex() / f"{self.replica}-{self.rank}"

    @property
    def segment_bytes(self) -> int:
        """Of a segment: a sixteenth of a rank's capacity, within reason."""
        page = self.page_format.page_bytes
        # A codec may store a little more than it was given.
        record = record_bytes(MAX_KEY_BYTES, page + page // 64 + BLOCK)
        header = 16 * BLOCK
        least = header + MIN_PAGES * record + footer_bytes(MIN_PAGES, MIN_PAGES * MAX_KEY_BYTES)
        fair = self.capacity_bytes // (16 * max(1, self.ranks)) // BLOCK * BLOCK
        return max(least, min(SEGMENT_BYTES, fair))


@dataclass(frozen=True, slots=True)
class Proposal:
    """The segment that should die next.

    Attributes:
        keys: its live pages, oldest first.
    """

    segment: int
    keys: tuple[PageKey, ...]


@dataclass(slots=True)
class StoreStats:
    """What a store did since it was opened. Bytes written and read are stored bytes."""

    pages_written: int = 0
    bytes_written: int = 0
    raw_bytes_written: int = 0
    pages_read: int = 0
    bytes_read: int = 0
    pages_bad: int = 0
    """Pages found damaged, or whose reading failed; each was dropped."""
    pages_refused: int = 0
    """Pages of puts that were not stored, whatever the reason."""
    no_room: int = 0
    """Times a segment was wanted and could not be had."""
    write_errors: int = 0
    read_errors: int = 0
    segments_created: int = 0
    segments_deleted: int = 0
    segments_bad: int = 0
    """Segments found on opening that could not be used."""


@dataclass(slots=True, eq=False)
class _Segment:
    """A segment of this store.

    Attributes:
        end: where the last record ends.
        writer: of the active segment.
        live: the pages whose newest record lies here.
    """

    path: Path
    header: SegmentHeader
    table_id: int
    codec: Codec
    end: int
    fd: int | None = None
    writer: SegmentWriter | None = None
    live: dict[PageKey, _Entry] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.header.number

    @property
    def live_bytes(self) -> int:
        return sum(entry.place.nbytes for entry in self.live.values())


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A live page."""

    segment: _Segment
    place: FooterEntry


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A page of a get."""

    index: int
    entry: _Entry
    out: Bytes

    @property
    def place(self) -> FooterEntry:
        return self.entry.place


@dataclass(frozen=True, slots=True)
class _Bad:
    """A page that could not be read, and why."""

    item: _Wanted
    error: OSError | FormatError


class SegmentStore:
    """Pages of one rank on disk.

    Opening makes the folders, takes the lock and finds every page that is there.

    Args:
        codec: encodes new pages; if it wants training, it gets it from the first pages put,
            or from the newest segment of an earlier process.
        codec_from: the codec of stored pages, from its id, table and page format.

    Attributes:
        stats: what it did so far.
        direct: whether files are read and written past the page cache.
        read_mbs, write_mbs: speed of recent gets and puts in MB/s of stored bytes, beginning
            to end; 0 before the first.
        stored_bytes: of the live pages on disk, without headers and padding.

    Raises:
        StoreBusyError: another process has the store open.
        StoreError: the folder or the capacity cannot be used.
    """

    def __init__(
        self,
        options: StoreOptions,
        codec: Codec,
        codec_from: Callable[[int, bytes, PageFormat], Codec],
        files: FileLayer | None = None,
    ) -> None:
        _check(options, codec)
        self.options = options
        self.stats = StoreStats()
        self.read_mbs = 0.0
        self.write_mbs = 0.0
        self.stored_bytes = 0
        self.direct = False
        self._files = files or RealFiles()
        self._codec = codec
        self._codec_from = codec_from
        self._training = codec.wants_training
        self._samples: list[Bytes] = []
        self._index: dict[PageKey, _Entry] = {}
        self._segments: dict[int, _Segment] = {}
        self._doomed: list[Path] = []  # to be deleted, which did not work yet
        self._unreadable: list[Path] = []  # perhaps only today
        self._active: _Segment | None = None
        self._next_number = 1
        self._touched_at = time.monotonic()
        self._closed = False
        self._buffers = BufferPool(_WRITE_BYTES * 5 // 4, keep=2 * options.io_threads + 4)
        self._capacity = Capacity(
            self._files,
            options.root,
            options.folder,
            options.capacity_bytes,
            options.segment_bytes,
        )
        try:
            self._files.make_folders(options.folder)
            with self._capacity.locked():
                self._lock = StoreLock(options.folder)
        except OSError as error:
            raise _unusable(options.folder, error) from error
        self._threads = ThreadPoolExecutor(options.io_threads, "tiered-kv-ssd")
        try:
            self._try_direct()
            self._recover()
        except BaseException as error:
            self._abandon()
            if isinstance(error, OSError):
                raise _unusable(options.folder, error) from error
            raise

    def _try_direct(self) -> None:
        block = self._buffers.take(BLOCK)
        self.direct = takes_direct(self._files, self.options.folder, block.data[:BLOCK])
        self._buffers.give(block)
        if not self.direct:
            logger.warning(
                "%s does not take O_DIRECT: the SSD tier goes through the page cache, which is "
                "slower and takes memory from others",
                self.options.root,
            )

    # -- what is there ------------------------------------------------------------

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    def keys(self) -> list[PageKey]:
        """Every page, the one written longest ago first; a rewritten page counts as new."""
        return list(self._index)

    @property
    def raw_bytes(self) -> int:
        """Bytes of the live pages as ``get`` gives them."""
        return len(self._index) * self.options.page_format.page_bytes

    # -- writing ------------------------------------------------------------------

    def put(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        """Store pages, all of them durable when this returns; blocks on the disk.

        A page stored before is replaced. The pages must not change until this returns.

        Args:
            pages: keys of 16 to 255 bytes, pages of ``page_bytes`` bytes.

        Returns:
            Indices of the pages that are not stored, because the disk failed or there is no
            room (see ``proposal``). Of a key given twice the last page is stored, and speaks
            for both. A page that is not stored leaves what was stored under its key before.
        """
        last = {key: i for i, (key, _) in enumerate(pages)}
        now = int(time.time())
        fit = [
            PageToWrite(i, key, page, now)
            for i, (key, page) in enumerate(pages)
            if last[key] == i and _is_key(key) and self._is_page(page)
        ]
        stored: set[int] = set()
        if fit and not self._closed:
            self._train([item.page for item in fit])
            stored = self._append(fit, while_reclaiming=False)
        failed = frozenset(i for i, (key, _) in enumerate(pages) if last[key] not in stored)
        self.stats.pages_refused += len(failed)
        return failed

    def _append(self, items: Sequence[PageToWrite], *, while_reclaiming: bool) -> set[int]:
        """Encode pages and write them while others are encoded; returns the indices of those
        that are durable."""
        began, bytes_before = time.monotonic(), self.stats.bytes_written
        stored: set[int] = set()
        source = _slices(items)
        packing: deque[Future[Batch]] = deque()
        going_on = True
        while True:
            while going_on and len(packing) <= self.options.io_threads:
                if (pages := next(source, None)) is None:
                    break
                packing.append(self._threads.submit(pack_batch, self._codec, pages, self._buffers))
            if not packing:
                break
            try:
                batch = packing.popleft().result()
            except OSError as error:  # no memory
                self._write_failed("pages cannot be encoded", error)
                going_on = False
            else:
                going_on = going_on and self._place(batch, stored, while_reclaiming)
        self._commit(stored)
        seconds = time.monotonic() - began
        self.write_mbs = _speed(self.write_mbs, self.stats.bytes_written - bytes_before, seconds)
        return stored

    def _place(self, batch: Batch, stored: set[int], while_reclaiming: bool) -> bool:
        """Begin to write a batch, in as many segments as it takes; False if that ends here."""
        records = batch.records
        while records:
            active = self._active or self._new_segment(while_reclaiming)
            if active is None or active.writer is None:
                return False
            count = active.writer.fitting(records)
            if count == 0 and active.writer.empty:
                logger.error("a page of %d bytes fits no segment", records[0].nbytes)
                records = records[1:]
            elif count == 0:
                if not self._commit(stored):
                    return False
                self._seal(active)
            else:
                future = active.writer.append(
                    batch.buffer, records[:count], self._threads, _WRITES_IN_FLIGHT
                )
                records = records[count:]
                if not records:
                    future.add_done_callback(partial(self._give_back, batch.buffer))
        return True

    def _give_back(self, buffer: Bytes, _: Future[None]) -> None:
        self._buffers.give(buffer)

    def _commit(self, stored: set[int]) -> bool:
        """What was placed becomes durable, and then visible; False if some of it failed."""
        active = self._active
        if active is None or active.writer is None:
            return True
        commit = active.writer.commit()
        active.end = active.writer.end
        emptied = set[_Segment]()
        for place in commit.durable:
            before = self._insert(active, place)
            if before is not None and not before.live:
                emptied.add(before)
        stored.update(commit.indices)
        page_bytes = self.options.page_format.page_bytes
        self.stats.pages_written += len(commit.durable)
        self.stats.bytes_written += sum(place.stored_bytes for place in commit.durable)
        self.stats.raw_bytes_written += len(commit.durable) * page_bytes
        for segment in emptied:
            if not segment.live and segment is not active:
                self._delete(segment)
        if commit.error is None:
            return True
        self._write_failed(f"pages cannot be written to {active.path}", commit.error)
        self._seal(active)  # nothing may follow what may be torn
        return False

    def _train(self, pages: Sequence[Bytes]) -> None:
        """Fit the codec to the first pages, once there are enough of them."""
        if not self._training:
            return
        sample = [*self._samples, *pages][:MAX_SAMPLE]
        if len(sample) < MIN_SAMPLE:
            self._samples += [page.copy() for page in pages]
            return
        self._training = False
        self._samples = []
        try:
            trained = self._codec.trained(sample)
        except Exception:
            logger.exception("the codec cannot be trained; pages are stored without that")
            return
        if trained.table != self._codec.table and self._active is not None:
            self._seal(self._active)
        self._codec = trained

    def _new_segment(self, while_reclaiming: bool) -> _Segment | None:
        """Begin another active segment; None if there is no room, or the disk failed."""
        options, codec = self.options, self._codec
        header = SegmentHeader(
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
        path = self._path(header.number)
        segment = _Segment(path, header, header.table_id, codec, header.header_bytes)
        size = options.segment_bytes
        try:
            self._retry_doomed()
            if not self._lock.held:
                raise FileNotFoundError(f"{self._lock.path} was removed")
            with self._capacity.locked():
                if not self._make_room(while_reclaiming):
                    self.stats.no_room += 1
                    return None
                self._next_number += 1
                segment.fd = self._files.open(path, Access.CREATE, direct=self.direct)
                self._files.preallocate(segment.fd, size)
            segment.writer = SegmentWriter(self._files, segment.fd, header, size, self._buffers)
            segment.writer.begin()
            self._files.sync_folder(options.folder)
        except OSError as error:
            self._write_failed("a segment cannot be created", error)
            if segment.fd is not None:
                self._delete(segment)
            return None
        finally:
            self._capacity.changed()
        self._lock.touch()
        self.stats.segments_created += 1
        self._segments[header.number] = self._active = segment
        return segment

    def _make_room(self, while_reclaiming: bool) -> bool:
        if self._capacity.make_room(while_reclaiming=while_reclaiming):
            return True
        if not self._unreadable:
            return False
        self._doomed += self._unreadable
        self._unreadable.clear()
        self._retry_doomed()
        return self._capacity.make_room(while_reclaiming=while_reclaiming)

    def _seal(self, segment: _Segment) -> None:
        """Nothing more is appended to the segment: give it a footer, or delete it if it is of
        no use. A footer that cannot be written is done without."""
        if segment is self._active:
            self._active = None
        segment.writer = None
        if not segment.live:
            self._delete(segment)
            return
        places = sorted((entry.place for entry in segment.live.values()), key=_offset)
        try:
            self._close(segment)
            fd = self._files.open(segment.path, Access.WRITE, direct=self.direct)
            segment.fd = fd
            write_footer(self._files, fd, segment.header, segment.end, places, self._buffers)
        except OSError as error:
            self._write_failed(f"{segment.path} cannot be sealed", error)
        self._capacity.changed()

    # -- reading ------------------------------------------------------------------

    def get(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        """Read pages into buffers of ``page_bytes`` bytes; blocks on the disk.

        Returns:
            Indices of the pages that are absent, or turned out bad and are absent now. Their
            buffers may hold anything.
        """
        began, bytes_before = time.monotonic(), self.stats.bytes_read
        wanted = [
            _Wanted(i, entry, out)
            for i, (key, out) in enumerate(pages)
            if (entry := self._index.get(key)) is not None and self._is_page(out)
        ]
        bad: list[_Bad] = []
        reads: list[Future[list[_Bad]]] = []
        for run in _runs(wanted, self.options.io_threads):
            segment = run[0].entry.segment
            try:
                fd = self._open(segment)
            except OSError as error:
                bad += [_Bad(item, error) for item in run]
            else:
                reads.append(self._threads.submit(self._read_run, fd, run))
        for read in reads:
            bad += read.result()
        failed = {found.item.index for found in bad}
        good = [item for item in wanted if item.index not in failed]
        self.stats.pages_read += len(good)
        self.stats.bytes_read += sum(item.place.stored_bytes for item in good)
        self._drop_bad(bad)
        self._close_some()
        seconds = time.monotonic() - began
        self.read_mbs = _speed(self.read_mbs, self.stats.bytes_read - bytes_before, seconds)
        self._touch()
        return frozenset(range(len(pages))).difference(item.index for item in good)

    def _read_run(self, fd: int, run: Sequence[_Wanted]) -> list[_Bad]:
        """Read pages that lie one behind the other; returns those that are bad."""
        start = run[0].place.offset
        nbytes = run[-1].place.offset + run[-1].place.nbytes - start
        try:
            buffer = self._buffers.take(nbytes)
        except OSError as error:  # no memory
            return [_Bad(item, error) for item in run]
        try:
            view = buffer.data[:nbytes]
            read_exactly(self._files, fd, view, start)
            if not self.direct:
                self._files.uncache(fd, start, nbytes)
            return [found for item in run if (found := _decode(item, view, start)) is not None]
        except OSError as error:
            if len(run) == 1:
                return [_Bad(run[0], error)]
        finally:
            self._buffers.give(buffer)
        # One page that cannot be read must not take its neighbours with it.
        return [found for item in run for found in self._read_run(fd, [item])]

    def _drop_bad(self, bad: Sequence[_Bad]) -> None:
        for found in bad:
            self.stats.pages_bad += 1
            if isinstance(found.error, OSError):
                self.stats.read_errors += 1
            entry = found.item.entry
            logger.warning("a page in %s is dropped: %s", entry.segment.path, found.error)
            if self._index.get(entry.place.key) is entry:
                self._forget(entry.place.key)

    def _touch(self) -> None:
        now = time.monotonic()
        if now - self._touched_at > _TOUCH_S:
            self._touched_at = now
            self._lock.touch()

    # -- making room --------------------------------------------------------------

    def drop(self, keys: Iterable[PageKey]) -> None:
        """Forget pages; a segment whose last page goes is deleted. Unknown keys are ignored.

        Dropped pages may be found again by the next process: no harm, since what a key stands
        for never changes.
        """
        for key in keys:
            if key in self._index:
                self._forget(key)

    def proposal(self) -> Proposal | None:
        """The segment that should die next, if less than about two segments' room is left or
        the store has more than its share. Changes nothing."""
        if self._closed or not self._is_short():
            return None
        victim = self._victim()
        if victim is None:
            return None
        places = sorted((entry.place for entry in victim.live.values()), key=_offset)
        return Proposal(victim.number, tuple(place.key for place in places))

    def _is_short(self) -> bool:
        segment = self.options.segment_bytes
        outlook = self._capacity.outlook()
        left = 0
        if self._active is not None and self._active.writer is not None:
            left = self._active.writer.room
        enough = 2 * segment if outlook.share >= 8 * segment else segment
        if outlook.owed >= enough:
            # Others have what is due to this store, and are told to give way: it gives way
            # itself only when it can write nothing at all.
            return outlook.blocked and left < segment // MIN_PAGES
        return outlook.room // segment * segment + left < enough  # only whole segments are of use

    def _victim(self) -> _Segment | None:
        """The segment with the fewest live bytes if more than half of it is dead, else the
        oldest; the active one only if there is no other."""
        sealed = [s for s in self._segments.values() if s is not self._active]
        if not sealed:
            return self._active
        emptiest = min(sealed, key=lambda segment: segment.live_bytes)
        return emptiest if 2 * emptiest.live_bytes < emptiest.end else sealed[0]

    def reclaim(self, segment: int, survivors: Collection[PageKey]) -> list[PageKey]:
        """Delete a segment after writing those of its pages that survive once more.

        Returns:
            The pages that are gone: all others, and survivors that could not be rewritten.
        """
        victim = self._segments.get(segment)
        if victim is None:
            return []
        if victim is self._active:
            self._active = victim.writer = None
        keys = [place.key for place in sorted((e.place for e in victim.live.values()), key=_offset)]
        moving = [key for key in keys if key in set(survivors)]
        per_batch = max(1, _MOVE_BYTES // self.options.page_format.page_bytes)
        for start in range(0, len(moving), per_batch):
            self._move(moving[start : start + per_batch])
        for key in list(victim.live):
            self._unindex(key)
        self._delete(victim)
        return [key for key in keys if key not in self._index]

    def _move(self, keys: Sequence[PageKey]) -> None:
        """Write pages once more, with the codec of today; those that are damaged are dropped."""
        written = [self._index[key].place.written for key in keys]
        pages = np.empty((len(keys), self.options.page_format.page_bytes), np.uint8)
        bad = self.get(list(zip(keys, pages, strict=True)))
        items = [
            PageToWrite(i, key, pages[i], written[i]) for i, key in enumerate(keys) if i not in bad
        ]
        self._append(items, while_reclaiming=True)

    def clear(self) -> None:
        """Invalidate every page on disk, durably.

        Raises:
            StoreError: some may be left. The store is empty nonetheless, but the next process
                could find them.
        """
        if self._closed:
            raise StoreError("a closed store cannot be cleared: open it first")
        for key in list(self._index):
            self._unindex(key)
        self._samples.clear()
        for segment in list(self._segments.values()):
            self._delete(segment)
        try:
            self._doomed = [self._path(number) for number in self._numbers()]
            self._retry_doomed()
            self._files.sync_folder(self.options.folder)
            if self._doomed:
                raise FileExistsError(f"{self._doomed[0]} cannot be deleted")
        except OSError as error:
            raise StoreError(
                f"pages of before the reset may be left in {self.options.folder} ({error}): "
                "remove it before the next start"
            ) from error

    def close(self) -> None:
        """Seal, stop the threads and unlock. Idempotent; the store is empty afterwards."""
        if not self._closed and self._active is not None:
            self._seal(self._active)
        self._abandon()

    def _abandon(self) -> None:
        self._closed = True
        self._threads.shutdown()
        for segment in self._segments.values():
            self._close(segment)
        self._segments.clear()
        self._index.clear()
        self._active = None
        self.stored_bytes = 0
        self._lock.release()

    # -- recovery -----------------------------------------------------------------

    def _recover(self) -> None:
        unsealed = []
        for number in self._numbers():
            self._next_number = number + 1
            path = self._path(number)
            try:
                segment, loaded = self._load(path, number)
            except FormatError as error:
                logger.warning("%s is deleted: %s", path, error)
                self.stats.segments_bad += 1
                self._unlink(path)
            except OSError as error:
                logger.warning("%s cannot be read: %s", path, error)
                self.stats.segments_bad += 1
                self._unreadable.append(path)
            else:
                self._segments[number] = segment
                for place in loaded.entries:
                    self._insert(segment, place)
                if not loaded.sealed:
                    unsealed.append(segment)
                if len(self._segments) > _OPEN_FILES:
                    self._close(segment)
        for segment in list(self._segments.values()):
            if segment in unsealed or not segment.live:
                self._seal(segment)
        for segment in self._segments.values():
            if segment.header.codec_id == self._codec.codec_id and segment.header.table:
                self._codec = segment.codec
                self._training = False
        self._close_some()

    def _numbers(self) -> list[int]:
        """Numbers of the segments in the folder, oldest first."""
        names = [Path(name) for name in self._files.names(self.options.folder)]
        stems = [name.stem for name in names if name.suffix == SEGMENT_SUFFIX]
        return sorted(int(stem) for stem in stems if len(stem) == 8 and stem.isdecimal())

    def _load(self, path: Path, number: int) -> tuple[_Segment, LoadedSegment]:
        """A segment of an earlier process.

        Raises:
            FormatError: it is of no use.
            OSError: the disk failed.
        """
        fd = self._files.open(path, Access.READ, direct=self.direct)
        try:
            loaded = load_segment(self._files, fd)
            header, options = loaded.header, self.options
            found = (header.fingerprint, header.replica, header.rank, header.ranks, header.number)
            if found != (
                options.fingerprint,
                options.replica,
                options.rank,
                options.ranks,
                number,
            ):
                raise FormatError("it belongs to another store")
            if header.page_format != options.page_format:
                raise FormatError("it holds pages of another format")
            codec = self._codec_of(header)
        except BaseException:
            self._files.close(fd)
            raise
        return _Segment(path, header, loaded.table_id, codec, loaded.end, fd=fd), loaded

    def _codec_of(self, header: SegmentHeader) -> Codec:
        for segment in self._segments.values():
            known = segment.header
            if (known.codec_id, known.table) == (header.codec_id, header.table):
                return segment.codec
        try:
            return self._codec_from(header.codec_id, header.table, header.page_format)
        except Exception as error:
            raise FormatError(f"codec {header.codec_id} cannot be made of it: {error}") from error

    # -- the index ----------------------------------------------------------------

    def _insert(self, segment: _Segment, place: FooterEntry) -> _Segment | None:
        """A page is durable there; returns the segment it was in before."""
        before = self._unindex(place.key)
        self._index[place.key] = segment.live[place.key] = _Entry(segment, place)
        self.stored_bytes += place.stored_bytes
        return before

    def _unindex(self, key: PageKey) -> _Segment | None:
        """Returns the segment the page was in."""
        entry = self._index.pop(key, None)
        if entry is None:
            return None
        self.stored_bytes -= entry.place.stored_bytes
        del entry.segment.live[key]
        return entry.segment

    def _forget(self, key: PageKey) -> None:
        segment = self._unindex(key)
        if segment is not None and not segment.live and segment is not self._active:
            self._delete(segment)

    def _is_page(self, page: Bytes) -> bool:
        return (
            page.dtype == np.uint8
            and page.shape == (self.options.page_format.page_bytes,)
            and page.flags.c_contiguous
        )

    # -- files --------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return self.options.folder / f"{number:08}{SEGMENT_SUFFIX}"

    def _open(self, segment: _Segment) -> int:
        if segment.fd is None:
            segment.fd = self._files.open(segment.path, Access.READ, direct=self.direct)
        return segment.fd

    def _close(self, segment: _Segment) -> None:
        fd, segment.fd = segment.fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                self._files.close(fd)

    def _close_some(self) -> None:
        """Keep few enough files open; no thread may be using one."""
        held = [s for s in self._segments.values() if s.fd is not None and s is not self._active]
        for segment in held[: max(0, len(held) - _OPEN_FILES)]:
            self._close(segment)

    def _delete(self, segment: _Segment) -> None:
        """A file that cannot be deleted now is tried again later. Idempotent."""
        self._close(segment)
        if self._active is segment:
            self._active = None
        if self._segments.pop(segment.number, None) is not None or segment.writer is not None:
            segment.writer = None
            self._unlink(segment.path)

    def _unlink(self, path: Path) -> None:
        try:
            self._files.unlink(path)
            self.stats.segments_deleted += 1
            self._files.sync_folder(self.options.folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._write_failed(f"{path} cannot be deleted", error)
            self._doomed.append(path)
        self._capacity.changed()

    def _retry_doomed(self) -> None:
        doomed, self._doomed = self._doomed, []
        for path in doomed:
            self._unlink(path)

    def _write_failed(self, what: str, error: OSError) -> None:
        self.stats.write_errors += 1
        logger.warning("%s: %s", what, error)


def _check(options: StoreOptions, codec: Codec) -> None:
    if len(options.fingerprint) != 16:
        raise StoreError("the fingerprint of a store has 16 bytes")
    if codec.page_format != options.page_format:
        raise StoreError("the codec must be made for the page format of the store")
    if options.capacity_bytes < 2 * options.segment_bytes:
        needed = 2 * options.segment_bytes / (1 << 30)
        raise StoreError(
            f"{options.capacity_bytes} bytes have no room for two segments of "
            f"{MIN_PAGES} pages: raise TIERED_KV_SSD_GIB to {needed:.2f} or more"
        )


def _unusable(folder: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{folder} cannot be used ({error.strerror or error}): make it writable, or set "
        "another TIERED_KV_SSD_PATH"
    )


def _is_key(key: PageKey) -> bool:
    return MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES


def _offset(place: FooterEntry) -> int:
    return place.offset


def _speed(before: float, nbytes: int, seconds: float) -> float:
    """A moving average of MB/s; small transfers say little about it."""
    if nbytes < _WRITE_BYTES or seconds <= 0:
        return before
    speed = nbytes / seconds / 1e6
    return speed if before == 0 else before + 0.2 * (speed - before)


def _slices(items: Sequence[PageToWrite]) -> Iterator[Sequence[PageToWrite]]:
    """Pages for one write each, as many as make it large."""
    if items:
        step = max(1, _WRITE_BYTES // items[0].page.nbytes)
        for start in range(0, len(items), step):
            yield items[start : start + step]


def _runs(wanted: Sequence[_Wanted], threads: int) -> Iterator[list[_Wanted]]:
    """Pages that are read at once: neighbours on disk, in reads that are large, but not so
    large that a thread has none."""
    total = sum(item.place.nbytes for item in wanted)
    limit = min(max(total // (2 * threads), _READ_BYTES[0]), _READ_BYTES[1])
    run: list[_Wanted] = []
    for item in sorted(wanted, key=lambda item: (item.entry.segment.number, item.place.offset)):
        if run:
            last = run[-1]
            end = last.place.offset + last.place.nbytes
            if (
                item.entry.segment is not last.entry.segment
                or item.place.offset != end
                or end + item.place.nbytes - run[0].place.offset > limit
            ):
                yield run
                run = []
        run.append(item)
    if run:
        yield run


def _decode(item: _Wanted, view: memoryview, start: int) -> _Bad | None:
    """Check and decode one page of the bytes that begin at ``start`` in its segment."""
    segment, place = item.entry.segment, item.place
    record = view[place.offset - start : place.offset - start + place.nbytes]
    try:
        decode_record(segment.header, segment.table_id, segment.codec, place.key, record, item.out)
    except FormatError as error:
        return _Bad(item, error)
    return None
