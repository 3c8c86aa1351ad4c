"""Pages in a remote store: one record per page, which is checked when it is read.

A page is read into memory of this store and decoded from there into its slot. So no late transfer
can touch a slot.

Codec tables are kept in the remote store too, under the fingerprint of the pages that need them. A
table is put before the pages that need it, and again periodically and if it is missing. Each reader
reads a table only once, so a store that evicts old values, or values not read for long, would
otherwise keep the pages and evict the table. A missing table is requested only once in a while, not
once for each page.

Values whose deletion the remote store did not confirm are deleted later, in the background. They
may include values whose write was abandoned.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from threading import Thread
from typing import TypeVar

import xxhash

from tiered_kv.codecs.base import Bytes, Codec, CodedPage, EncodedPage, PageFormat
from tiered_kv.codecs.training import CodecTraining
from tiered_kv.formatting import count
from tiered_kv.keys import PageKey
from tiered_kv.remote.base import Outcome, Parts, RemoteKey, RemoteStore
from tiered_kv.remote.page_record import (
    NO_TABLE,
    PageRecord,
    RecordError,
    longest_record,
    open_record,
    pack_record,
    table_name,
)

from .base import Pages, PageStore, StoreSite

logger = logging.getLogger(__name__)

_K = TypeVar("_K")
_V = TypeVar("_V")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""First and longest pause between two attempts, seconds. The pause doubles each time."""
DELETION_S = 10.0
THREAD_NAME = "tiered-kv-deletion"


def delete_later(store: RemoteStore, keys: Sequence[RemoteKey]) -> None:
    """Delete values as soon as the store answers, in a background thread. Until then other engines
    may find the values, so this is logged as an error.

    Args:
        store: the connection that put the values, because a shared folder can be written only by
            the process that holds its lock. The connection must not be used for anything else from
            now on.
    """
    logger.error(
        "the remote store does not respond, so %s from before the cache reset could not be "
        "deleted. If the weights were changed, engines that find these pages use wrong KV. "
        "This engine will delete the pages when the store responds again",
        count(len(keys), "page"),
    )
    Thread(target=_delete, args=(store, keys), name=THREAD_NAME, daemon=True).start()


