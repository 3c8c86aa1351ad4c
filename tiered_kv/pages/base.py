"""The states of a page in CPU memory, and the contract of eviction rules.

An eviction rule chooses the page that makes room when CPU memory is full.

The index tells a rule what happens to its pages, and asks it for them in order. The scheduler half
tells it what happens to jobs; a rule that looks at pages alone leaves those methods as they are.
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
    """State of a page in CPU memory. Every page has exactly one, and ``PageIndex`` owns it."""

    MISSING = "missing"
    BEING_WRITTEN = "being written"
    """A save, a promotion or an import is copying the page into its slot."""
    RESIDENT = "resident"
    """The whole page is in a slot of its own."""
    BEING_COMPRESSED = "being compressed"
    COMPRESSED = "compressed"
    """The whole page is in the slots of its bundle."""

    @property
    def readable(self) -> bool:
        """True if the whole page is in CPU memory."""
        return self in (PageState.RESIDENT, PageState.COMPRESSED)

    @property
    def moving(self) -> bool:
        """True if the page becomes readable unless what is being done to it fails."""
        return self in (PageState.BEING_WRITTEN, PageState.BEING_COMPRESSED)


class ReturnForecast(Protocol):
    """The distribution of a gap: the time from the end of a job's turn to its next one."""

    def within(self, t: float) -> float:
        """Probability that the gap is at most ``t`` seconds."""


class EvictionOrder(ABC):
    """The readable pages of CPU memory, least valuable first. Made as ``Rule(clock, most_pages)``.

    All of it runs on the scheduler thread, without locks and without I/O. Every method is O(1) per
    page it is given, and none raises: a job need not be known, and ``removed`` and ``touched`` are
    told only of pages that were added.

    Args:
        clock: monotonic seconds, the same as that of the index.
        most_pages: pages that CPU memory and the tiers below it have room for, times two. A rule
            that remembers pages that are gone need not remember more of them.

    Attributes:
        rank_every_s: seconds from one call of ``rank`` to the next; inf for a rule that needs none.
    """

    rank_every_s: ClassVar[float] = math.inf

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, most_pages: int = 1 << 20
    ) -> None:
        self.clock = clock
        self.most_pages = most_pages

    # -- pages ----------------------------------------------------------------------

    @abstractmethod
    def added(self, key: PageKey) -> None:
        """The page is readable from now on; it counts as just used."""

    @abstractmethod
    def removed(self, key: PageKey) -> None:
        """The page is gone: evicted, or forgotten."""

    @abstractmethod
    def touched(self, key: PageKey) -> None:
        """The page was used."""

    @abstractmethod
    def __iter__(self) -> Iterator[PageKey]:
        """Every page once, the first to go first. Valid until the next call; changes nothing that
        a caller could see. The index passes over pages in use."""

    def added_all(self, keys: Sequence[PageKey]) -> None:
        """``added`` for each page in turn."""
        for key in keys:
            self.added(key)

    def touched_all(self, keys: Sequence[PageKey]) -> None:
        """``touched`` for each page in turn."""
        for key in keys:
            self.touched(key)

    def rank(self, now: float, stay_s: float) -> None:
        """Order the pages anew. Called before pages are asked for, if ``rank_every_s`` have passed.

        Args:
            now: the clock's time.
            stay_s: seconds that a page stays in CPU memory at present before it is evicted; inf
                while there is room.
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
        """A job's turn ended, or its forecast has changed.

        Args:
            keys: pages of its context, first to last, in place of those it had before; some may
                not be in CPU memory.
            forecast: of the gap.
            since: the clock's time when the gap began.
            page_s: seconds of prefill that each of the pages saves.
        """

    def on_gap_ended(self, job: Hashable) -> None:
        """The job's next turn arrived: it wants its pages now."""

    def on_job_ended(self, job: Hashable, own: Sequence[PageKey] = ()) -> None:
        """The job is over, or is not waited for any longer.

        Args:
            own: pages of its last turn that no other job begins with.
        """

    def on_forecast_lost(self, job: Hashable) -> None:
        """The job's forecast no longer holds: it may return at any time, or never."""

    def stretches(self, keys: Sequence[PageKey]) -> list[list[PageKey]]:
        """Split pages into stretches that follow each other in a context, in its order; without
        those whose context is not known.

        Pages are compressed with others of their stretch only. They go together, and one page
        that is missing makes those behind it useless.
        """
        return []

    def waiting_job(self, key: PageKey) -> Hashable | None:
        """The waiting job that had the page last; None if there is none, or the rule does not know.
        For the trace, which tells of evictions by job. The page need not be in CPU memory."""
        return None

    def return_chance(self, key: PageKey, within_s: float) -> float:
        """Probability that a job asks for the page in the next ``within_s`` seconds. The page need
        not be in CPU memory: this also says which pages of a dying segment on SSD are written
        again. At 0 only those are that were used since they were written."""
        return 0.0


EvictionRule: TypeAlias = Callable[[Callable[[], float], int], EvictionOrder]
"""A rule's class: called with the clock and the most pages to remember, it makes an order."""
