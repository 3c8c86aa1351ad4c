"""Which page makes room when the CPU pool is full, and which is worth rewriting on SSD.

Pages are of one size, so value per byte is value per page: how likely the job comes back for
it before it would have been evicted anyway, times the seconds that having it saves.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import filterfalse, islice, repeat
from operator import attrgetter
from typing import Any

from tiered_kv.keys import PageKey
from tiered_kv.pages.cpu_index import EvictionOrder
from tiered_kv.policies.distribution import Forecast

from .contexts import Context, ContextTree, Run

RANK_EVERY_S = 1.0
"""Contexts are ranked anew when pages are to be evicted, but not more often than this."""
AT_ONCE = 1024
"""Contexts whose chances are looked at anew for a ranking, which takes a millisecond or two. Of
more, those that were not for longest."""
NOBODYS, HALF_S = 0.5, 30.0
"""What a page that nobody waits for is worth at first, over the usual, and when half of that is
left. Most are of jobs that are over, and the next job may begin with the others."""


class ByWorth(EvictionOrder):
    """Evicts pages of the job that is least worth waiting for, the end of its context first.

    A page that several jobs have goes with the one most worth waiting for, and is counted once.
    What only jobs that are over had goes first. Other pages that nobody waits for (of running
    turns, prefixes that several jobs had) are worth half a usual page when they are used, and half
    as much every half minute. If nobody ever waits this is LRU.

    Contexts are ranked, now and then, and not their pages, which are found from the end of each
    when they are to go. In between, what is used, or is new, goes after all others. So an eviction
    is O(1), like that of LRU, but for pages that are being read, behind which those that went are
    passed over again.

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
        self._contexts: OrderedDict[Hashable, Context] = OrderedDict()
        self._tree = ContextTree()
        self._here: set[PageKey] = set()
        # A page that is here is in one of these three, or a context's, or a context's and recent.
        self._done: dict[PageKey, None] = {}  # only jobs that are over had it
        self._free: OrderedDict[PageKey, float] = OrderedDict()  # nobody's: when used
        self._recent: dict[PageKey, None] = {}  # a context's, used since the ranking
        self._several: set[PageKey] = set()  # nobody's now, and several jobs had it
        self._ranking: list[Context] = []  # the first to go first
        self._rank = 0
        self._passed = 0  # so many at its begin have nothing left
        self._ranked_at = -math.inf
        self._usual = 0.0
        self._stays_s = math.inf
        self._looked_at = 0  # contexts before this were looked at for the last ranking

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
            context = self._contexts[job] = Context()
        self._contexts.move_to_end(job)
        before = context.since
        fresh, gone = self._tree.put(context, keys, self._several)
        for held in (self._free, self._done):
            if held:
                deque(map(held.pop, fresh, repeat(None)), maxlen=0)
        if self._several:
            self._several.difference_update(fresh)
        context.forecast, context.since, context.page_s = forecast, since, page_s
        self._look_at(context, self._clock())
        self._long_unused(gone, before)
        while len(self._tree.runs) > self._most_pages and len(self._contexts) > 1:
            _, oldest = self._contexts.popitem(last=False)
            self._long_unused(self._tree.remove(oldest), oldest.since)

    def back(self, job: Hashable) -> None:
        """The job's next turn arrived: it wants its pages now."""
        context = self._contexts.get(job)
        if context is None:
            return
        context.forecast = None
        self._look_at(context, self._clock())
        self._tree.change(context)

    def over(self, job: Hashable, own: Sequence[PageKey] = ()) -> None:
        """Nobody waits for the job any more.

        Args:
            own: pages of its last turn that no other job begins with.
        """
        context = self._contexts.pop(job, None)
        for run in self._tree.remove(context) if context is not None else ():
            if run.shared:
                self._just_used(run)
                self._several.update(filter(self._here.__contains__, run.keys))
            else:
                self._done.update(self._pages(run))
        free, several = self._free, self._several
        for key in own:
            if key in free and key not in several:
                del free[key]
                self._done[key] = None

    def lose(self, job: Hashable) -> None:
        """There is no telling whether anybody waits for the job."""
        context = self._contexts.pop(job, None)
        for run in self._tree.remove(context) if context is not None else ():
            self._just_used(run)

    def chance(self, key: PageKey, within_s: float) -> float:
        """That the job whose page it was last wants it in the next ``within_s`` seconds; 0 if
        nobody waits."""
        run = self._tree.runs.get(key)
        return 0.0 if run is None else run.last.chance(self._clock(), within_s)

    def _just_used(self, run: Run) -> None:
        self._free.update(self._pages(run, self._clock()))

    def _long_unused(self, runs: Sequence[Run], since: float) -> None:
        """Pages that a job no longer has, and used when it began to wait: of what is nobody's they
        are the first to go, from the end."""
        for run in reversed(runs):
            for key in filter(self._here.__contains__, run.keys):
                self._free[key] = since
                self._free.move_to_end(key, last=False)

    def _pages(self, run: Run, value: Any = None) -> dict[PageKey, Any]:
        """Those of a run that are here, the last one first."""
        return dict.fromkeys(filter(self._here.__contains__, reversed(run.keys)), value)

    # -- EvictionOrder ------------------------------------------------------------

    def added(self, key: PageKey) -> None:
        self.added_all((key,))

    def added_all(self, keys: Sequence[PageKey]) -> None:
        self._here.update(keys)
        runs = self._tree.runs
        if not runs.keys().isdisjoint(keys):
            for run in set(map(runs.get, keys)):
                if run is not None:
                    run.end = len(run.keys)
        self.touched_all(keys)

    def removed(self, key: PageKey) -> None:
        self._here.remove(key)
        self._recent.pop(key, None)
        if key not in self._tree.runs:
            self._free.pop(key, None)
            self._done.pop(key, None)
            self._several.discard(key)

    def touched(self, key: PageKey) -> None:
        self.touched_all((key,))

    def touched_all(self, keys: Sequence[PageKey]) -> None:
        now, has_run = self._clock(), self._tree.runs.__contains__
        waited_for = dict.fromkeys(filter(has_run, keys))
        if waited_for and now - self._ranked_at < RANK_EVERY_S:  # else they are ranked first
            self._recent.update(waited_for)
        if len(waited_for) == len(keys):
            return
        free, done = self._free, self._done
        for key in filterfalse(has_run, keys) if waited_for else keys:
            free[key] = now
            free.move_to_end(key)
        if done:
            deque(map(done.pop, keys, repeat(None)), maxlen=0)

    def __iter__(self) -> Iterator[PageKey]:
        now = self._clock()
        if now - self._ranked_at >= RANK_EVERY_S:
            self._rank_anew(now)
        yield from self._done
        nobodys = iter(self._free.items())
        next_one = next(nobodys, None)
        for place in range(self._passed, len(self._ranking)):
            context = self._ranking[place]
            run = context.leaf
            left = False
            while run is not None and run.rank == self._rank and run.owner is context:
                while next_one is not None and self._goes_before(next_one[1], context, now):
                    yield next_one[0]
                    next_one = next(nobodys, None)
                for key in self._from_the_end(run):
                    left = True
                    yield key
                run = run.above
            if not left and place == self._passed:
                self._passed = place + 1
        if next_one is not None:
            yield next_one[0]
            for key, _ in nobodys:
                yield key
        for run in self._tree.changed:
            yield from filterfalse(self._recent.__contains__, self._pages(run))
        yield from filter(self._tree.runs.__contains__, self._recent)  # others are nobody's now

    def _goes_before(self, used: float, context: Context, now: float) -> bool:
        """Whether a page that is nobody's, and was used then, is worth no more than a context's."""
        halves = min(max(now - used, 0.0) / HALF_S, 1000.0)
        return (NOBODYS * self._usual * 0.5**halves, 0.0) <= context.worth

    def _from_the_end(self, run: Run) -> Iterator[PageKey]:
        """Its pages that are here and were not used since; those behind, which were or are not,
        are passed over once."""
        keys, here, recent = run.keys, self._here, self._recent
        begun = False
        for place in range(run.at - 1, -1, -1):
            key = keys[place]
            if key in here and key not in recent:
                begun = True
                yield key
            elif not begun:
                run.at = place
                if run.end == place + 1 and key not in here:
                    run.end = place

    # -- ranking --------------------------------------------------------------------

    def _look_at(self, context: Context, now: float) -> None:
        """See what a page of it is worth: what is not wanted soon may be wanted later."""
        soon = context.chance(now, self._stays_s) * context.page_s
        context.worth = soon, soon or context.chance(now, math.inf) * context.page_s

    def _rank_anew(self, now: float) -> None:
        self._ranked_at, self._stays_s = now, self._stay_s()
        self._rank += 1
        self._passed = 0
        self._recent = {}
        self._tree.changed.clear()
        contexts = list(self._contexts.values())
        begin = self._looked_at if self._looked_at < len(contexts) else 0
        self._looked_at = begin + AT_ONCE
        for context in islice(contexts, begin, self._looked_at):
            self._look_at(context, now)
        contexts.sort(key=attrgetter("worth"))
        whole, count = 0.0, 0
        for context in reversed(contexts):  # the worthiest takes what several have
            run = context.leaf
            if run is not None and run.end:
                whole, count = whole + context.page_s, count + 1
            while run is not None and run.rank != self._rank:
                run.rank, run.owner, run.at = self._rank, context, run.end
                run = run.above
        self._ranking = contexts
        self._usual = whole / max(1, count)
