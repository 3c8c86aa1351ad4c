"""The contract of a tier below CPU memory: a store of pages, and how a rank opens it.

A new tier is two classes: a ``PageStore``, and a ``StoreTier`` that describes it to the
scheduler half and opens it in a worker. ``testing/store.py`` has the tests that every store
must pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tiered_kv.codecs.base import Bytes, PageFormat
from tiered_kv.keys import PageKey
from tiered_kv.messages import Proposal
from tiered_kv.tiers import TierSpec


class PageStore(ABC):
    """Pages of one rank, by key. One I/O thread owns a store and makes all calls; they may block.

    A key stands for the same bytes for ever. A page that is found must be the page that was put:
    a store that cannot be sure reports it as failed. Whatever fails is reported, not raised, but
    for a fault of the store itself; the I/O thread then reports the whole order as failed.
    """

    @abstractmethod
    def put(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        """Store pages. They do not change until this returns, and are not kept after.

        Returns:
            Indices of the pages that are not stored.
        """

    @abstractmethod
    def get(self, pages: Sequence[tuple[PageKey, Bytes]]) -> frozenset[int]:
        """Read pages into buffers of ``page_bytes`` bytes.

        The buffers are slots of the CPU pool, and used for other pages once this has returned:
        nothing may write to them later.

        Returns:
            Indices of the pages that are absent or bad. Their buffers may hold anything.
        """

    @abstractmethod
    def exists(self, keys: Sequence[PageKey], deadline_s: float) -> frozenset[int]:
        """Look pages up, for at most ``deadline_s`` seconds.

        Returns:
            Indices of the pages that are absent, or of which nothing is known by then.
        """

    @abstractmethod
    def drop(self, keys: Iterable[PageKey]) -> None:
        """Forget pages that other ranks have lost. Unknown keys are ignored."""

    @abstractmethod
    def clear(self) -> None:
        """Make every page of this engine unfindable, for good: the cache was reset."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent; every page is absent afterwards."""

    # -- stores whose pages the scheduler half knows ------------------------------

    def keys(self) -> Sequence[PageKey]:
        """Pages from before, the one written longest ago first. Empty for stores that are asked."""
        return ()

    @property
    def stored_bytes(self) -> int:
        """Size of the live pages as stored, bytes; 0 if that is not known."""
        return 0

    @property
    def group_bytes(self) -> int | None:
        """Bytes of pages that one ``put`` should have at most; None if any number will do."""
        return None

    def counters(self) -> Mapping[str, int]:
        """Totals of the store's own events so far, by names of ``metrics.COUNTERS``."""
        return {}

    # -- stores whose pages die in groups -----------------------------------------

    def proposal(self) -> Proposal | None:
        """The segment that should die next; None if there is room. Changes nothing."""
        return None

    def reclaim(self, segment: int, survivors: Collection[PageKey]) -> Sequence[PageKey]:
        """Delete a proposed segment after writing ``survivors`` once more.

        Returns:
            The pages that are gone.
        """
        raise NotImplementedError("a store that proposes segments must reclaim them")


@dataclass(frozen=True, slots=True)
class StoreSite:
    """The worker that opens a store.

    Attributes:
        fingerprint: digest of what the engine's pages are made of; the keys begin with it.
        rank: index of the worker.
        ranks: number of workers.
        replica: index of the engine among data-parallel ones.
        page_format: format of a page.
        cores: CPU cores for the store's threads.
    """

    fingerprint: bytes
    rank: int
    ranks: int
    replica: int
    page_format: PageFormat
    cores: int


class StoreTier(Protocol):
    """A tier, as configured. Made in both halves; making it does no I/O.

    Its constructor takes the operator's ``TierConfig``.
    """

    @property
    def spec(self) -> TierSpec:
        """The tier's name, and who knows its pages."""

    @property
    def bandwidth(self) -> float:
        """Expected rate of ``get``, bytes of pages per second; read after ``open``."""

    def open(self, site: StoreSite) -> PageStore:
        """Open a rank's store; again with another fingerprint after a cache reset.

        Raises:
            ConfigError: it cannot be used; the sentence says what to do.
        """
