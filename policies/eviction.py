"""Which page makes room when the CPU pool is full, and which is worth rewriting on SSD.

Pages are of one size, so value per byte is value per page: how likely the job comes back for
it before it would have been evicted anyway, times the seconds that having it saves.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import filterfalse, groupby
from operator import itemgetter

from tiered_kv.index import EvictionOrder
from tiered_kv.keys import PageKey
from tiered_kv.policies.forecast import Forecast

RANK_EVERY_S, PAGES_PER_S = 1.0, 20_000
"""Pages are ranked anew when some are to be evicted, but not more often than once a second, and
a second later for so many pages, which takes some milliseconds."""
SETTLED_S = 10.0
"""After this, all pages of a context that will be saved are."""
NOBODYS, HALF_S = 0.5, 30.0
"""What a page that nobody waits for is worth at first, over the usual, and when half of that is
left. Most are of jobs that are over, and the next job may begin with the others."""


@dataclass(slots=True, eq=False)
class _Context:
    """The pages of a job, first to last.

    Attributes:
        forecast: of its gap, which began at ``since``; None while its next turn is here.
        page_s: seconds that having one of its pages saves.
        end: none of its pages behind this is in CPU memory.
    """

    keys: list[PageKey] = field(default_factory=list)
    forecast: Forecast | None = None
    since: float = 0.0
    page_s: float = 0.0
    end: int = 0

    def chance(self, now: float, within_s: float) -> float:
        """That the job wants its pages in the next ``within_s`` seconds."""
        if self.forecast is None:
            return 1.0
        waited = now - self.since
        gone = self.forecast.within(waited)
        return 0.0 if gone >= 1 else (self.forecast.within(waited + within_s) - gone) / (1 - gone)


class ByWorth(EvictionOrder):
    """Evicts pages of the job that is least worth waiting for, the end of its context first.

    A page that several jobs have goes with the one most worth waiting for, and is counted once.
    What only jobs that are over had goes first. Other pages that nobody waits for (of running
    turns, prefixes that several jobs had) are worth twice a usual page when they are used, and half
    as much every half minute. If nobody ever waits this is LRU.

    Pages are ranked all together, now and then; in between, a page that is used goes to the end:
    its stamp says that it was used since. So an eviction is O(1), like that of LRU, but for pages
    that are being read, behind which those that went are passed over again.

    Args:
        clock: seconds.
        stay_s: how long a page stays in CPU memory at present before it is evicted.
        most_pages: of all contexts together; those of the job longest silent are forgotten.
    """

    def __init__(
        self, clock: Callable[[], float], stay_s: Callable[[], float], most_pages: int
    ) -> None:
        self._clock = clock
        self._stay_s = stay_s
        self._most_pages = most_pages
        self._used: OrderedDict[PageKey, float] = OrderedDict()  # when, about; the last one last
        self._ranking: list[PageKey] = []  # the first to go first, also those used or gone since
        self._passed = 0  # so many at its begin are used or gone
        self._ranked_at = -math.inf
        self._stamp = clock()  # of uses: the time of the ranking before, never twice the same
        self._contexts: OrderedDict[Hashable, _Context] = OrderedDict()
        self._pages = 0
        self._last: dict[PageKey, _Context] = {}  # whose a page was last
        self._shared: set[PageKey] = set()
        self._done: set[PageKey] = set()

    # -- what waits ---------------------------------------------------------------

    def waits(
        self,
        job: Hashable,
        keys: Sequence[PageKey],
        forecast: Forecast,
        since: float,
        page_s: float,
    ) -> None:
        """A job's turn ended at ``since``: these are the pages of its context, first to last.
        They take the place of those it had before."""
        context = self._contexts.get(job)
        if context is None:
            context = self._contexts[job] = _Context()
        self._contexts.move_to_end(job)
        old = context.keys
        same = len(old)
        if old != keys[:same]:
            pairs = enumerate(zip(old, keys, strict=False))
            same = next((i for i, (a, b) in pairs if a != b), min(len(old), len(keys)))
            self._let_go(context, old[same:])
        for key in keys[same:]:
            owner = self._last.get(key)
            if owner is not None and owner is not context:
                self._shared.add(key)
            self._last[key] = context
            self._done.discard(key)
        self._pages += len(keys) - len(old)
        context.keys = list(keys)
        context.end = len(keys)
        context.forecast, context.since, context.page_s = forecast, since, page_s
        while self._pages > self._most_pages and len(self._contexts) > 1:
            self._forget(self._contexts.popitem(last=False)[1])

    def back(self, job: Hashable) -> None:
        """The job's next turn arrived: it wants its pages now."""
        context = self._contexts.get(job)
        if context is not None:
            context.forecast = None
            context.end = len(context.keys)

    def present(self, job: Hashable) -> None:
        """Pages of the job come up from SSD."""
        context = self._contexts.get(job)
        if context is not None:
            context.end = len(context.keys)

    def over(self, job: Hashable, own: Sequence[PageKey] = ()) -> None:
        """Nobody waits for the job any more.

        Args:
            own: pages of its last turn that no other job begins with.
        """
        context = self._contexts.pop(job, None)
        last = self._last
        self._done.update(
            key
            for key in (*(context.keys if context is not None else ()), *own)
            if last.get(key, context) is context and key not in self._shared and key in self._used
        )
        if context is not None:
            self._forget(context)

    def lose(self, job: Hashable) -> None:
        """There is no telling whether anybody waits for the job."""
        context = self._contexts.pop(job, None)
        if context is not None:
            self._forget(context)

    def chance(self, key: PageKey, within_s: float) -> float:
        """That the job whose page it was last wants it in the next ``within_s`` seconds; 0 if
        nobody waits."""
        context = self._last.get(key)
        return 0.0 if context is None else context.chance(self._clock(), within_s)

    def _forget(self, context: _Context) -> None:
        self._pages -= len(context.keys)
        self._let_go(context, context.keys)

    def _let_go(self, context: _Context, keys: Sequence[PageKey]) -> None:
        last = self._last
        for key in keys:
            if last.get(key) is context:
                del last[key]
                if key not in self._used:
                    self._shared.discard(key)

    # -- EvictionOrder ------------------------------------------------------------

    def added(self, key: PageKey) -> None:
        self._used[key] = self._stamp
        self._done.discard(key)

    def added_all(self, keys: Sequence[PageKey]) -> None:
        self._used.update(dict.fromkeys(keys, self._stamp))
        if self._done:
            self._done.difference_update(keys)

    def removed(self, key: PageKey) -> None:
        del self._used[key]
        self._done.discard(key)
        if key not in self._last:
            self._shared.discard(key)

    def touched(self, key: PageKey) -> None:
        self._used.move_to_end(key)
        self._used[key] = self._stamp
        self._done.discard(key)

    def __iter__(self) -> Iterator[PageKey]:
        now = self._clock()
        if now - self._ranked_at >= RANK_EVERY_S + len(self._used) / PAGES_PER_S:
            self._rank(now)
        ranking, used, stamp = self._ranking, self._used, self._stamp
        if not ranking:
            yield from used
            return
        waiting = True
        for place in range(self._passed, len(ranking)):
            key = ranking[place]
            if used.get(key, stamp) != stamp:
                waiting = False
                yield key
            elif waiting:
                self._passed = place + 1
        yield from (key for key, when in used.items() if when == stamp)

    def _rank(self, now: float) -> None:
        self._ranked_at = now
        self._stamp = now if now != self._stamp else math.nextafter(now, math.inf)
        self._ranking, self._passed = [], 0
        if not self._contexts and not self._done:
            return
        stay_s, used = self._stay_s(), self._used
        contexts = [context for context in self._contexts.values() if context.end]

        def worth(context: _Context) -> tuple[float, float]:
            """What is not wanted soon may be wanted later."""
            soon = context.chance(now, stay_s) * context.page_s
            return soon, soon or context.chance(now, math.inf) * context.page_s

        worths = {id(context): worth(context) for context in contexts}
        contexts.sort(key=lambda context: worths[id(context)], reverse=True)
        seen: set[PageKey] = set()
        runs: list[tuple[tuple[float, float], list[PageKey]]] = []
        for context in contexts:  # the worthiest takes what several have
            here = list(filter(used.__contains__, context.keys[: context.end]))
            while now - context.since > SETTLED_S and context.end > 0:
                if context.keys[context.end - 1] in used:
                    break
                context.end -= 1
            pages = list(filterfalse(seen.__contains__, reversed(here)))
            seen.update(pages)
            runs.append((worths[id(context)], pages))
        runs.reverse()
        usual = sum(context.page_s for context in contexts) / max(1, len(contexts))
        free = list(filterfalse(seen.__contains__, used))
        done = list(filter(self._done.__contains__, free)) if self._done else []
        if done:
            free = list(filterfalse(self._done.__contains__, free))
        nobodys = [
            ((NOBODYS * usual * 0.5 ** min(max(now - when, 0.0) / HALF_S, 1000.0), 0.0), list(keys))
            for when, keys in groupby(free, key=used.__getitem__)  # a stamp serves many
        ]
        self._ranking = done
        for _, pages in merge(nobodys, runs, key=itemgetter(0)):
            self._ranking += pages
