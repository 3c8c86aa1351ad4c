"""A third-party tier: pages of many engines in one place, which may be slow or faulty.

It is configured like any out-of-tree tier:
``TIERED_KV_TIERS=tests.runtime.pages.shared_store:...``.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import xxhash

from tiered_kv.codecs.base import Bytes
from tiered_kv.config import TierConfig
from tiered_kv.keys import PageKey
from tiered_kv.storage.base import PageStore, StoreSite
from tiered_kv.tiers import Knowledge, TierId, TierSpec

SHARED = TierId("shared")


@dataclass(slots=True)
class Place:
    """Pages of all engines with their digests, and faults to inject.

    Attributes:
        open: calls block while this event is not set.
        lost: pages that the place reports as missing when they are read.
    """

    pages: dict[tuple[int, PageKey], tuple[bytes, bytes]] = field(default_factory=dict)
    open: threading.Event = field(default_factory=threading.Event)
    lost: set[PageKey] = field(default_factory=set)
    asked: list[PageKey] = field(default_factory=list)
    stores: int = 0

    def corrupt(self, keys: Collection[PageKey]) -> None:
        """Flip a bit of each of these pages."""
        for (rank, key), (page, digest) in list(self.pages.items()):
            if key in keys:
                self.pages[rank, key] = (bytes([page[0] ^ 1]) + page[1:], digest)


PLACE = Place()


def renew() -> Place:
    """Replace the global place with an empty one that has no faults, and return it."""
    global PLACE
    PLACE = Place()
    PLACE.open.set()
    return PLACE


class SharedStore(PageStore):
    """One rank's connection to the shared place."""

    def __init__(self, site: StoreSite) -> None:
        self._place, self._rank = PLACE, site.rank
        self._place.stores += 1
        self._closed = False

    def put(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        self._place.open.wait()
        for key, page in pages:
            data = page.tobytes()
            self._place.pages[self._rank, key] = (data, xxhash.xxh3_128_digest(data))
        return frozenset()

    def get(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        self._place.open.wait()
        failed = set()
        for i, (key, buffer) in enumerate(pages):
            found = self._place.pages.get((self._rank, key))
            if found is None or key in self._place.lost:
                failed.add(i)
                continue
            page, digest = found
            if xxhash.xxh3_128_digest(page) != digest:
                failed.add(i)
                continue
            buffer[:] = memoryview(page)
        return frozenset(failed)

    def exists(self, keys: Sequence[PageKey], deadline_s: float) -> frozenset[int]:
        self._place.asked += keys
        if not self._place.open.wait(deadline_s):
            return frozenset(range(len(keys)))
        return frozenset(
            i for i, key in enumerate(keys) if (self._rank, key) not in self._place.pages
        )

    def drop(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self._place.pages.pop((self._rank, key), None)

    def clear(self) -> None:
        """Does nothing, because the pages belong to other engines too. A new generation has other
        keys."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._place.stores -= 1


class SharedTier:
    """The shared place as a tier."""

    def __init__(self, config: TierConfig) -> None:
        self.spec = TierSpec(SHARED, Knowledge.ASKED)
        self.bandwidth = 1e9

    def open(self, site: StoreSite) -> PageStore:
        return SharedStore(site)
