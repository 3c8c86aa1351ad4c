"""Which page makes room when the CPU pool is full, and which is worth rewriting on SSD.

Pages are of one size, so value per byte is value per page: how likely the job comes back for
it before it would have been evicted anyway, times the seconds that having it saves.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from tiered_kv.index import EvictionOrder
from tiered_kv.keys import PageKey
from tiered_kv.policies.forecast import Forecast

RANK_EVERY_S = 1.0
"""Contexts are ranked anew when pages are wanted, but not more often."""


class LeastRecentlyUsed(EvictionOrder):
    """Evicts the page that was used the longest ago."""

    def __init__(self) -> None:
        self._order: OrderedDict[PageKey, None] = OrderedDict()

    def added(self, key: PageKey) -> None:
        self._order[key] = None

    def added_all(self, keys: Sequence[PageKey]) -> None:
        self._order.update(dict.fromkeys(keys))

    def removed(self, key: PageKey) -> None:
        del self._order[key]

    def touched(self, key: PageKey) -> None:
        self._order.move_to_end(key)

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __iter__(self) -> Iterator[PageKey]:
        return iter(self._order)


@dataclass(slots=True, eq=False)
class _Context:
    """The pages of a waiting job, first to last.

    Attributes:
        forecast: of its gap, which began at ``since``; None once the job is over.
        page_s: seconds that having one of its pages saves.
        resident: how many of the pages are in CPU memory.
    """

    keys: list[PageKey] = field(default_factory=list)
    forecast: Forecast | None = None
    since: float = 0.0
    page_s: float = 0.0
    resident: int = 0

    def chance(self, now: float, within_s: float) -> float:
        """That the job comes back in the next ``within_s`` seconds."""
        if self.forecast is None:
            return 0.0
        waited = now - self.since
        gone = self.forecast.within(waited)
        return 0.0 if gone >= 1 else (self.forecast.within(waited + within_s) - gone) / (1 - gone)


class ByWorth(EvictionOrder):
    """Evicts pages of the job that is least worth waiting for, the end of its context first.

    A page that several waiting jobs have goes with the one most worth waiting for, and is
    counted once. Pages of no waiting job (of running turns, and prefixes that several jobs had
    before) go last, the least recently used first; if nothing is ever claimed this is LRU.

    Args:
        clock: seconds.
        stay_s: how long a page stays in CPU memory at present before it is evicted.
    """

    def __init__(self, clock: Callable[[], float], stay_s: Callable[[], float]) -> None:
        self._clock = clock
        self._stay_s = stay_s
        self._recent = LeastRecentlyUsed()
        self._contexts: dict[Hashable, _Context] = {}
        self._claims: dict[PageKey, list[_Context]] = {}
        self._shared: set[PageKey] = set()
        self._ranking: list[_Context] = []
        self._ranked_at = -RANK_EVERY_S

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
            self._ranking.append(context)
        old = len(context.keys)
        if context.keys != keys[:old]:
            self._give_up(context)
            old = 0
        for key in keys[old:]:
            claims = self._claims.setdefault(key, [])
            if claims:
                self._shared.add(key)
            claims.append(context)
            context.resident += key in self._recent
        context.keys += keys[old:]
        context.forecast, context.since, context.page_s = forecast, since, page_s

    def over(self, job: Hashable) -> None:
        """Nobody waits for the job any more: what only it had goes first from now on."""
        context = self._contexts.pop(job, None)
        if context is None:
            return
        context.forecast = None
        shared = [key for key in context.keys if key in self._shared]  # a third may have them
        context.keys = [key for key in context.keys if key not in self._shared]
        for key in shared:
            self._unclaim(key, context)
        self._forget_if_empty(context)
        self._ranked_at = -RANK_EVERY_S

    def chance(self, key: PageKey, within_s: float) -> float:
        """That a job comes back for the page in the next ``within_s`` seconds; 0 if unknown."""
        now = self._clock()
        return max((c.chance(now, within_s) for c in self._claims.get(key, ())), default=0.0)

    def _give_up(self, context: _Context) -> None:
        for key in context.keys:
            self._unclaim(key, context)
        context.keys = []

    def _unclaim(self, key: PageKey, context: _Context) -> None:
        claims = self._claims[key]
        claims.remove(context)
        context.resident -= key in self._recent
        if not claims:
            del self._claims[key]
            if key not in self._recent:
                self._shared.discard(key)

    def _forget_if_empty(self, context: _Context) -> None:
        if context.forecast is None and not context.resident:
            self._give_up(context)

    # -- EvictionOrder ------------------------------------------------------------

    def added(self, key: PageKey) -> None:
        self.added_all((key,))

    def added_all(self, keys: Sequence[PageKey]) -> None:
        self._recent.added_all(keys)
        if not self._claims.keys().isdisjoint(keys):
            for key in keys:
                for context in self._claims.get(key, ()):
                    context.resident += 1

    def removed(self, key: PageKey) -> None:
        self._recent.removed(key)
        claims = self._claims.get(key)
        if claims is None:
            self._shared.discard(key)
            return
        for context in list(claims):
            context.resident -= 1
            self._forget_if_empty(context)

    def touched(self, key: PageKey) -> None:
        self._recent.touched(key)

    def __iter__(self) -> Iterator[PageKey]:
        self._rank()
        recent, claimed = self._recent, self._claims
        seen: dict[PageKey, int] = {}
        for context in self._ranking:
            for key in reversed(context.keys):
                claims = len(claimed[key])
                if claims > 1:
                    seen[key] = seen.get(key, 0) + 1
                if key in recent and (claims == 1 or seen[key] == claims):
                    yield key
        yield from (key for key in recent if key not in claimed)

    def _rank(self) -> None:
        now = self._clock()
        if now - self._ranked_at < RANK_EVERY_S:
            return
        self._ranked_at = now
        stay_s = self._stay_s()

        def worth(context: _Context) -> tuple[float, float]:
            """What is not wanted soon may be wanted later, and what nobody waits for never."""
            soon = context.chance(now, stay_s) * context.page_s
            return soon, soon or context.chance(now, math.inf) * context.page_s

        over = [context for context in self._ranking if context.keys and context.forecast is None]
        self._ranking = sorted([*over, *self._contexts.values()], key=worth)
