"""The states of a page in CPU memory, and the contract of eviction rules.

An eviction rule chooses the page that is evicted when CPU memory is full.

The index notifies a rule of changes to its pages, and requests them in eviction order. The
scheduler half notifies a rule of job events. A rule that considers only pages keeps the default
methods for jobs.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from enum import Enum
from typing import ClassVar, Protocol, TypeAlias

from tiered_kv.keys import PageKey


class PageState(Enum):
    """State of a page in CPU memory. Every page has exactly one state, which only ``PageIndex``
    changes."""

    MISSING = "missing"
    BEING_WRITTEN = "being written"
    """A save, a promotion or an import is copying the page into its slot."""
    RESIDENT = "resident"
    """The whole page has its own slot."""
    BEING_COMPRESSED = "being compressed"
    COMPRESSED = "compressed"
    """The whole page is in the slots of its bundle."""

    @property
    def readable(self) -> bool:
        """True if the whole page is in CPU memory."""
        return self in (PageState.RESIDENT, PageState.COMPRESSED)

    @property
    def moving(self) -> bool:
        """True if the page becomes readable unless its current copy fails."""
        return self in (PageState.BEING_WRITTEN, PageState.BEING_COMPRESSED)


class ReturnForecast(Protocol):
    """The distribution of a gap: the time from the end of a job's turn, or from a later change of
    the forecast, to the start of its next turn."""

    def within(self, t: float) -> float:
        """Return the probability that the gap is at most ``t`` seconds."""


class EvictionOrder(ABC):
    """The readable pages of CPU memory, least valuable first. Created as ``Rule(clock,
    most_pages)``.

    All methods run on the scheduler thread, without locks and I/O. Every method is O(1) per page
    passed to it, and no method raises. A job may be unknown. ``removed`` and ``touched`` are called
    only for pages that were added.

    Args:
        clock: monotonic clock in seconds, shared with the index.
        most_pages: twice the page capacity of CPU memory and the lower tiers. A rule that
            remembers evicted pages need not remember more than this.

    Attributes:
        rank_every_s: seconds from one call of ``rank`` to the next; inf for a rule that needs no
            calls.
        by_context: True if ``on_gap_begun`` also counts the pages as just used, so that
            ``touched_all`` need not follow.
    """

    rank_every_s: ClassVar[float] = math.inf
    by_context: ClassVar[bool] = False

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, most_pages: int = 1 << 20
    ) -> None:
        self.clock = clock
        self.most_pages = most_pages

    # -- pages ----------------------------------------------------------------------

    @abstractmethod
    def added(self, key: PageKey) -> None:
        """Record that the page has become readable. The page counts as just used."""

    @abstractmethod
    def removed(self, key: PageKey) -> None:
        """Record that the page was evicted or forgotten."""

    @abstractmethod
    def touched(self, key: PageKey) -> None:
        """Record that the page was used."""

    @abstractmethod
    def __iter__(self) -> Iterator[PageKey]:
        """Iterate over every page once, in eviction order. The iterator is valid until the next
        call, and has no visible side effects. The index skips pages in use."""

    def added_all(self, keys: Sequence[PageKey]) -> None:
        """Call ``added`` for each page in turn."""
        for key in keys:
            self.added(key)

    def removed_all(self, keys: Sequence[PageKey]) -> None:
        """Call ``removed`` for each page in turn."""
        for key in keys:
            self.removed(key)

    def touched_all(self, keys: Sequence[PageKey]) -> None:
        """Call ``touched`` for each page in turn."""
        for key in keys:
            self.touched(key)

    def rank(self, now: float, stay_s: float) -> None:
        """Recompute the order. Called before the pages are requested, if ``rank_every_s`` have
        passed.

        Args:
            now: current time of the clock.
            stay_s: time that a page currently stays in CPU memory before it is evicted, seconds;
                inf while there is free space.
        """

    # -- jobs -----------------------------------------------------------------------

    def on_gap_begun(
        self,
        job: Hashable,
        keys: Sequence[PageKey],
        forecast: ReturnForecast,
        since: float,
        page_s: float,
    ) -> None:
        """Record that a job's turn ended, or that the job's forecast has changed.

        Args:
            keys: pages of the job's context, first to last. They replace the pages passed before.
                Some of these pages may not be in CPU memory.
            forecast: forecast of the time from ``since`` to the start of the job's next turn.
            since: time of the clock at which the gap began, or at which the forecast last changed.
            page_s: prefill time that each of the pages saves, seconds.
        """

    def on_extended(self, job: Hashable, since: float) -> Sequence[PageKey]:
        """Record that the job's next turn extends the prompt of the turn whose gap began at
        ``since``. The contexts that the job had left by then are superseded.

        Returns:
            Pages that only these contexts had, and that were not used since. They should be evicted
            first, until a request uses them.
        """
        return ()

    def on_gap_ended(self, job: Hashable) -> None:
        """Record that the job's next turn has arrived, and needs the pages of its context now."""

    def on_job_ended(self, job: Hashable, own: Sequence[PageKey] = ()) -> None:
        """Record that the job has finished, or is no longer expected to return.

        Args:
            own: pages of the job's last turn that no other job shares.
        """

    def on_forecast_lost(self, job: Hashable) -> None:
        """Record that the job's forecast is no longer valid: the job may return at any time, or
        never."""

    def context(self, job: Hashable) -> Sequence[PageKey]:
        """Return the first pages of the context that a job left behind, as far as the rule knows
        them. The caller need not compute their keys again."""
        return ()

    def private(self, keys: Sequence[PageKey], mine: Callable[[Hashable], bool]) -> list[PageKey]:
        """Return the keys of pages that are in no other job's context, as far as the rule knows, in
        the order of ``keys``.

        Args:
            mine: returns True for jobs that do not count as other jobs.
        """
        return list(keys)

    def stretches(self, keys: Sequence[PageKey]) -> list[list[PageKey]]:
        """Split pages into stretches that are contiguous in a context, in context order. Pages
        whose context is not known are left out.

        Only pages of one stretch are compressed together, because compressed pages are evicted
        together, and one missing page makes all later pages of its context useless.
        """
        return []

    def waiting_job(self, key: PageKey) -> Hashable | None:
        """Return the waiting job that used the page last; None if no waiting job used it, or if the
        rule does not know the job. The trace uses this to attribute evictions to jobs. The page
        need not be in CPU memory."""
        return None

    def superseded(self, key: PageKey) -> bool:
        """Return True for a page in CPU memory that only superseded contexts have (see
        ``on_extended``). Such a page is evicted without a copy in a lower tier."""
        return False

    def return_chance(self, key: PageKey, within_s: float) -> float:
        """Return the probability that a job needs the page within ``within_s`` seconds. The page
        need not be in CPU memory: the result also decides which pages of an SSD segment are
        rewritten when the segment is reclaimed. If the result is 0, a page is rewritten only if it
        was used since it was written."""
        return 0.0


EvictionRule: TypeAlias = Callable[[Callable[[], float], int], EvictionOrder]
"""Class of a rule. It is called with the clock and the maximum number of pages to remember, and
creates an order."""