def _delete(store: RemoteStore, keys: Sequence[RemoteKey]) -> None:
    pause_s = FIRST_PAUSE_S
    with closing(store):
        while True:
            time.sleep(pause_s)
            if store.delete(keys, time.monotonic() + DELETION_S):
                deleted = count(len(keys), "page")
                logger.warning("deleted %s from before a cache reset", deleted)
                return
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _remember(known: OrderedDict[_K, _V], key: _K, value: _V, most: int) -> None:
    """Record a value as the latest, and forget the oldest values beyond ``most``."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)


TABLE_PREFIX = b"tkv:t:"
AGAIN_S = 60.0
"""Age after which a table is put again with pages that need it, seconds."""
MISSING_S = 10.0
"""Time for which a missing or damaged table is not read again, seconds. Otherwise each page that
needs the table would cost a round trip, and memory for the longest table."""
MOST_MISSING = 1024
MOST_CODECS = 64
"""Maximum number of codecs kept, the latest ones. Engines adopt each other's tables, so few codecs
are in use."""
MOST_TABLE_BYTES = 16 << 20
DIGEST_BYTES = 16

FromTable = Callable[[int, bytes, PageFormat], Codec]
"""Creates a codec from its id and table; raises ``CodecError``."""


class CodecTables:
    """The codecs of one page format, by id and table.

    Args:
        store: the store that has the tables.
        fingerprint: fingerprint of the pages.
        make: creates a codec from its id and table.
    """

    def __init__(
        self, store: RemoteStore, fingerprint: bytes, page_format: PageFormat, make: FromTable
    ) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._page_format = page_format
        self._make = make
        self._codecs: OrderedDict[tuple[int, bytes], Codec | None] = OrderedDict()
        self._missing: OrderedDict[tuple[int, bytes], float] = OrderedDict()  # expiry time
        self._put_at: dict[bytes, float] = {}

    def known(self, codec_id: int, table: bytes) -> bool:
        """Return False if the codec's table must be fetched. A table that was recently missing is
        not fetched again."""
        if table == NO_TABLE or (codec_id, table) in self._codecs:
            return True
        return time.monotonic() < self._missing.get((codec_id, table), 0.0)

    def codec(self, codec_id: int, table: bytes) -> Codec | None:
        """Return the codec with this id and table; None if the codec is not available."""
        if (codec_id, table) not in self._codecs and table == NO_TABLE:
            self._keep(codec_id, table, self._made(codec_id, b""))
        return self._codecs.get((codec_id, table))

    def publish(self, codec: Codec, deadline: float) -> bytes | Outcome:
        """Make sure that the store has the codec's table. Returns the table's name or, on failure,
        the outcome. After a failure, the codec's pages must not be put, because no reader could
        decode them."""
        name = table_name(codec.codec_id, codec.table)
        self._keep(codec.codec_id, name, codec)
        if name == NO_TABLE:
            return name
        now = time.monotonic()
        if now - self._put_at.get(name, -AGAIN_S) < AGAIN_S:
            (outcome,) = self._store.exists([self._key(name)], deadline)
            if outcome is not Outcome.MISS:
                return name if outcome is Outcome.HIT else outcome
        digest = xxhash.xxh3_128_digest(codec.table)
        (outcome,) = self._store.put([(self._key(name), [digest, codec.table])], deadline)
        if outcome is not Outcome.STORED:
            return outcome
        self._put_at[name] = now
        return name

    def fetch(self, codec_id: int, table: bytes, deadline: float) -> bool:
        """Fetch a table and create its codec. A table that is missing or damaged is not fetched
        again for ``MISSING_S`` seconds. Returns False if a damaged table was found."""
        buffer = memoryview(bytearray(DIGEST_BYTES + MOST_TABLE_BYTES))
        good = True
        for _, outcome, nbytes in self._store.get([self._key(table)], buffer, deadline):
            if outcome in (Outcome.LATE, Outcome.DOWN):
                return True  # the table's state is unknown
            digest, found = bytes(buffer[:DIGEST_BYTES]), bytes(buffer[DIGEST_BYTES:nbytes])
            if outcome is Outcome.HIT:
                whole = xxhash.xxh3_128_digest(found) == digest
                good = whole and table_name(codec_id, found) == table
                if good:
                    self._keep(codec_id, table, self._made(codec_id, found))
                    return True
        # Writers put the table again periodically.
        until = time.monotonic() + MISSING_S
        _remember(self._missing, (codec_id, table), until, MOST_MISSING)
        return good

    def _keep(self, codec_id: int, table: bytes, codec: Codec | None) -> None:
        _remember(self._codecs, (codec_id, table), codec, MOST_CODECS)

    def _made(self, codec_id: int, table: bytes) -> Codec | None:
        try:
            return self._make(codec_id, table, self._page_format)
        except Exception:  # codecs may raise anything; other pages must not be affected
            return None

    def _key(self, name: bytes) -> RemoteKey:
        key = TABLE_PREFIX + self._fingerprint + name
        return RemoteKey(key, key)


PAGE_PREFIX = b"tkv:p:"
"""Prefix of every page's key in the store. An operator may restrict access to ``~tkv:*``."""
CALL_S = 2.0
"""Maximum time of a read or write of many pages, seconds."""
RETRY_S = 1.0
"""Pause between an unanswered write and the next write, seconds. Reads can run during the pause.
After the pause, a server that counts as down is tried again."""
SHARE_OF_LINK = 0.25
"""Fraction of time used for writes for which no request waits. The remaining time is left to
restores."""
GROUP_S = 0.02
"""Approximate duration of a write, seconds. A lookup waits for the write in progress."""
LONGEST_KEY = 255 + 2
MOST_RUNS = 1 << 16
"""Maximum number of pages whose run is remembered, from a lookup to the read that follows."""
MOST_OWN = 1 << 18
"""Maximum number of this engine's pages that a reset deletes. Older pages were prefilled long
before the reason for the reset, a change of the weights."""


