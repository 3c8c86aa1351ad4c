"""The default eviction rule: pages of the job that is least worth waiting for are evicted first.

Pages have equal sizes, so the value per byte is proportional to the value of a page: the
probability that the job returns before the page would be evicted anyway, times the prefill time
that the page saves.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, filterfalse, groupby, islice, repeat, takewhile
from operator import attrgetter, itemgetter
from typing import Any, ClassVar

from tiered_kv.keys import PageKey
from tiered_kv.pages.base import EvictionOrder, ReturnForecast

from .contexts import Branch, Context, ContextTree, Run

RANK_EVERY_S = 1.0
"""Minimum time between two rankings of the contexts, seconds."""
AT_ONCE = 1024
"""Number of contexts revalued for one ranking, which takes a millisecond or two. If there are more
contexts, each ranking revalues the next of them."""
AT_A_TIME = 64
"""Number of pages that are looked up together. An eviction often needs fewer."""
NOBODYS, HALF_S = 0.5, 30.0
"""``NOBODYS``: worth of a page that was just used and that no job waits for, as a fraction of the
mean worth. ``HALF_S``: half-life of that worth, seconds. Most such pages belong to finished jobs,
but the next job may begin with one of them."""
_USED_AT: Callable[[tuple[PageKey, float]], float] = itemgetter(1)
MOST_BRANCHES = 16
"""Maximum number of branches of a job that are remembered until they are superseded."""


class ByWorth(EvictionOrder):
    """Evicts pages of the job that is least worth waiting for, the end of its context first.

    - Superseded pages are evicted before all others. These are pages of contexts that a job left,
      and that it is no longer expected to return to (see ``on_extended``).
    - A page of several jobs has the rank of the most valuable job, and is counted once.
    - Pages that only finished jobs had are evicted right after superseded pages.
    - Other pages that no job waits for (of running turns, prefixes that several jobs had, contexts
      without a forecast) are worth half a mean page when they are used, and lose half of their
      worth every half minute.
    - If no job ever waits, this is LRU.

    Contexts are ranked at intervals, but not their pages. The pages are found from the end of each
    context when they are to be evicted. Until the next ranking, pages that are used or new are
    evicted after all others. An eviction is therefore O(1), as with LRU. Only pages in use cost
    more, because they are skipped repeatedly.

    Args:
        clock: monotonic seconds.
        most_pages: maximum number of pages in all contexts, and also in all branches that jobs
            left. If contexts have more pages, the job that has been idle for longest is forgotten,
            at the latest when the next context is added. If branches have more pages, the branches
            of the job that left its branches first are forgotten.
    """

    rank_every_s: ClassVar[float] = RANK_EVERY_S
    by_context: ClassVar[bool] = True

    def __init__(self, clock: Callable[[], float], most_pages: int) -> None:
        super().__init__(clock, most_pages)
        self._contexts: OrderedDict[Hashable, Context] = OrderedDict()
        self._tree = ContextTree()
        self._resident: set[PageKey] = set()
        # Every page in CPU memory is in _superseded, _done, _unused, _free or a context. A page in
        # a context may also be in _recent.
        self._superseded: dict[PageKey, None] = {}
        self._done: dict[PageKey, None] = {}  # only finished jobs had it
        self._unused: dict[PageKey, float] = {}  # in no context any more, evicted in reverse order
        self._free: OrderedDict[PageKey, float] = OrderedDict()  # in no context: time of use
        self._recent: dict[PageKey, None] = {}  # in a context, used since the ranking
        self._several: set[PageKey] = set()  # in no context now, formerly in several
        self._left: dict[Context, None] = {}  # contexts that left branches, oldest first
        self._left_pages = 0  # pages in these branches
        self._ranking: list[Context] = []  # in eviction order
        self._rank = 0
        self._passed = 0  # contexts at the head of the ranking without pages left
        self._ranked_at = -math.inf
        self._mean_page_s = 0.0
        self._stay_s = math.inf
        self._valued = 0  # number of contexts valued so far in the current round

    # -- pages ----------------------------------------------------------------------

    def added(self, key: PageKey) -> None:
        self.added_all((key,))

    def added_all(self, keys: Sequence[PageKey]) -> None:
        self._resident.update(keys)
        runs = self._tree.runs
        if not runs.keys().isdisjoint(keys):
            for run in set(map(runs.get, keys)):
                if run is not None:
                    run.end = len(run.keys)
        self.touched_all(keys)
        if len(runs) > self.most_pages and len(self._contexts) > 1:
            self._forget_oldest()

    def removed(self, key: PageKey) -> None:
        self.removed_all((key,))

    def removed_all(self, keys: Sequence[PageKey]) -> None:
        self._resident.difference_update(keys)
        for held in (self._recent, self._unused, self._free, self._done, self._superseded):
            if held:
                deque(map(held.pop, keys, repeat(None)), maxlen=0)
        if self._several:
            runs = self._tree.runs
            self._several.difference_update(filterfalse(runs.__contains__, keys))

    def touched(self, key: PageKey) -> None:
        self.touched_all((key,))

    def touched_all(self, keys: Sequence[PageKey]) -> None:
        now, has_run = self.clock(), self._tree.runs.__contains__
        waited_for = dict.fromkeys(filter(has_run, keys))
        if waited_for and now - self._ranked_at < RANK_EVERY_S:  # a later ranking includes them
            self._recent.update(waited_for)
        if len(waited_for) == len(keys):
            return
        free = self._free
        used = dict.fromkeys(filterfalse(has_run, keys) if waited_for else keys, now)
        if not free.keys().isdisjoint(used):
            deque(map(free.pop, used, repeat(None)), maxlen=0)  # they move to the end
        free.update(used)
        for held in (self._unused, self._done, self._superseded):
            if held:
                deque(map(held.pop, used, repeat(None)), maxlen=0)

    def __iter__(self) -> Iterator[PageKey]:
        return chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[Iterable[PageKey]]:
        """Yield the pages in eviction order, some at a time, because there may be many."""
        now = self.clock()
        yield self._superseded
        yield self._done
        free = chain(reversed(self._unused.items()), self._free.items())
        some = [*islice(free, AT_A_TIME)]
        for place in range(self._passed, len(self._ranking)):
            context = self._ranking[place]
            run, before = context.leaf, self._goes_before(context, now)
            left = False
            while run is not None and run.rank == self._rank and run.owner is context:
                while some and some[0][1] <= before:
                    if max(map(_USED_AT, some)) <= before:
                        part, some = some, [*islice(free, AT_A_TIME)]
                    else:
                        until = next(i for i, (_, used_at) in enumerate(some) if used_at > before)
                        part, some = some[:until], some[until:]
                    yield [key for key, _ in part]
                for pages in self._from_the_end(run):
                    left = True
                    yield pages
                run = run.above
            if not left and place == self._passed:
                self._passed = place + 1
        yield [key for key, _ in some]
        yield (key for key, _ in free)
        for run in self._tree.changed:
            yield filterfalse(self._recent.__contains__, self._pages(run))
        yield filter(self._tree.runs.__contains__, self._recent)

    def _goes_before(self, context: Context, now: float) -> float:
        """Return a time. Pages outside all contexts that have not been used since that time are
        worth no more than the context's pages, and are evicted before them."""
        fresh, (worth, _) = NOBODYS * self._mean_page_s, context.worth
        if fresh <= worth:
            return math.inf
        return now - HALF_S * math.log2(fresh / worth) if worth > 0 else -math.inf

    def _from_the_end(self, run: Run) -> Iterator[list[PageKey]]:
        """Yield the pages of a run that are in CPU memory and unused since the ranking, last first,
        some at a time. If the pages at the run's end are missing or used, they are skipped, and not
        visited again."""
        keys, resident, recent = run.keys, self._resident, self._recent
        stop, size, begun = run.at, AT_A_TIME, False
        while stop > 0:
            start = max(0, stop - size)
            there = [*filter(resident.__contains__, keys[start:stop])]
            part = [*filterfalse(recent.__contains__, there)] if recent else there
            if part:
                begun = True
                part.reverse()
                yield part
            elif not begun:
                run.at = start
                if run.end == stop and not there:
                    run.end = start
            stop, size = start, 4 * AT_A_TIME

    # -- jobs -----------------------------------------------------------------------

    def on_gap_begun(
        self,
        job: Hashable,
        keys: Sequence[PageKey],
        forecast: ReturnForecast,
        since: float,
        page_s: float,
    ) -> None:
        context = self._contexts.get(job)
        if context is None:
            context = self._contexts[job] = Context(job)
        self._contexts.move_to_end(job)
        before = context.since
        fresh, gone = self._tree.put(context, keys, self._several)
        for held in (self._unused, self._free, self._done, self._superseded):
            if held:
                deque(map(held.pop, fresh, repeat(None)), maxlen=0)
        if self._several:
            self._several.difference_update(fresh)
        context.forecast, context.since, context.page_s = forecast, since, page_s
        context.lost_at = None
        self._value(context, self.clock())
        self._long_unused(gone, before)
        self._leave(context, gone)
        # The rest is left to ``added_all``, so that no call handles two long contexts.
        while len(self._tree.runs) > self.most_pages + len(keys) and len(self._contexts) > 1:
            self._forget_oldest()
        while self._left_pages > self.most_pages:
            self._remember(next(iter(self._left)), [])

    def _forget_oldest(self) -> None:
        """Forget the job that has been idle for longest."""
        _, oldest = self._contexts.popitem(last=False)
        self._remember(oldest, [])
        self._long_unused(self._tree.remove(oldest), oldest.since)

    def on_extended(self, job: Hashable, since: float) -> Sequence[PageKey]:
        context = self._contexts.get(job)
        if context is None or not context.left:
            return ()
        over = [branch for branch in context.left if branch.left_at <= since]
        self._remember(context, [branch for branch in context.left if branch.left_at > since])
        runs, free, unused = self._tree.runs, self._free, self._unused
        found = list[PageKey]()
        for branch in over:
            for key in reversed(branch.keys):
                if key not in runs and free.get(key, since) <= since:
                    found.append(key)
                    if key in free or key in unused:
                        self._superseded[key] = None
        for held in (free, unused):
            deque(map(held.pop, found, repeat(None)), maxlen=0)
        return found

    def superseded(self, key: PageKey) -> bool:
        return key in self._superseded

    def on_gap_ended(self, job: Hashable) -> None:
        context = self._contexts.get(job)
        if context is None:
            return
        context.forecast = context.lost_at = None
        self._value(context, self.clock())
        self._tree.change(context)

    def on_job_ended(self, job: Hashable, own: Sequence[PageKey] = ()) -> None:
        context = self._contexts.pop(job, None)
        if context is not None:
            self._remember(context, [])
        for run in self._tree.remove(context) if context is not None else ():
            if run.shared:
                self._just_used(run)
                self._several.update(filter(self._resident.__contains__, run.keys))
            else:
                self._done.update(self._pages(run))
        free, unused, several = self._free, self._unused, self._several
        for key in own:
            if (key in free or key in unused) and key not in several:
                free.pop(key, None)
                unused.pop(key, None)
                self._done[key] = None

    def on_forecast_lost(self, job: Hashable) -> None:
        context = self._contexts.get(job)
        if context is None:
            return
        context.lost_at = self.clock()
        self._value(context, context.lost_at)
        self._tree.change(context)

    def context(self, job: Hashable) -> Sequence[PageKey]:
        context = self._contexts.get(job)
        return self._tree.pages(context) if context is not None else ()

    def private(self, keys: Sequence[PageKey], mine: Callable[[Hashable], bool]) -> list[PageKey]:
        runs, known = self._tree.runs, dict[Run | None, bool]({None: True})
        for run in dict.fromkeys(map(runs.get, keys)):
            if run is not None:
                known[run] = all(mine(context.job) for context in self._tree.owners(run))
        return [key for key in keys if known[runs.get(key)]]

    def stretches(self, keys: Sequence[PageKey]) -> list[list[PageKey]]:
        by_run = dict[Run, set[PageKey]]()
        for key in keys:
            if (run := self._tree.runs.get(key)) is not None:
                by_run.setdefault(run, set()).add(key)
        found = list[list[PageKey]]()
        for run, wanted in by_run.items():
            left = len(wanted)
            for among, stretch in groupby(run.keys, key=wanted.__contains__):
                if among:
                    found.append(list(stretch))
                    left -= len(found[-1])
                if not left:  # runs are long, and the oldest pages come first
                    break
        return found

    def waiting_job(self, key: PageKey) -> Hashable | None:
        run = self._tree.runs.get(key)
        return run.last.job if run is not None and run.last.lost_at is None else None

    def return_chance(self, key: PageKey, within_s: float) -> float:
        """Return the probability that the job which last had the page needs it in the next
        ``within_s`` seconds; 0 if no job waits for the page."""
        run = self._tree.runs.get(key)
        return 0.0 if run is None else run.last.chance(self.clock(), within_s)

    def _just_used(self, run: Run) -> None:
        self._free.update(self._pages(run, self.clock()))

    def _long_unused(self, runs: Sequence[Run], since: float) -> None:
        """Add the pages of removed runs to the eviction order, before all other pages outside
        contexts, last page first.

        Args:
            since: when the job's gap started, which is when the pages were last used, seconds.
        """
        for run in reversed(runs):
            pages = filter(self._resident.__contains__, run.keys)
            self._unused.update(dict.fromkeys(pages, since))

    def _leave(self, context: Context, gone: Sequence[Run]) -> None:
        """Remember the pages that a job no longer has as branches, and forget the pages of earlier
        branches that the job has again."""
        left = list[Branch]()
        for branch in context.left:
            back = sum(1 for _ in takewhile(self._tree.runs.__contains__, branch.keys))
            if back < len(branch.keys):
                left.append(replace(branch, keys=branch.keys[back:]) if back else branch)
        left += (Branch(context.since, run.keys) for run in gone if not run.shared)
        self._remember(context, left[-MOST_BRANCHES:])

    def _remember(self, context: Context, left: list[Branch]) -> None:
        pages = [sum(len(branch.keys) for branch in some) for some in (left, context.left)]
        self._left_pages += pages[0] - pages[1]
        context.left = left
        self._left.pop(context, None)
        if left:
            self._left[context] = None

    def _pages(self, run: Run, value: Any = None) -> dict[PageKey, Any]:
        """Return the pages of a run that are in CPU memory, last first, each with ``value``."""
        return dict.fromkeys(filter(self._resident.__contains__, reversed(run.keys)), value)

    # -- ranking --------------------------------------------------------------------

    def _value(self, context: Context, now: float) -> None:
        """Set the worth of the context's pages: for a return of the job before the pages would be
        evicted, and for a return at any time. If the forecast became invalid, set the decaying
        worth of pages that no job waits for."""
        if context.lost_at is not None:
            halves = min(max(now - context.lost_at, 0.0) / HALF_S, 1000.0)
            context.worth = NOBODYS * self._mean_page_s * 0.5**halves, 0.0
            return
        soon = context.chance(now, self._stay_s) * context.page_s
        context.worth = soon, soon or context.chance(now, math.inf) * context.page_s

    def rank(self, now: float, stay_s: float) -> None:
        self._ranked_at, self._stay_s = now, stay_s
        self._rank += 1
        self._passed = 0
        self._recent = {}
        self._tree.changed.clear()
        contexts = list(self._contexts.values())
        worths = [one.page_s for one in contexts if one.leaf is not None and one.leaf.end]
        self._mean_page_s = sum(worths) / max(1, len(worths))
        begin = self._valued if self._valued < len(contexts) else 0
        self._valued = begin + AT_ONCE
        for context in islice(contexts, begin, self._valued):
            self._value(context, now)
        contexts.sort(key=attrgetter("worth"))
        for context in reversed(contexts):  # the most valuable context owns shared runs
            run = context.leaf
            while run is not None and run.rank != self._rank:
                run.rank, run.owner, run.at = self._rank, context, run.end
                run = run.above
        self._ranking = contexts
