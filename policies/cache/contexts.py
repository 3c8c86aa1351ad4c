"""Pages of waiting jobs as a tree that stores each common prefix of contexts once.

A page's key covers all tokens up to the end of the page. So contexts that share a page share all
pages before it, and no page after the point where they diverge.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat, takewhile

from tiered_kv.keys import PageKey
from tiered_kv.pages.base import ReturnForecast


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive pages that belong to the same contexts.

    Attributes:
        keys: keys of the pages, first to last.
        above: the preceding run; None at the start of a context.
        last: of the contexts that contain the run, the context whose pages were set most recently.
        shared: True if several contexts had the run's pages at some time.
        below: runs that follow this run.
        ends: contexts that end with the run's last page.
        end: number of the run's pages up to the last page that may be in CPU memory.
        rank: number of the ranking in which ``owner`` and ``at`` were set; None if the run is new
            or changed since the last ranking.
        owner: context with which the run is evicted in that ranking.
        at: number of the run's pages that are still to be evicted.
    """

    keys: list[PageKey]
    above: Run | None
    last: Context
    shared: bool = False
    below: dict[Run, None] = field(default_factory=dict)
    ends: dict[Context, None] = field(default_factory=dict)
    end: int = 0
    rank: int | None = None
    owner: Context | None = None
    at: int = 0


@dataclass(frozen=True, slots=True)
class Branch:
    """Consecutive pages that a context no longer has, and that no other context ever had.

    Attributes:
        left_at: start of the first gap in which the context lacked the pages, seconds.
        keys: the pages, first to last.
    """

    left_at: float
    keys: Sequence[PageKey]


@dataclass(slots=True, eq=False)
class Context:
    """The context of a waiting job.

    Attributes:
        job: the job.
        forecast: distribution of its gap; None while the job's next turn is queued or running.
        since: when the gap started, seconds.
        lost_at: when the forecast became invalid, seconds; None if it is valid. From then on, no
            job counts as waiting for the pages.
        page_s: prefill time that one of its pages saves, seconds.
        leaf: run with which the context ends; None if it has no pages.
        left: branches that the job left and that are not superseded yet, oldest first.
        worth: time that one of its pages is expected to save, seconds: first by a return before the
            page would be evicted, then by a return at any time. Set by ``ByWorth``.
    """

    job: Hashable = None
    forecast: ReturnForecast | None = None
    since: float = 0.0
    lost_at: float | None = None
    page_s: float = 0.0
    leaf: Run | None = None
    left: list[Branch] = field(default_factory=list)
    worth: tuple[float, float] = (0.0, 0.0)

    def chance(self, now: float, within_s: float) -> float:
        """Return the probability that the job needs its pages in the next ``within_s`` seconds: 1
        while its next turn is queued or running, 0 if the forecast became invalid."""
        if self.lost_at is not None:
            return 0.0
        if self.forecast is None:
            return 1.0
        waited = now - self.since
        gone = self.forecast.within(waited)
        return 0.0 if gone >= 1 else (self.forecast.within(waited + within_s) - gone) / (1 - gone)


