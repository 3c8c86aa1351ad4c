"""The tiers below CPU memory: what concerns all of them.

Each page that goes down goes to every tier of this engine's own. Tiers that engines share get what
others may want. A page comes up from the fastest tier that has it: see ``promotions``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tiered_kv.keys import PageKey
from tiered_kv.orders import OrderId
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.tiers import StoreId, TierId

from .lower_tier import LowerTier


class TierTotals(NamedTuple):
    """A tier's pages of all groups.

    Attributes:
        pages: pages that it has, as far as is known.
        stored_bytes: bytes that they take there, over all ranks.
        capacity_bytes: size of the tier, all ranks together; None if it has no known end.
        promoting, demoting: pages on their way up, and down.
    """

    pages: int
    stored_bytes: int
    capacity_bytes: int | None
    promoting: int
    demoting: int


@dataclass(slots=True)
class _Contexts:
    """The pages of each context that waits for a save; ``pages`` is their number."""

    each: list[Sequence[PageKey]] = field(default_factory=list)
    pages: int = 0


_NO_CONTEXTS = _Contexts()


class Tiers(Mapping[StoreId, LowerTier]):
    """The tiers below CPU memory by their stores, fastest first. The one owner of this mapping.

    Args:
        tiers: the tiers, fastest first.
        most_after: pages that may wait for one save. More can only wait for a copy that hangs, and
            go down once slots run short.

    Attributes:
        own: the tiers that other engines do not use.
    """

    def __init__(
        self, tiers: Mapping[StoreId, LowerTier], book: OrderBook, most_after: int
    ) -> None:
        self._tiers = tiers
        self._book = book
        self.own = [tier for tier in tiers.values() if not tier.spec.shared]
        self._shared = [tier for tier in tiers.values() if tier.spec.shared]
        # By save, the pages of each turn that waits for it.
        self._after_save: defaultdict[OrderId, _Contexts] = defaultdict(_Contexts)
        self._share_after: defaultdict[OrderId, _Contexts] = defaultdict(_Contexts)
        self._most_after = most_after

    def __getitem__(self, store: StoreId) -> LowerTier:
        return self._tiers[store]

    def __iter__(self) -> Iterator[StoreId]:
        return iter(self._tiers)

    def __len__(self) -> int:
        return len(self._tiers)

    # -- down ---------------------------------------------------------------------

    def send_down(self, keys: Sequence[PageKey], after: OrderId | None) -> None:
        """Order a turn's pages down, once their save ``after`` has settled."""
        if after is not None:
            self._add(self._after_save[after], keys)
        else:
            self._demote(keys)

    def share(self, keys: Sequence[PageKey], after: OrderId | None) -> None:
        """Leave pages for other engines, once their save ``after`` has settled.

        Args:
            keys: pages of a context from its beginning, or the first of them.
        """
        if not self._shared:
            return
        if after is not None:
            self._add(self._share_after[after], keys)
        else:
            self._share(keys)

    def _add(self, waiting: _Contexts, keys: Sequence[PageKey]) -> None:
        if keys and waiting.pages < self._most_after:
            waiting.each.append(keys)
            waiting.pages += len(keys)

    def save_over(self, order_id: OrderId) -> None:
        """Send down what waited for a save, which is settled or was dropped, and is in CPU memory
        by now. The rest goes down once slots run short."""
        for down in self._after_save.pop(order_id, _NO_CONTEXTS).each:
            self._demote(down)
        for shared in self._share_after.pop(order_id, _NO_CONTEXTS).each:
            self._share(shared)

    def _demote(self, keys: Sequence[PageKey]) -> None:
        for tier in self.own:
            tier.demote(keys)

    def _share(self, keys: Sequence[PageKey]) -> None:
        for tier in self._shared:
            tier.demote(keys)

    def drop_saves(self, saves: Sequence[OrderId]) -> None:
        """Have the slots of these saves not flushed: their blocks were given up under way. Nothing
        waits for a save any more, sent or not."""
        for tier in self._tiers.values():
            tier.invalidate(saves)
        self._after_save.clear()
        self._share_after.clear()

    # -- up -----------------------------------------------------------------------

    def by_tier(self, keys: Iterable[PageKey]) -> dict[StoreId, list[PageKey]]:
        """Pages by the fastest tier that has them and answers, fastest first."""
        usable = [(store, tier) for store, tier in self._tiers.items() if tier.answers]
        split: dict[StoreId, list[PageKey]] = {store: [] for store, _ in usable}
        for key in keys:
            for store, tier in usable:
                if tier.has(key):
                    split[store].append(key)
                    break
        return {store: found for store, found in split.items() if found}

    def somewhere(self) -> Callable[[PageKey], bool]:
        """A test whether a page is in CPU memory, on its way there, or in a tier that answers."""
        readable, coming = self._book.index.readable, self._book.promoting
        indices = [tier.pages.index for tier in self._tiers.values() if tier.answers]
        silent = {store for store, tier in self._tiers.items() if not tier.answers}

        def on_its_way(key: PageKey) -> bool:
            return key in coming and self._book.store_of(coming[key]) not in silent

        def somewhere(key: PageKey) -> bool:
            return readable(key) or any(key in pages for pages in indices) or on_its_way(key)

        return somewhere

    def give_up(self, orders: Iterable[OrderId]) -> None:
        """Note that no turn waits for these orders any longer."""
        for order in orders:
            self._tiers[self._book.store_of(order)].order_given_up(order)

    # -- what is there ----------------------------------------------------------------

    def totals(self) -> dict[TierId, TierTotals]:
        """Pages of each tier, fastest first."""
        found: dict[TierId, TierTotals] = {}
        for store, tier in self._tiers.items():
            before = found.get(store.tier, TierTotals(0, 0, None, 0, 0))
            found[store.tier] = TierTotals(
                before.pages + len(tier.pages.index),
                before.stored_bytes + sum(tier.stored_bytes.values()),
                tier.spec.capacity_bytes,
                before.promoting + tier.pages.promoting,
                before.demoting + len(tier.pages.demoting),
            )
        return found

    def gauges(self) -> dict[str, Any]:
        """Gauges of this engine's own tiers together; none without any."""
        if not self.own:
            return {}
        tiers = self.own
        specs = [tier.spec for tier in tiers]  # one tier's groups share its space
        return {
            "ssd_pages": sum(len(tier.pages.index) for tier in tiers),
            "ssd_bytes": sum(sum(tier.stored_bytes.values()) for tier in tiers),
            "ssd_bytes_whole": sum(len(tier.pages.index) * tier.page_bytes for tier in tiers),
            "ssd_bytes_most": sum({one.tier: one.capacity_bytes or 0 for one in specs}.values()),
        }


@dataclass(frozen=True, slots=True)
class Below:
    """Pages that may come up in pieces, beside those in CPU memory.

    Attributes:
        somewhere: tells whether a page can be had at all.
        until: time by which all of them must have come, seconds.
    """

    somewhere: Callable[[PageKey], bool]
    until: float
