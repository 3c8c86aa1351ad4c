"""The contract of a tier below CPU memory: a store of pages, and how a rank opens it.

A new tier is two classes: a ``PageStore``, and a ``StoreTier`` that describes it to the
scheduler half and opens it in a worker. ``testing/conformance/store.py`` has the tests that every
store must pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tiered_kv.codecs.base import Bytes, Codec, CodedPage, PageFormat
from tiered_kv.keys import PageKey
from tiered_kv.messages import Proposal
from tiered_kv.tiers import TierSpec

Pages = Sequence[tuple[PageKey, Bytes]]
"""Keys of pages, and their bytes or the buffers for them."""


class PageStore(ABC):
    """Pages of one rank, by key.

    A key stands for the same bytes for ever, and a page that is found must be the page that was
    put: a store that cannot be sure reports it as failed.

    Threads: one thread at a time makes the calls, the I/O thread but for opening and the last
    ones; all may block. ``keys``, ``stored_bytes`` and ``counters`` are also read by other
    threads, at any time.

    Time: a call may take long, but has to end. The I/O thread reports an order once its call has
    returned; until then the order's slots belong to the store, and no longer. A store that
    waits for others must therefore bound its waits, and let nothing that comes too late touch
    the pages it was given: it moves them by way of memory of its own.

    Errors: trouble with pages is returned. What is raised is a fault of the store itself, for
    which all pages of the call count as failed; the next calls are made nonetheless.
    """

    @abstractmethod
    def put(self, pages: Pages) -> frozenset[int]:
        """Store pages.

        They do not change until this returns, and may not be read after. A page that is
        returned as stored is found by every later ``get``, unless it dies as ``reclaim`` says.
        Of a key given twice, the last page is stored and speaks for both.

        Args:
            pages: keys of 16 to 255 bytes, pages of ``page_bytes`` bytes.

        Returns:
            Indices of the pages that are not stored. What was stored under their keys before
            is still there.
        """

    def put_coded(self, pages: Sequence[tuple[PageKey, CodedPage]]) -> frozenset[int]:
        """Store pages that are encoded already; like ``put``. By default they are decoded first."""
        decoded = [(key, coded.decoded()) for key, coded in pages]
        return put_present(
            self.put, [None if page is None else (key, page) for key, page in decoded]
        )

    @abstractmethod
    def get(self, pages: Pages) -> frozenset[int]:
        """Read pages into buffers of ``page_bytes`` bytes.

        The buffers are slots of the CPU pool, which hold other pages soon after this has
        returned: nothing may write to them later, not even a read that was given up.

        Returns:
            Indices of the pages that are absent or bad. Their buffers may hold anything.
        """

    @abstractmethod
    def exists(self, keys: Sequence[PageKey], deadline_s: float) -> frozenset[int]:
        """Look pages up, for at most ``deadline_s`` seconds. Changes nothing.

        An answer may be outdated when it is used: a ``get`` tells for sure.

        Returns:
            Indices of the pages that are absent, or of which nothing is known by then.
        """

    @abstractmethod
    def drop(self, keys: Iterable[PageKey]) -> None:
        """Forget pages that other ranks have lost. Unknown keys are ignored.

        The next process may find them again.
        """

    @abstractmethod
    def clear(self) -> None:
        """Make every page that this engine put unfindable, for good: the cache was reset.

        Raises:
            Exception: some may be found by the next process; this one finds none.
        """

    @abstractmethod
    def close(self) -> None:
        """Make durable what is to last, stop threads, release everything. Idempotent.

        Afterwards every page is absent, and nothing is stored or dropped any more.
        """

    @property
    def codec_of_new_pages(self) -> Codec | None:
        """Codec whose pages ``put_coded`` stores as they are; None if there is none yet."""
        return None

    # -- stores whose pages the scheduler half knows ------------------------------

    def keys(self) -> Sequence[PageKey]:
        """Every page, the one written longest ago first. Empty for stores that are asked."""
        return ()

    @property
    def stored_bytes(self) -> int:
        """Size of the live pages as stored, bytes; 0 if that is not known."""
        return 0

    @property
    def group_bytes(self) -> int | None:
        """Bytes of pages that one call should move at most; None if any number will do."""
        return None

    @property
    def rest_s(self) -> float:
        """Seconds until the next ``put`` of pages that nobody waits for; 0 at once."""
        return 0.0

    @property
    def retry_s(self) -> float | None:
        """Seconds until pages of which it took none are offered again; None if they have failed."""
        return None

    def place(self, keys: Sequence[PageKey], runs: Sequence[PageKey]) -> None:
        """Take in which pages follow each other, before they are looked up or put. A store that
        spreads pages over several servers keeps those of one run together.

        Args:
            runs: for each key, the first page of its run.
        """
        return

    def counters(self) -> Mapping[str, int]:
        """Totals of the store's own events so far, by names of ``metrics.COUNTERS``."""
        return {}

    # -- stores whose pages die in groups -----------------------------------------

    def proposal(self) -> Proposal | None:
        """Segment that should die next; None if there is room. Changes nothing."""
        return None

    def reclaim(self, segment: int, survivors: Collection[PageKey]) -> Sequence[PageKey]:
        """Delete a proposed segment after writing ``survivors`` once more.

        A segment that is gone already is fine.

        Returns:
            Pages that are gone; survivors that could not be written are among them.
        """
        raise NotImplementedError("a store that proposes segments must reclaim them")


_Item = TypeVar("_Item")


def put_present(
    put: Callable[[Sequence[_Item]], frozenset[int]], items: Sequence[_Item | None]
) -> frozenset[int]:
    """Put the keys and pages that are not None.

    Returns:
        Indices of those that are not stored, the ones that are None among them.
    """
    there = [(i, item) for i, item in enumerate(items) if item is not None]
    bad = put([item for _, item in there]) if there else frozenset()
    stored = {i for at, (i, _) in enumerate(there) if at not in bad}
    return frozenset(range(len(items))).difference(stored)


@dataclass(frozen=True, slots=True)
class StoreSite:
    """The worker that opens a store.

    Attributes:
        fingerprint: digest of what the engine's pages are made of; the keys begin with it.
        rank: index of the worker.
        ranks: number of workers.
        replica: index of the engine among data-parallel ones.
        lasting: True if an engine started elsewhere or later can have the same fingerprint.
        page_format: format of a page.
        cores: CPU cores for the store's threads.
    """

    fingerprint: bytes
    rank: int
    ranks: int
    replica: int
    lasting: bool
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
