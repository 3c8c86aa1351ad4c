"""The tiers below CPU memory: operations that concern all of them.

A demoted page goes to each of this engine's own tiers. Tiers shared between engines receive the
pages that other engines may need. A page is promoted from the fastest tier that has it: see
``promotions``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Any, NamedTuple

from tiered_kv.keys import PageKey
from tiered_kv.orders import OrderId
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.pages.tier_index import TierIndex
from tiered_kv.tiers import StoreId, TierId

from .lower_tier import LowerTier


class TierTotals(NamedTuple):
    """Pages of a tier, in all groups.

    Attributes:
        pages: number of pages known to be in the tier.
        stored_bytes: bytes that these pages occupy, over all ranks.
        capacity_bytes: size of the tier, over all ranks; None without a known limit.
        promoting, demoting: numbers of pages being promoted from the tier and demoted to it.
    """

    pages: int
    stored_bytes: int
    capacity_bytes: int | None
    promoting: int
    demoting: int


@dataclass(slots=True)
class _Contexts:
    """Contexts that wait for a save: the page keys of ``each`` context, and the total number of
    ``pages``."""

    each: list[Sequence[PageKey]] = field(default_factory=list)
    pages: int = 0


_NO_CONTEXTS = _Contexts()


class Tiers(Mapping[StoreId, LowerTier]):
    """The tiers below CPU memory by their stores, fastest first.

    Args:
        tiers: the tiers, fastest first.
        most_after: maximum number of pages that may wait for one save. More pages can only
            accumulate while a copy hangs; they are demoted once slots run short.

    Attributes:
        own: tiers that other engines do not use.
    """

    def __init__(
        self, tiers: Mapping[StoreId, LowerTier], book: OrderBook, most_after: int
    ) -> None:
        self._tiers = tiers
        self._book = book
        self.own = [tier for tier in tiers.values() if not tier.spec.shared]
        self._shared = [tier for tier in tiers.values() if tier.spec.shared]
        # by save: the pages of each turn that waits for it
        self._after_save: defaultdict[OrderId, _Contexts] = defaultdict(_Contexts)
        self._share_after: defaultdict[OrderId, _Contexts] = defaultdict(_Contexts)
        self._most_after = most_after

    def __getitem__(self, store: StoreId) -> LowerTier:
        return self._tiers[store]

    def __iter__(self) -> Iterator[StoreId]:
        return iter(self._tiers)

    def __len__(self) -> int:
        return len(self._tiers)

    # -- demotions ----------------------------------------------------------------

    def send_down(self, keys: Sequence[PageKey], after: OrderId | None) -> None:
        """Demote a turn's pages, once their save ``after`` has settled; now if ``after`` is
        None."""
        if after is not None:
            self._add(self._after_save[after], keys)
        else:
            self._demote(keys)

    def share(self, keys: Sequence[PageKey], after: OrderId | None) -> None:
        """Store pages for other engines, once their save ``after`` has settled; now if ``after`` is
        None.

        Args:
            keys: a prefix of the pages of a context.
        """
        if not self._shared:
            return
        if after is not None:
            self._add(self._share_after[after], keys)
        else:
            self._share(keys)

    def supersede(self, keys: Sequence[PageKey]) -> None:
        """Evict these pages first in each of this engine's own tiers, unless they are used."""
        for tier in self.own:
            tier.supersede(keys)

    def _add(self, waiting: _Contexts, keys: Sequence[PageKey]) -> None:
        if keys and waiting.pages < self._most_after:
            waiting.each.append(keys)
            waiting.pages += len(keys)

    def save_over(self, order_id: OrderId) -> None:
        """Demote, or store for other engines, the pages that waited for a save that has settled or
        was dropped, if they are in CPU memory."""
        for down in self._after_save.pop(order_id, _NO_CONTEXTS).each:
            self._demote(down)
        for shared in self._share_after.pop(order_id, _NO_CONTEXTS).each:
            self._share(shared)

    def unsaved(self, keys: Sequence[PageKey]) -> Sequence[PageKey]:
        """Return the keys of pages that are in none of this engine's own tiers, in the same order;
        empty while one of these tiers accepts no pages."""
        for tier in self.own:
            keys = [*tier.pages.index.unwritten(keys)] if tier.takes else ()
        return keys

    def _demote(self, keys: Sequence[PageKey]) -> None:
        for tier in self.own:
            tier.demote(keys)

    def _share(self, keys: Sequence[PageKey]) -> None:
        for tier in self._shared:
            tier.demote(keys)

    def drop_saves(self, saves: Sequence[OrderId]) -> None:
        """Exclude the slots of these saves from flushes, because their blocks were released during
        the copy. Also forgets all pages that wait for a save, whether the save was sent or not."""
        for tier in self._tiers.values():
            tier.invalidate(saves)
        self._after_save.clear()
        self._share_after.clear()

    # -- promotions ---------------------------------------------------------------

    def by_tier(self, keys: Iterable[PageKey]) -> dict[StoreId, list[PageKey]]:
        """Group pages by the fastest responding tier that has them, fastest first. Pages that no
        such tier has are left out."""
        split, left = dict[StoreId, list[PageKey]](), list(keys)
        for store, tier in self._tiers.items():
            if left and tier.answers and (found := tier.pages.index.present(left)):
                split[store] = found
                left = [*filterfalse(set(found).__contains__, left)]
        return split

    def somewhere(self) -> Somewhere:
        """Return a test of whether a page is in CPU memory, moving there, or in a responding
        tier."""
        coming = self._book.promoting
        indices = tuple(tier.pages.index for tier in self._tiers.values() if tier.answers)
        silent = {store for store, tier in self._tiers.items() if not tier.answers}

        def on_its_way(key: PageKey) -> bool:
            return key in coming and self._book.store_of(coming[key]) not in silent

        return Somewhere(self._book.index, indices, on_its_way)

    def give_up(self, orders: Iterable[OrderId]) -> None:
        """Record that no turn waits for these orders any longer. Raises KeyError unless all of them
        are in flight."""
        for order in orders:
            self._tiers[self._book.store_of(order)].order_given_up(order)

    # -- contents ---------------------------------------------------------------------

    def totals(self) -> dict[TierId, TierTotals]:
        """Return the number and the size of the pages of each tier, fastest tier first."""
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
        """Return the gauges of this engine's own tiers together; empty without own tiers."""
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
class Somewhere:
    """Test whether pages are available in any tier; valid until the next change.

    Attributes:
        index: pages in CPU memory.
        indices: pages of the tiers that respond.
        on_its_way: returns True if a page is moving to CPU memory.
    """

    index: PageIndex
    indices: Sequence[TierIndex]
    on_its_way: Callable[[PageKey], bool]

    def __call__(self, key: PageKey) -> bool:
        """Return True if the page is available."""
        in_tier = self.index.readable(key) or any(key in pages for pages in self.indices)
        return in_tier or self.on_its_way(key)

    def run(self, keys: Sequence[PageKey], start: int, stop: int) -> int:
        """Return the end of the run of available pages that starts at ``start``, at most
        ``stop``."""
        at, most = start, 16  # of most prompts, no page is available
        while part := keys[at : min(at + most, stop)]:
            left: Collection[PageKey] = self.index.unreadable(part)
            for pages in self.indices:
                left = pages.absent(left) if left else left
            for key in filterfalse(self.on_its_way, left):
                return at + part.index(key)
            at, most = at + most, 2048
        return max(start, stop)


@dataclass(frozen=True, slots=True)
class Below:
    """Pages that may be promoted in pieces, in addition to those in CPU memory.

    Attributes:
        somewhere: tests whether pages are available in any tier.
        until: deadline for all of these pages, seconds.
    """

    somewhere: Somewhere
    until: float
