"""The pages of a lower tier, as known to the scheduler half.

A page is listed once its bytes are in the store of every rank. The stores own the bytes, and report
pages that they lose. The contents of a tier to which other engines also write are known only from
answers to lookups, which expire.

Single-threaded, no locks, O(1) per page.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import filterfalse, islice, repeat

from tiered_kv.keys import PageKey
from tiered_kv.tiers import Knowledge, TierSpec

ASSUMED_BANDWIDTH = 1e9
"""Assumed promotion rate of a rank until the worker has measured it, bytes of pages per second."""
PRESENT_S, ABSENT_S = 5.0, 10.0
"""Time after which an answer expires, for a present and for an absent page, seconds. Other engines
may evict a present page, or write an absent page."""
MOST_ANSWERS = 1 << 17
"""Maximum number of answers kept, the latest ones: enough for 300 turns of 400 pages each, about 30
MB."""


class TierIndex:
    """Keys of the pages in a tier's stores, each with a mark of whether the page was used since it
    was written.

    Attributes:
        on_changed: called with pages that may have been added to the index or removed from it; None
            if nothing observes the index.
    """

    def __init__(self) -> None:
        self.on_changed: Callable[[Collection[PageKey]], None] | None = None
        self._used: dict[PageKey, bool] = {}
        self._superseded: dict[PageKey, None] = {}

    def __len__(self) -> int:
        return len(self._used)

    def __iter__(self) -> Iterator[PageKey]:
        return iter(self._used)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._used

    @property
    def lists(self) -> Callable[[PageKey], bool]:
        """Return a predicate that is True for pages that the tier has as far as is known, even from
        an expired answer."""
        return self._used.__contains__

    def absent(self, keys: Collection[PageKey]) -> Collection[PageKey]:
        """Return the keys whose pages cannot be read from this tier, in the same order."""
        return [*filterfalse(self._used.__contains__, keys)]

    def present(self, keys: Collection[PageKey]) -> list[PageKey]:
        """Return the keys whose pages can be read from this tier, in the same order."""
        return [*filter(self._used.__contains__, keys)]

    def unwritten(self, keys: Iterable[PageKey]) -> Iterator[PageKey]:
        """Yield the keys whose pages should be written to this tier, in the same order."""
        return filterfalse(self._used.__contains__, keys)

    def unanswered(self, keys: Collection[PageKey]) -> list[PageKey]:
        """Return the keys whose pages must be looked up in the store; empty for a tier
        whose pages are known."""
        return []

    def answer(self, keys: Iterable[PageKey], present: bool) -> None:
        """Record whether the stores of all ranks have these pages."""
        (self.add if present else self.discard)(keys)

    def add(self, keys: Iterable[PageKey]) -> None:
        """Record pages that the stores of all ranks have."""
        if self.on_changed is not None:
            keys = [*keys]
            self.on_changed(keys)
        deque(map(self._used.setdefault, keys, repeat(False)), maxlen=0)

    def discard(self, keys: Iterable[PageKey]) -> None:
        """Drop pages that are missing or bad on some rank."""
        if self.on_changed is not None:
            keys = [*keys]
            self.on_changed(keys)
        for key in keys:
            self._used.pop(key, None)
            self._superseded.pop(key, None)

    def touch(self, keys: Collection[PageKey]) -> None:
        """Mark pages as used. Skips pages that are not in the tier."""
        used = self._used
        used.update(zip(filter(used.__contains__, keys), repeat(True)))
        if self._superseded:
            deque(map(self._superseded.pop, keys, repeat(None)), maxlen=0)

    def supersede(self, keys: Iterable[PageKey]) -> None:
        """Mark pages as superseded until they are used. Skips pages that are not in the tier."""
        self._superseded.update(dict.fromkeys(filter(self._used.__contains__, keys)))

    def take_superseded(self) -> list[PageKey]:
        """Remove and return the superseded pages."""
        keys = list(self._superseded)
        self.discard(keys)
        return keys

    def was_used(self, key: PageKey) -> bool:
        """True if the page is in the tier and was used since it was last written."""
        return self._used.get(key, False)

    def on_rewritten(self, keys: Iterable[PageKey]) -> None:
        """Mark pages as unused because they are written once more. A page must be used again to
        survive the next reclaim. Skips pages that are not in the tier."""
        used = self._used
        for key in keys:
            if key in used:
                used[key] = False

    def clear(self) -> None:
        """Drop every page."""
        if self.on_changed is not None:
            self.on_changed(self._used.keys())
        self._used.clear()
        self._superseded.clear()


class AskedIndex(TierIndex):
    """The answers of a tier's stores to lookups. An answer is valid for some seconds.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._until: dict[PageKey, float] = {}  # present or absent, in order of their answers

    def __contains__(self, key: PageKey) -> bool:
        return key in self._used and self._until.get(key, -math.inf) > self._clock()

    def absent(self, keys: Collection[PageKey]) -> Collection[PageKey]:
        if self._used.keys().isdisjoint(keys):  # the usual case, and a cheap test
            return keys
        found = self.present(keys)
        if len(found) == len(keys):
            return ()
        return [*filterfalse(set(found).__contains__, keys)] if found else keys

    def present(self, keys: Collection[PageKey]) -> list[PageKey]:
        found, until, now = super().present(keys), self._until, self._clock()
        if min(map(until.__getitem__, found), default=now) > now:  # the usual case
            return found
        return [key for key in found if until[key] > now]

    def unanswered(self, keys: Collection[PageKey]) -> list[PageKey]:
        if self._until.keys().isdisjoint(keys):  # the usual case, and a cheap test
            return list(keys)
        until, now = self._until, self._clock()
        known = filter(until.__contains__, keys)
        if max(map(until.__getitem__, known)) <= now:  # the usual case for a long prompt
            return list(keys)
        return [key for key in keys if until.get(key, now) <= now]

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

    def _answered(self, keys: Collection[PageKey], good_s: float) -> None:
        """Store new answers, and drop the oldest ones beyond ``MOST_ANSWERS``. Expired answers are
        kept, so that a page that was present is not written again."""
        until = self._until
        if not until.keys().isdisjoint(keys):
            deque(map(until.pop, keys, repeat(None)), maxlen=0)
        until.update(zip(keys, repeat(self._clock() + good_s)))
        dropped = [*islice(until, max(0, len(until) - MOST_ANSWERS))]
        if dropped and self.on_changed is not None:
            self.on_changed(dropped)
        for key in dropped:
            del until[key]
            self._used.pop(key, None)


def make_index(spec: TierSpec, clock: Callable[[], float]) -> TierIndex:
    """Create the index for a tier."""
    return TierIndex() if spec.knowledge is Knowledge.KNOWN else AskedIndex(clock)


@dataclass(slots=True)
class TierPages:
    """The pages of one lower tier, and the pages that are being moved. Written by the order book.

    Attributes:
        index: the tier's pages.
        bandwidth: rate at which a rank promotes, bytes of pages per second.
        promoting: number of pages being promoted.
        demoting: pages being demoted.
    """

    index: TierIndex
    bandwidth: float = ASSUMED_BANDWIDTH
    promoting: int = 0
    demoting: set[PageKey] = field(default_factory=set)

    def end_demotion(self, keys: Collection[PageKey]) -> None:
        """Record that pages are no longer being demoted, whether or not the tier has them now."""
        self.demoting.difference_update(keys)
        if self.index.on_changed is not None:
            self.index.on_changed(keys)