class ContextTree:
    """Tree of the runs of pages of all contexts. A change costs O(1) per page added or removed.

    Attributes:
        runs: run of each page.
        changed: runs that are new or whose pages changed since this dict was cleared.
    """

    def __init__(self) -> None:
        self.runs: dict[PageKey, Run] = {}
        self.changed: dict[Run, None] = {}

    def put(
        self, context: Context, keys: Sequence[PageKey], known: set[PageKey]
    ) -> tuple[list[PageKey], list[Run]]:
        """Set the pages of a context, replacing its previous ones.

        Args:
            keys: the pages, first to last.
            known: pages outside the tree that several contexts had.

        Returns:
            The pages that are new to the tree, and the runs that were removed from the tree, the
            last run of the context first.
        """
        self.change(context)
        leaf, fresh = self._add(context, keys, known)
        old, context.leaf = context.leaf, leaf  # the leaf may have been split meanwhile
        if leaf is not None:
            leaf.ends[context] = None
        self.change(context)
        return fresh, self._release(context, old) if old is not None else []

    def remove(self, context: Context) -> list[Run]:
        """Remove the context, and the runs that no other context has. Returns these runs, the last
        run of the context first."""
        self.change(context)
        leaf, context.leaf = context.leaf, None
        return self._release(context, leaf) if leaf is not None else []

    def pages(self, context: Context) -> list[PageKey]:
        """Return the pages of the context, first to last."""
        return list(chain.from_iterable(run.keys for run in reversed(_path(context.leaf))))

    def owners(self, run: Run) -> Iterator[Context]:
        """Yield the contexts that have the pages of a run."""
        left = [run]
        while left:
            one = left.pop()
            yield from one.ends
            left += one.below

    def change(self, context: Context) -> None:
        """Mark all runs of the context as changed."""
        for run in _path(context.leaf):
            self._changed(run)

    # -- internals ----------------------------------------------------------------------

    def _add(
        self, context: Context, keys: Sequence[PageKey], known: set[PageKey]
    ) -> tuple[Run | None, list[PageKey]]:
        at, above = 0, None
        while at < len(keys):
            run = self.runs.get(keys[at])
            if run is None or run.above is not above or run.keys[0] != keys[at]:
                break
            same = _common(run.keys, keys[at : at + len(run.keys)])
            if same < len(run.keys):
                self._split(run, same)
            if run.last is not context:
                run.last, run.shared = context, True
            at, above = at + same, run
        fresh = list(keys[at:])
        if not self.runs.keys().isdisjoint(fresh):  # some keys are on another path of the tree
            fresh = list(takewhile(lambda key: key not in self.runs, fresh))
        shared = _leading(fresh, known) if known else 0
        for part in (fresh[:shared], fresh[shared:]):
            if part:
                above = self._grow(above, part, context)
                above.shared = part[0] in known
        return above, fresh

    def _grow(self, above: Run | None, keys: list[PageKey], context: Context) -> Run:
        run = Run(keys, above, context, end=len(keys))
        self.runs.update(zip(keys, repeat(run)))
        if above is not None:
            above.below[run] = None
        self.changed[run] = None
        return run

    def _split(self, run: Run, at: int) -> None:
        """Split the run at ``at``. The pages from there on become a run below it."""
        lower = Run(run.keys[at:], run, run.last, run.shared, run.below, run.ends)
        lower.end = max(0, run.end - at)
        for one in lower.below:
            one.above = lower
        for context in lower.ends:
            context.leaf = lower
        del run.keys[at:]
        run.end = min(run.end, at)
        run.below, run.ends = {lower: None}, {}
        self.runs.update(zip(lower.keys, repeat(lower)))
        self._changed(run)
        self.changed[lower] = None

    def _join(self, run: Run) -> None:
        """Merge the run with the only run below it."""
        lower = next(iter(run.below))
        if lower.end:
            run.end = len(run.keys) + lower.end
        run.keys += lower.keys
        run.below, run.ends, run.last = lower.below, lower.ends, lower.last
        for one in run.below:
            one.above = run
        for context in run.ends:
            context.leaf = run
        self.runs.update(zip(lower.keys, repeat(run)))
        self._changed(run)
        self._forget(lower)

    def _release(self, context: Context, leaf: Run) -> list[Run]:
        """Update the tree after the context has moved away from ``leaf``. Removes and returns the
        runs that no context has any more, and merges a remaining run with its only successor."""
        if context.leaf is not leaf:
            leaf.ends.pop(context, None)
        run: Run | None = leaf
        gone: list[Run] = []
        while run is not None and not (run.ends or run.below):
            deque(map(self.runs.pop, run.keys), maxlen=0)
            gone.append(run)
            if run.above is not None:
                del run.above.below[run]
            self._forget(run)
            run = run.above
        still = set(_path(context.leaf))
        for one in _path(run):
            if one in still:
                break
            if one.last is context:
                one.last = next(reversed(one.ends)) if one.ends else next(reversed(one.below)).last
        below = run.below if run is not None and not run.ends else ()
        if run is not None and len(below) == 1 and next(iter(below)).shared == run.shared:
            self._join(run)
        return gone

    def _changed(self, run: Run) -> None:
        run.rank = None
        self.changed[run] = None

    def _forget(self, run: Run) -> None:
        run.rank = None
        self.changed.pop(run, None)


def _path(run: Run | None) -> list[Run]:
    """Return the run and all runs above it, last to first."""
    path = []
    while run is not None:
        path.append(run)
        run = run.above
    return path


def _common(one: Sequence[PageKey], other: Sequence[PageKey]) -> int:
    """Return the length of the common prefix of two lists of pages."""
    most = min(len(one), len(other))
    for at in range(0, most, 256):
        part, other_part = one[at : min(at + 256, most)], other[at : min(at + 256, most)]
        if part != other_part:
            pairs = enumerate(zip(part, other_part, strict=True))
            if (same := next((i for i, (a, b) in pairs if a != b), None)) is not None:
                return at + same
    return most


def _leading(keys: Sequence[PageKey], known: set[PageKey]) -> int:
    """Return the length of the longest prefix of ``keys`` whose keys are all in ``known``."""
    if known.issuperset(keys):
        return len(keys)
    return next(i for i, key in enumerate(keys) if key not in known)
