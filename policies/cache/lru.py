"""The simplest eviction rule: evicts the least recently used page first."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence

from tiered_kv.keys import PageKey
from tiered_kv.pages.base import EvictionOrder


class LeastRecentlyUsed(EvictionOrder):
    """Evicts the least recently used page."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, most_pages: int = 1 << 20
    ) -> None:
        super().__init__(clock, most_pages)
        self._order: OrderedDict[PageKey, None] = OrderedDict()

    def added(self, key: PageKey) -> None:
        self._order[key] = None

    def added_all(self, keys: Sequence[PageKey]) -> None:
        self._order.update(dict.fromkeys(keys))

    def removed(self, key: PageKey) -> None:
        del self._order[key]

    def removed_all(self, keys: Sequence[PageKey]) -> None:
        deque(map(self._order.pop, keys), maxlen=0)

    def touched(self, key: PageKey) -> None:
        self._order.move_to_end(key)

    def touched_all(self, keys: Sequence[PageKey]) -> None:
        deque(map(self._order.move_to_end, keys), maxlen=0)

    def __iter__(self) -> Iterator[PageKey]:
        return iter(self._order)
