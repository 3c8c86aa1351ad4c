"""Tables of codecs in a remote store, under the fingerprint of the pages that need them.

A table is put before the pages that need it, and again if it is gone, and now and then: a store
that drops what is old, or was not read for long, would keep the pages and drop the table, which
each reader reads once. One that is missing is asked for once in a while, not once for each page.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import xxhash

from tiered_kv.codecs.base import Codec, PageFormat
from tiered_kv.remote.base import Outcome, RemoteKey, RemoteStore
from tiered_kv.remote.page_record import NO_TABLE, table_name

TABLE_PREFIX = b"tkv:t:"
AGAIN_S = 60.0
"""Seconds after which a table is put again while pages that need it are."""
MISSING_S = 10.0
"""Seconds for which a table that is missing, or damaged, is not read again: each page that needs it
would cost a round trip, and as much memory as the longest table."""
MOST_MISSING = 1024
MOST_CODECS = 64
"""Codecs kept, the latest: engines adopt each other's tables, so there are few."""
MOST_TABLE_BYTES = 16 << 20
DIGEST_BYTES = 16

FromTable = Callable[[int, bytes, PageFormat], Codec]
"""Makes a codec from its number and table; raises ``CodecError``."""


class CodecTables:
    """The codecs of one kind of pages, by number and table.

    Args:
        store: where the tables are.
        fingerprint: of the pages.
        make: makes a codec.
    """

    def __init__(
        self, store: RemoteStore, fingerprint: bytes, page_format: PageFormat, make: FromTable
    ) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._page_format = page_format
        self._make = make
        self._codecs: dict[tuple[int, bytes], Codec | None] = {}
        self._missing: dict[tuple[int, bytes], float] = {}  # until when
        self._put_at: dict[bytes, float] = {}

    def known(self, codec_id: int, table: bytes) -> bool:
        """True if it was found out whether there is such a codec, or lately that its table is
        missing."""
        if table == NO_TABLE or (codec_id, table) in self._codecs:
            return True
        return time.monotonic() < self._missing.get((codec_id, table), 0.0)

    def codec(self, codec_id: int, table: bytes) -> Codec | None:
        """The codec of that number and table, if it is to be had."""
        if (codec_id, table) not in self._codecs and table == NO_TABLE:
            self._keep(codec_id, table, self._made(codec_id, b""))
        return self._codecs.get((codec_id, table))

    def publish(self, codec: Codec, deadline: float) -> bytes | Outcome:
        """Have others find the codec's table. Returns its name, or the outcome if that failed: then
        the codec's pages would be of no use to any reader."""
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
        """Find out whether there is such a codec; False if the table is damaged."""
        buffer = memoryview(bytearray(DIGEST_BYTES + MOST_TABLE_BYTES))
        good = True
        for _, outcome, nbytes in self._store.get([self._key(table)], buffer, deadline):
            if outcome in (Outcome.LATE, Outcome.DOWN):
                return True  # nothing is known of it
            digest, found = bytes(buffer[:DIGEST_BYTES]), bytes(buffer[DIGEST_BYTES:nbytes])
            if outcome is Outcome.HIT:
                whole = xxhash.xxh3_128_digest(found) == digest
                good = whole and table_name(codec_id, found) == table
                if good:
                    self._keep(codec_id, table, self._made(codec_id, found))
                    return True
        # It is put anew, now and then.
        self._missing.pop((codec_id, table), None)
        self._missing[codec_id, table] = time.monotonic() + MISSING_S
        if len(self._missing) > MOST_MISSING:
            del self._missing[next(iter(self._missing))]
        return good

    def _keep(self, codec_id: int, table: bytes, codec: Codec | None) -> None:
        self._codecs.pop((codec_id, table), None)
        self._codecs[codec_id, table] = codec
        if len(self._codecs) > MOST_CODECS:
            del self._codecs[next(iter(self._codecs))]

    def _made(self, codec_id: int, table: bytes) -> Codec | None:
        try:
            return self._make(codec_id, table, self._page_format)
        except Exception:  # whatever a codec thinks of a table, other pages must not suffer
            return None

    def _key(self, name: bytes) -> RemoteKey:
        key = TABLE_PREFIX + self._fingerprint + name
        return RemoteKey(key, key)
