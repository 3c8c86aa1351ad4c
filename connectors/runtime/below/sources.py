"""Sources of pages outside VRAM: CPU memory, and the tiers below that answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tiered_kv.keys import PageKey
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.tiers import StoreId

from .lower_tier import LowerTier


@dataclass(frozen=True, slots=True)
class Below:
    """Pages that may come up in pieces, beside those in CPU memory.

    Attributes:
        somewhere: tells whether a page can be had at all.
        until: time by which all of them must have come, seconds.
    """

    somewhere: Callable[[PageKey], bool]
    until: float


class PageSources:
    """Tells where a page can be had.

    Args:
        tiers: the tiers below CPU memory, fastest first.
    """

    def __init__(self, tiers: Mapping[StoreId, LowerTier], book: OrderBook) -> None:
        self._tiers = tiers
        self._book = book
        self._index = book.index

    def by_tier(self, keys: Iterable[PageKey]) -> dict[StoreId, list[PageKey]]:
        """Pages by the fastest tier that has them and answers, fastest first."""
        usable = [(name, tier) for name, tier in self._tiers.items() if tier.answers]
        split: dict[StoreId, list[PageKey]] = {name: [] for name, _ in usable}
        for key in keys:
            for name, tier in usable:
                if tier.has(key):
                    split[name].append(key)
                    break
        return {name: found for name, found in split.items() if found}

    def somewhere(self) -> Callable[[PageKey], bool]:
        """A test whether a page is in CPU memory, on its way there, or in a tier that answers."""
        readable, coming = self._index.readable, self._book.promoting
        indices = [tier.pages.index for tier in self._tiers.values() if tier.answers]
        silent = {name for name, tier in self._tiers.items() if not tier.answers}

        def on_its_way(key: PageKey) -> bool:
            return key in coming and self._book.store_of(coming[key]) not in silent

        def somewhere(key: PageKey) -> bool:
            return readable(key) or any(key in pages for pages in indices) or on_its_way(key)

        return somewhere
