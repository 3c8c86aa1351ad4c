"""The contract of a lower tier: a store of pages, and how a rank opens the store.

A new tier is two classes: a ``PageStore``, and a ``StoreTier`` that describes the tier to the
scheduler half and opens its store in a worker. ``testing/conformance/store.py`` has the tests that
every store must pass.
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
"""Page keys, each with the page's bytes or with the buffer into which the page is read."""


class PageStore(ABC):
    """Pages of one rank, by key.

    A key always stands for the same bytes, and a page that is found must be the page that was put.
    A store that cannot verify a page reports it as failed.

    Threads: one thread at a time makes the calls. It is the I/O thread, except for opening and for
    the last calls. All calls may block. ``keys``, ``stored_bytes`` and ``counters`` are also read
    by other threads, at any time.

    Time: a call may take long, but must return. The I/O thread reports an order once its call has
        returned. Until then, and no longer, the store may access the order's slots. A store that
        waits for a remote peer must therefore bound its waits, and copy pages through its own
        memory, so that a late transfer cannot touch the slots.

    Errors: pages that failed are returned. An exception is a fault of the store itself: all pages
    of the call count as failed, and further calls are made nonetheless.
    """

    @abstractmethod
    def put(self, pages: Pages) -> frozenset[int]:
        """Store pages.

        The pages do not change until the call returns, and must not be read afterwards. A page that
        is returned as stored is found by every later ``get``, unless it is reclaimed (see
        ``reclaim``). If a key is given twice, the last page is stored, and its result counts for
        both.

        Args:
            pages: keys of 16 to 255 bytes, pages of ``page_bytes`` bytes.

        Returns:
            Indices of the pages that are not stored. Pages stored earlier under their keys are
            unchanged.
        """

    def put_coded(self, pages: Sequence[tuple[PageKey, CodedPage]]) -> frozenset[int]:
        """Store pages that are already encoded. Returns the indices of the pages that are not
        stored, as ``put`` does. The default implementation decodes the pages, and calls ``put``."""
        decoded = [(key, coded.decoded()) for key, coded in pages]
        return put_present(
            self.put, [None if page is None else (key, page) for key, page in decoded]
        )

    @abstractmethod
    def get(self, pages: Pages) -> frozenset[int]:
        """Read pages into buffers of ``page_bytes`` bytes.

        The buffers are slots of the CPU pool, which are reused soon after the call has returned.
        Nothing may write to the buffers later, not even an abandoned read.

        Returns:
            Indices of the pages that are absent or bad. The contents of their buffers are
                undefined.
        """

    @abstractmethod
    def exists(self, keys: Sequence[PageKey], deadline_s: float) -> frozenset[int]:
        """Look pages up, for at most ``deadline_s`` seconds. The call changes nothing.

        The result may be outdated when it is used; only ``get`` is authoritative.

        Returns:
            Indices of the pages that are absent, or whose state is unknown at the deadline.
        """

    @abstractmethod
    def drop(self, keys: Iterable[PageKey]) -> None:
        """Forget pages that other ranks have lost, or that are superseded. Unknown keys are
        ignored.

        The next process may find dropped pages again.
        """

    @abstractmethod
    def clear(self) -> None:
        """Make every page that this engine put permanently unfindable, after a cache reset.

        Raises:
            Exception: the next process may find some of the pages; this process finds none.
        """

    @abstractmethod
    def close(self) -> None:
        """Flush pages that are to be durable, stop threads, release everything. Idempotent.

        Afterwards every page is absent, and nothing is stored or dropped any more.
        """

    @property
    def codec_of_new_pages(self) -> Codec | None:
        """Codec whose pages ``put_coded`` stores without re-encoding; None if there is none yet."""
        return None

    # -- stores whose pages the scheduler half knows ------------------------------

    def keys(self) -> Sequence[PageKey]:
        """Keys of all pages, oldest first; empty for stores that the scheduler half queries by
        lookup."""
        return ()

    @property
    def stored_bytes(self) -> int:
        """Size of the live pages as stored, bytes; 0 if unknown."""
        return 0

    @property
    def group_bytes(self) -> int | None:
        """Maximum number of bytes of pages that one call should move; None for any number."""
        return None

    @property
    def rest_s(self) -> float:
        """Pause before the next ``put`` of pages for which no request waits, seconds; 0 for no
        pause."""
        return 0.0

    @property
    def retry_s(self) -> float | None:
        """Time until pages are offered again after a ``put`` that stored none of them, seconds;
        None if they are not offered again."""
        return None

    def place(self, keys: Sequence[PageKey], runs: Sequence[PageKey]) -> None:
        """Record the run of each page, before the pages are looked up or put. A run is a sequence
        of consecutive pages of one context. A store that spreads pages over several servers keeps
        the pages of one run together.

        Args:
            runs: for each key, the first page of its run.
        """
        return

    def counters(self) -> Mapping[str, int]:
        """Totals of the store's own events so far, by names of ``metrics.COUNTERS``."""
        return {}

    # -- stores whose pages are reclaimed in groups ------------------------------

    def proposal(self) -> Proposal | None:
        """Return the segment that should be reclaimed next; None if no space needs to be freed. The
        call changes nothing."""
        return None

    def reclaim(self, segment: int, survivors: Collection[PageKey]) -> Sequence[PageKey]:
        """Delete a proposed segment after writing ``survivors`` once more.

        A segment that no longer exists is not an error.

        Returns:
            The pages that are lost, including survivors that could not be written.
        """
        raise NotImplementedError("a store that proposes segments must implement reclaim")


_Item = TypeVar("_Item")


def put_present(
    put: Callable[[Sequence[_Item]], frozenset[int]], items: Sequence[_Item | None]
) -> frozenset[int]:
    """Call ``put`` with the items that are not None.

    Returns:
        Indices of the items that are not stored, including the items that are None.
    """
    there = [(i, item) for i, item in enumerate(items) if item is not None]
    bad = put([item for _, item in there]) if there else frozenset()
    stored = {i for at, (i, _) in enumerate(there) if at not in bad}
    return frozenset(range(len(items))).difference(stored)


@dataclass(frozen=True, slots=True)
class StoreSite:
    """Description of the worker that opens a store.

    Attributes:
        fingerprint: digest of everything that determines the bytes of the engine's pages. The keys
            of these pages begin with the fingerprint.
        rank: index of the worker.
        ranks: number of workers.
        replica: index of the engine among data-parallel engines.
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
    """A configured tier. It is created in the scheduler half and in each worker, without I/O.

    The constructor takes the operator's ``TierConfig``.
    """

    @property
    def spec(self) -> TierSpec:
        """The tier's name, and how the scheduler half knows its pages."""

    @property
    def bandwidth(self) -> float:
        """Expected rate of ``get``, bytes of pages per second. It is valid after ``open``."""

    def open(self, site: StoreSite) -> PageStore:
        """Open a rank's store. The method is called again with another fingerprint after a cache
        reset.

        Raises:
            ConfigError: the store cannot be used; the message says what to do.
        """
