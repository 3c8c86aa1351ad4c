"""The pages of a tier below CPU memory, as the scheduler half knows them.

A page is here once its bytes are in the store of every rank. The stores own the bytes, and
report when pages are gone. A tier that others write to as well is known by its answers only, and
an answer grows old.

One thread, no locks, O(1) per page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import filterfalse, islice, repeat

from tiered_kv.keys import PageKey
from tiered_kv.tiers import Knowledge, TierSpec

ASSUMED_BANDWIDTH = 1e9
"""Bytes of pages per second that a rank promotes, until the worker has measured it."""
PRESENT_S, ABSENT_S = 5.0, 10.0
"""Ages at which an answer is asked for again: a page that was there may be evicted by others, one
that was not may be written by others."""
MOST_ANSWERS = 1 << 17
"""Answers kept, the latest: those of 300 turns with 400 pages each. They take some 30 MB."""


class TierIndex:
    """Keys of pages in a tier's stores, and whether each was used since it was written."""

    def __init__(self) -> None:
        self._used: dict[PageKey, bool] = {}

    def __len__(self) -> int:
        return len(self._used)

    def __iter__(self) -> Iterator[PageKey]:
        return iter(self._used)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._used

    def absent(self, keys: Collection[PageKey]) -> Collection[PageKey]:
        """The ones of these pages that cannot be had here, in the same order."""
        return [*filterfalse(self._used.__contains__, keys)]

    def unwritten(self, keys: Iterable[PageKey]) -> Iterator[PageKey]:
        """The ones of these pages that are worth writing, in the same order."""
        return filterfalse(self._used.__contains__, keys)

    def unanswered(self, keys: Iterable[PageKey]) -> list[PageKey]:
        """Pages of which the store must be asked whether it has them."""
        return []

    def answer(self, keys: Iterable[PageKey], present: bool) -> None:
        """Take in whether the stores of all ranks have these pages."""
        (self.add if present else self.discard)(keys)

    def add(self, keys: Iterable[PageKey]) -> None:
        """Take in pages that the stores of all ranks have."""
        deque(map(self._used.setdefault, keys, repeat(False)), maxlen=0)

    def discard(self, keys: Iterable[PageKey]) -> None:
        """Drop pages that are gone, or bad, on some rank."""
        for key in keys:
            self._used.pop(key, None)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Mark pages as used. Those not in the tier are passed over."""
        used = self._used
        for key in keys:
            if key in used:
                used[key] = True

    def was_used(self, key: PageKey) -> bool:
        """True if the page is in the tier and was used since it was last written."""
        return self._used.get(key, False)

    def on_rewritten(self, keys: Iterable[PageKey]) -> None:
        """Mark pages as unused, since they are written once more: each must be used again to
        survive again. Those not in the tier are passed over."""
        used = self._used
        for key in keys:
            if key in used:
                used[key] = False

    def clear(self) -> None:
        """Drop every page."""
        self._used.clear()


class AskedIndex(TierIndex):
    """Answers of a tier's stores, each good for some seconds.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._until: dict[PageKey, float] = {}  # present or absent, in order of their answers

    def __contains__(self, key: PageKey) -> bool:
        return key in self._used and self._fresh(key)

    def absent(self, keys: Collection[PageKey]) -> Collection[PageKey]:
        used = self._used
        if used.keys().isdisjoint(keys):  # mostly so, and quickly told
            return keys
        return [key for key in keys if key not in used or not self._fresh(key)]

    def unanswered(self, keys: Iterable[PageKey]) -> list[PageKey]:
        until, now = self._until.get, self._clock()
        return [key for key in keys if until(key, now) <= now]

    def add(self, keys: Iterable[PageKey]) -> None:
        keys = list(keys)
        super().add(keys)
        self._answered(keys, PRESENT_S)

    def discard(self, keys: Iterable[PageKey]) -> None:
        keys = list(keys)
        if not self._used.keys().isdisjoint(keys):
            super().discard(keys)
        self._answered(keys, ABSENT_S)

    def clear(self) -> None:
        super().clear()
        self._until.clear()

    def _fresh(self, key: PageKey) -> bool:
        until = self._until.get(key)
        return until is not None and self._clock() < until

    def _answered(self, keys: Collection[PageKey], good_s: float) -> None:
        """Keep new answers, and drop the oldest ones beyond ``MOST_ANSWERS``. Outdated ones are
        kept as well: a page that was present is not written again."""
        until = self._until
        deque(map(until.pop, keys, repeat(None)), maxlen=0)
        until.update(zip(keys, repeat(self._clock() + good_s)))
        for key in [*islice(until, max(0, len(until) - MOST_ANSWERS))]:
            del until[key]
            self._used.pop(key, None)


def make_index(spec: TierSpec, clock: Callable[[], float]) -> TierIndex:
    """Make the index that a tier needs."""
    return TierIndex() if spec.knowledge is Knowledge.KNOWN else AskedIndex(clock)


@dataclass(slots=True)
class TierPages:
    """Pages of one tier below CPU memory, and those on their way. The order book writes it.

    Attributes:
        index: the tier's pages.
        bandwidth: rate at which a rank promotes, bytes of pages per second.
        promoting: number of pages on their way up.
        demoting: pages on their way down.
    """

    index: TierIndex
    bandwidth: float = ASSUMED_BANDWIDTH
    promoting: int = 0
    demoting: set[PageKey] = field(default_factory=set)