class NoPages(PageStore):
    """A store that stores nothing, for pages that no other engine may find: pages of weights that
    cannot be identified, or of a generation that started with a reset."""

    def put(self, pages: Pages) -> frozenset[int]:
        return frozenset(range(len(pages)))

    def get(self, pages: Pages) -> frozenset[int]:
        return frozenset(range(len(pages)))

    def exists(self, keys: Sequence[PageKey], deadline_s: float) -> frozenset[int]:
        return frozenset(range(len(keys)))

    def drop(self, keys: Iterable[PageKey]) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class RemotePages(PageStore):
    """One rank's pages in a remote store.

    Args:
        make_store: opens a connection to the store.
        codec: codec of new pages.
        make_codec: creates the codec of pages that other engines have put.
        bandwidth: rate of the link, bytes per second.
        retry_s: seconds until pages that were not stored are offered again; None for never. Use
            None with several servers: otherwise pages for the other servers would wait behind pages
            for a server that is down.
    """

    def __init__(
        self,
        make_store: Callable[[], RemoteStore],
        site: StoreSite,
        codec: Codec,
        make_codec: FromTable,
        bandwidth: float,
        retry_s: float | None = RETRY_S,
    ) -> None:
        self._store = store = make_store()
        self._format = site.page_format
        self._rank = site.rank
        self._suffix = site.rank.to_bytes(2, "big")
        self._training = CodecTraining(codec)
        self._trainer: Thread | None = None
        self._tables = CodecTables(store, site.fingerprint, site.page_format, make_codec)
        self._group_bytes = max(site.page_format.page_bytes, int(bandwidth * GROUP_S))
        self._buffer = memoryview(bytearray(longest_record(self._format, LONGEST_KEY)))
        self._runs: OrderedDict[PageKey, PageKey] = OrderedDict()
        self._own: OrderedDict[PageKey, PageKey] = OrderedDict()  # by page, with its run
        self._rest_s = 0.0
        self._retry_s = retry_s
        self._written = self._read = self._bad = self._unanswered = self._refused = 0
        self._closed = False

    # -- writes ---------------------------------------------------------------------

    def put(self, pages: Pages) -> frozenset[int]:
        if self._training.wanted and not self._closed and not self._trains:
            # The codec is trained in a separate thread, because requests wait for this thread.
            copies = [page.copy() for _, page in pages]
            self._trainer = Thread(
                target=self._training.see, args=(copies,), name="tiered-kv-codec", daemon=True
            )
            self._trainer.start()
        return self._put(self._training.codec, pages)

    @property
    def _trains(self) -> bool:
        """Return True while the codec of new pages is being trained."""
        return self._trainer is not None and self._trainer.is_alive()

    def put_coded(self, pages: Sequence[tuple[PageKey, CodedPage]]) -> frozenset[int]:
        own = self._training.codec
        coded: list[tuple[PageKey, Bytes | EncodedPage | None]] = []
        for key, page in pages:
            decoded = page.decoded()  # pages that cannot be decoded here are useless elsewhere
            as_it_is = decoded is not None and page.codec == own
            coded.append((key, page.page if as_it_is else decoded))
        return self._put(own, coded)

    def _put(
        self, codec: Codec, pages: Sequence[tuple[PageKey, Bytes | EncodedPage | None]]
    ) -> frozenset[int]:
        """Store pages, encoded by this codec or still raw; entries that are None cannot be stored.

        Args:
            codec: codec for all pages of the call. Training may replace the current codec
                meanwhile, and a page whose record names the table of another codec would be decoded
                wrongly.
        """
        everything = frozenset(range(len(pages)))
        if self._closed or not pages:
            return everything
        newest = {key: at for at, (key, _) in enumerate(pages)}
        encoded: list[tuple[int, EncodedPage]] = []
        for at in newest.values():
            _, page = pages[at]
            if page is not None:
                done = page if isinstance(page, EncodedPage) else codec.encode(page)
                encoded.append((at, done))
        deadline = time.monotonic() + CALL_S  # for the store calls only
        table = self._tables.publish(codec, deadline)
        if isinstance(table, Outcome):
            self._count([table], len(encoded))
            return everything
        values: list[tuple[RemoteKey, Parts]] = []
        for at, coded in encoded:
            key, record = pages[at][0], PageRecord(codec.codec_id, table, coded)
            values.append((self._key(key), pack_record(self._name(key), self._format, record)))
        began = time.monotonic()
        outcomes = self._store.put(values, deadline)
        seconds = time.monotonic() - began
        stored = set[PageKey]()
        for (at, _), (_, parts), outcome in zip(encoded, values, outcomes, strict=True):
            if outcome is Outcome.STORED:
                stored.add(pages[at][0])
                self._written += sum(len(part) for part in parts)
        # After a failed write, ``retry_s`` determines the pause.
        self._rest_s = seconds * (1 / SHARE_OF_LINK - 1) if stored else 0.0
        self._count(outcomes)
        # Includes pages not reported as stored: the report may be late, or they may be stored
        # later.
        for at, _ in encoded:
            key = pages[at][0]
            _remember(self._own, key, self._runs.get(key, key), MOST_OWN)
        return frozenset(at for at, (key, _) in enumerate(pages) if key not in stored)

    def _count(self, outcomes: Sequence[Outcome], pages: int = 1) -> None:
        """Count the outcomes of a write, each of which applies to ``pages`` pages."""
        self._unanswered += any(one in (Outcome.LATE, Outcome.DOWN) for one in outcomes)
        self._refused += pages * outcomes.count(Outcome.REFUSED)

    # -- reads ----------------------------------------------------------------------

    def get(self, pages: Pages) -> frozenset[int]:
        missing = set(range(len(pages)))
        if self._closed:
            return frozenset(missing)
        deadline = time.monotonic() + CALL_S
        lacking = self._read_some(pages, sorted(missing), missing, deadline)
        if lacking:  # their tables are read for the first time
            for codec_id, table in dict.fromkeys(lacking.values()):
                self._bad += not self._tables.fetch(codec_id, table, deadline)
            here = [at for at in sorted(lacking) if self._tables.codec(*lacking[at]) is not None]
            if here:
                self._read_some(pages, here, missing, deadline)
        return frozenset(missing)

    def _read_some(
        self, pages: Pages, wanted: Sequence[int], missing: set[int], deadline: float
    ) -> dict[int, tuple[int, bytes]]:
        """Read pages, and remove the pages that were read from ``missing``. Returns the pages whose
        codec is unknown, with the codec's id and table."""
        lacking: dict[int, tuple[int, bytes]] = {}
        failed = False
        keys = [self._key(pages[at][0]) for at in wanted]
        for index, outcome, nbytes in self._store.get(keys, self._buffer, deadline):
            at = wanted[index]
            key, out = pages[at]
            if outcome is not Outcome.HIT:
                self._bad += outcome is Outcome.BAD
                failed = failed or outcome in (Outcome.LATE, Outcome.DOWN)
                continue
            self._read += nbytes
            try:
                record = open_record(self._buffer[:nbytes], self._name(key), self._format)
            except RecordError:
                self._bad += 1
                continue
            if not self._tables.known(record.codec_id, record.table):
                lacking[at] = (record.codec_id, record.table)
                continue
            codec = self._tables.codec(record.codec_id, record.table)
            if codec is None:
                continue
            try:
                codec.decode(record.page, out)
            except Exception:  # codecs may raise anything; other pages must not be affected
                self._bad += 1
                continue
            missing.discard(at)
            if self._training.wanted and not self._trains:
                self._training.adopt(codec)
        self._unanswered += failed
        return lacking

    def exists(self, keys: Sequence[PageKey], deadline_s: float) -> frozenset[int]:
        if self._rank and not self._closed:  # only rank 0 looks pages up; other ranks just read
            return frozenset()
        if self._closed or not keys:
            return frozenset(range(len(keys)))
        deadline = time.monotonic() + deadline_s
        outcomes = self._store.exists([self._key(key) for key in keys], deadline)
        self._unanswered += any(one in (Outcome.LATE, Outcome.DOWN) for one in outcomes)
        return frozenset(at for at, one in enumerate(outcomes) if one is not Outcome.HIT)

    # -- the rest -------------------------------------------------------------------

    def place(self, keys: Sequence[PageKey], runs: Sequence[PageKey]) -> None:
        for key, run in zip(keys, runs, strict=True):
            _remember(self._runs, key, run, MOST_RUNS)

    def drop(self, keys: Iterable[PageKey]) -> None:
        if not self._closed:
            some = [self._key(key) for key in keys]
            self._store.delete(some, time.monotonic() + CALL_S)

    def clear(self) -> None:
        """Delete the pages that this engine has put. These pages no longer match their fingerprint,
        and perhaps did not match it even before the reset. If the store does not answer, the
        deletion is retried later, and this connection is used for nothing else."""
        self._training.forget()
        own = [RemoteKey(PAGE_PREFIX + self._name(key), run) for key, run in self._own.items()]
        self._own.clear()
        if own and not self._closed and not self._store.delete(own, time.monotonic() + CALL_S):
            self._closed = True
            delete_later(self._store, own)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._store.close()
        if self._trainer is not None:
            self._trainer.join()

    @property
    def codec_of_new_pages(self) -> Codec | None:
        return None if self._training.wanted or self._trains else self._training.codec

    @property
    def group_bytes(self) -> int | None:
        return self._group_bytes

    @property
    def rest_s(self) -> float:
        return self._rest_s

    @property
    def retry_s(self) -> float | None:
        return self._retry_s

    def counters(self) -> Mapping[str, int]:
        return {
            "remote_bytes_written": self._written,
            "remote_bytes_read": self._read,
            "remote_pages_bad": self._bad,
            "remote_calls_failed": self._unanswered,
            "remote_pages_refused": self._refused,
        }

    def _name(self, key: PageKey) -> bytes:
        return key + self._suffix

    def _key(self, key: PageKey) -> RemoteKey:
        return RemoteKey(PAGE_PREFIX + self._name(key), self._runs.get(key, key))
