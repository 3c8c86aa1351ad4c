"""A page store in a mapping, and a faulty page store whose answers are late, partial, wrong or
missing.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import xxhash

from tiered_kv.codecs.base import Bytes
from tiered_kv.keys import PageKey
from tiered_kv.storage.base import PageStore
from tiered_kv.tiers import Knowledge


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A page's bytes, and their digest at the time of the put."""

    data: bytes
    digest: bytes

    @classmethod
    def of(cls, data: bytes) -> StoredPage:
        return cls(data, xxhash.xxh3_128_digest(data))

    @property
    def is_whole(self) -> bool:
        return xxhash.xxh3_128_digest(self.data) == self.digest


Pages = MutableMapping[PageKey, StoredPage]
"""The medium of a store. A store that is opened later on the same mapping finds the pages."""


class MemoryStore(PageStore):
    """A store over a mapping to which no other store writes.

    Args:
        pages: the medium.
    """

    knowledge: ClassVar = Knowledge.KNOWN

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._closed = False

    def put(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        if self._closed:
            return frozenset(range(len(pages)))
        for key, page in pages:
            self._pages.pop(key, None)
            self._pages[key] = StoredPage.of(page.tobytes())
        return frozenset()

    def get(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        failed = set[int]()
        for i, (key, out) in enumerate(pages):
            stored = None if self._closed else self._pages.get(key)
            if stored is None or not stored.is_whole:
                failed.add(i)
            else:
                out.data[:] = stored.data
        return frozenset(failed)

    def exists(self, keys: Sequence[PageKey], deadline_s: float) -> frozenset[int]:
        return frozenset(i for i, key in enumerate(keys) if self._closed or key not in self._pages)

    def drop(self, keys: Iterable[PageKey]) -> None:
        for key in () if self._closed else keys:
            self._pages.pop(key, None)

    def clear(self) -> None:
        self._pages.clear()

    def close(self) -> None:
        self._closed = True

    def keys(self) -> Sequence[PageKey]:
        return () if self._closed else list(self._pages)

    @property
    def stored_bytes(self) -> int:
        return 0 if self._closed else sum(len(stored.data) for stored in self._pages.values())


class FaultyStore(MemoryStore):
    """A store behind a faulty link, over a mapping to which other stores also write.

    The store keeps the store contract despite its faults: every call returns, and passed pages are
    not accessed afterwards.

    Args:
        pages: the medium, shared with the stores of other ranks or engines.
        latency_s: time from a call to its answer, seconds.
        missing: pages that the store reports as missing.
        corrupt: pages in which each ``get`` flips a bit.
        hang: event for which calls wait before they are answered; None answers immediately.
        timeout_s: seconds after which ``put`` and ``get`` give up.
    """

    knowledge: ClassVar = Knowledge.ASKED

    def __init__(
        self,
        pages: Pages,
        *,
        latency_s: float = 0.0,
        missing: Collection[PageKey] = (),
        corrupt: Collection[PageKey] = (),
        hang: threading.Event | None = None,
        timeout_s: float = 1.0,
    ) -> None:
        super().__init__(pages)
        self._latency_s = latency_s
        self._missing = frozenset(missing)
        self._corrupt = frozenset(corrupt)
        self._hang = hang
        self._timeout_s = timeout_s
        self._own = set[PageKey]()
        self._closing = threading.Event()

    def put(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        if not self._is_answered(self._timeout_s):
            return frozenset(range(len(pages)))
        failed = super().put(pages)
        self._own.update(key for i, (key, _) in enumerate(pages) if i not in failed)
        return failed

    def get(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        if not self._is_answered(self._timeout_s):
            return frozenset(range(len(pages)))
        arrived = MemoryStore({key: page for key, _ in pages if (page := self._fetch(key))})
        return arrived.get(pages)

    def _fetch(self, key: PageKey) -> StoredPage | None:
        """Return a page as received over the link; None if it is missing."""
        if self._closed or key in self._missing or (stored := self._pages.get(key)) is None:
            return None
        if key in self._corrupt:
            return StoredPage(bytes([stored.data[0] ^ 1]) + stored.data[1:], stored.digest)
        return stored

    def exists(self, keys: Sequence[PageKey], deadline_s: float) -> frozenset[int]:
        if not self._is_answered(deadline_s):
            return frozenset(range(len(keys)))
        return frozenset(i for i, key in enumerate(keys) if self._fetch(key) is None)

    def clear(self) -> None:
        """Delete the pages that this store has put. Other stores' pages stay valid."""
        self.drop(self._own)
        self._own.clear()

    def close(self) -> None:
        super().close()
        self._closing.set()

    def keys(self) -> Sequence[PageKey]:
        return ()

    @property
    def stored_bytes(self) -> int:
        return 0

    def _is_answered(self, within_s: float) -> bool:
        """Wait for the answer of a call. Returns False after the timeout, or if the store is
        closed.
        """
        if self._hang is not None and not self._hang.wait(within_s):
            return False
        if self._latency_s:
            self._closing.wait(min(self._latency_s, within_s))
        return not self._closing.is_set() and self._latency_s <= within_s
