"""The tiers below CPU memory, taken as one: demotions, and the way of orders and reports to each.

Each page that goes down goes to every tier of this engine's own. Tiers that engines share get what
others may want. For the way up see ``promotions``.

Sources of pages outside VRAM: CPU memory, and the tiers below that answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from tiered_kv.keys import PageKey
from tiered_kv.messages import Handshake, TierOrders, TierReport
from tiered_kv.orders import DemoteOrder, LookupOrder, OrderId, PromoteOrder, SaveOrder
from tiered_kv.pages.order_book import OrderBook, Settled
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


class LowerTiers:
    """Demotions, and the way of orders and reports to each tier. None is a tier too few: without
    tiers nothing goes down.

    Args:
        tiers: the tiers, fastest first.
        most_after: pages that may wait for one save. More can only wait for a copy that hangs, and
            go down once slots run short.
    """

    def __init__(self, tiers: Mapping[StoreId, LowerTier], most_after: int) -> None:
        self._tiers = tiers
        self._own = [tier for tier in tiers.values() if not tier.spec.shared]
        self._shared = [tier for tier in tiers.values() if tier.spec.shared]
        # By save, the pages of each turn that waits for it.
        self._after_save: defaultdict[OrderId, _Contexts] = defaultdict(_Contexts)
        self._share_after: defaultdict[OrderId, _Contexts] = defaultdict(_Contexts)
        self._most_after = most_after

    def each(self) -> Iterator[tuple[StoreId, LowerTier]]:
        """The tiers, fastest first, by their stores."""
        return iter(self._tiers.items())

    @property
    def unsent(self) -> bool:
        """True if there is something to send."""
        return any(tier.unsent for tier in self._tiers.values())

    @property
    def has_more(self) -> bool:
        """True if pages wait to be ordered down once others are there."""
        return any(tier.has_more for tier in self._tiers.values())

    def take(self) -> dict[StoreId, TierOrders]:
        """Hand over the unsent orders, by tier."""
        return {name: tier.take() for name, tier in self._tiers.items() if tier.unsent}

    def on_evicted(self, tell: Callable[[str, Sequence[PageKey]], None]) -> None:
        """Have ``tell`` called with a tier's name and the pages that its stores gave up."""
        for store, tier in self._tiers.items():
            tier.on_evicted = partial(tell, str(store.tier))

    # -- down ---------------------------------------------------------------------

    def demote(self, keys: Sequence[PageKey], after: OrderId | None) -> None:
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

    def unsent_saves_dropped(self, saves: Iterable[OrderId]) -> None:
        """Send down what was to go down behind these saves and is in CPU memory by now. The rest
        goes down once slots run short."""
        for order_id in saves:
            self._saved(order_id)

    def demote_ahead(self) -> None:
        """Keep the pages that would be evicted next in the tiers as well."""
        for tier in self._own:
            tier.demote_ahead()

    def _saved(self, order_id: OrderId) -> None:
        for down in self._after_save.pop(order_id, _NO_CONTEXTS).each:
            self._demote(down)
        for shared in self._share_after.pop(order_id, _NO_CONTEXTS).each:
            self._share(shared)

    def _demote(self, keys: Sequence[PageKey]) -> None:
        for tier in self._own:
            tier.demote(keys)

    def _share(self, keys: Sequence[PageKey]) -> None:
        for tier in self._shared:
            tier.demote(keys)

    # -- reports ------------------------------------------------------------------

    def on_saved(self, done: Settled[SaveOrder]) -> None:
        """Send pages down that waited for a save."""
        self._saved(done.order.order_id)

    def on_demoted(self, done: Settled[DemoteOrder]) -> None:
        """Take in pages that went down to a tier."""
        self._tiers[done.order.store].on_demoted(done)

    def on_promoted(self, done: Settled[PromoteOrder]) -> None:
        """Take in pages that came up from a tier."""
        self._tiers[done.order.store].on_promoted(done)

    def on_looked_up(self, done: Settled[LookupOrder]) -> None:
        """Take in a tier's answer to a question."""
        self._tiers[done.order.store].on_looked_up(done)

    def on_reports(self, reports: Mapping[StoreId, Mapping[int, TierReport]]) -> None:
        """Take in the news of the ranks' stores."""
        for name, ranks in reports.items():
            if name in self._tiers:
                self._tiers[name].on_reports(ranks)

    def invalidate(self, saves: Sequence[OrderId]) -> None:
        """Have the slots of these saves not flushed: their blocks were given up under way."""
        for tier in self._tiers.values():
            tier.invalidate(saves)
        self._after_save.clear()  # of saves that were never sent, as well
        self._share_after.clear()

    def on_handshake(self, ranks: Mapping[int, Handshake]) -> None:
        """Take in the content of the stores at start."""
        for name, tier in self._tiers.items():
            found = {rank: one.stored[name] for rank, one in ranks.items() if name in one.stored}
            tier.on_handshake(found)

    def reset(self, fingerprint: Callable[[int], bytes]) -> None:
        """Begin a new generation of pages. Before the order book forgets them.

        Args:
            fingerprint: gives the digest of a group's pages.
        """
        self._after_save.clear()
        self._share_after.clear()
        for tier in self._tiers.values():
            tier.reset(fingerprint(tier.store.group))

    def close(self) -> None:
        """Log the totals of each tier."""
        for tier in self._tiers.values():
            tier.close()

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
        if not self._own:
            return {}
        tiers = self._own
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


class PageSources:
    """Finds the tiers that hold a page.

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
