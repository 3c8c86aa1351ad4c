"""Compression of CPU memory: pages turn cold where they are, once free slots are few."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tiered_kv.keys import PageKey
from tiered_kv.messages import Handshake
from tiered_kv.metrics import Counters
from tiered_kv.orders import PackOrder
from tiered_kv.pages.flights import Settled
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.policies.cache.compression import (
    Packing,
    bundle_pages,
    bundles_of,
    burst,
    packing,
)


class Compression:
    """Orders pages to be compressed. Owns the unsent orders.

    Args:
        group_of: gives the group of a page; None if that is not known.
        ranks: number of ranks.
    """

    def __init__(
        self,
        book: OrderBook,
        group_of: Callable[[PageKey], int | None],
        counters: Counters,
        ranks: int,
    ) -> None:
        self._book = book
        self._ranks = ranks
        self._index = book.index
        self._group_of = group_of
        self._counters = counters
        self._groups: Sequence[int] = ()
        self._together: Sequence[int] = ()  # pages, by group
        self._under_way = 0
        self._taken = self._burst = 0
        self.unsent: list[PackOrder] = []

    def on_handshake(self, ranks: Mapping[int, Handshake]) -> None:
        """Take in which groups' pages all ranks can compress."""
        able = [set(one.compresses) for one in ranks.values()]
        self._groups = sorted(set.intersection(*able)) if able else ()
        self._together = [bundle_pages(nbytes) for nbytes in self._book.page_bytes]

    def take(self) -> tuple[PackOrder, ...]:
        """Hand over the orders not yet sent."""
        orders, self.unsent = tuple(self.unsent), []
        return orders

    def pack_ahead(self) -> None:
        """Compress the pages that have waited for longest, if free slots are few."""
        if not self._groups:
            return
        index, taken = self._index, self._index.taken
        self._burst, self._taken = burst(taken - self._taken, self._burst), taken
        wanted = packing(
            num_slots=index.num_slots,
            free=index.free_slots,
            burst=self._burst,
            raw=index.raw_pages,
            under_way=self._under_way,
        )
        if wanted.bundles:
            self._pack(wanted)

    def _pack(self, wanted: Packing) -> None:
        left = wanted.bundles
        for group, keys in self._by_group(self._index.oldest_raw(wanted.among)):
            begin = 0
            for size in bundles_of(len(keys), self._together[group]):
                if not left:
                    return
                self.unsent.append(self._book.plan_pack(keys[begin : begin + size], group))
                self._under_way += 1
                begin, left = begin + size, left - 1

    def _by_group(
        self, stretches: Sequence[list[PageKey]]
    ) -> Iterator[tuple[int, Sequence[PageKey]]]:
        """Stretches of pages of one group, for the groups that can be compressed."""
        for keys in stretches:
            if len(self._together) == 1:
                yield self._groups[0], keys
                continue
            by_group = dict[int | None, list[PageKey]]()
            for key in keys:
                by_group.setdefault(self._group_of(key), []).append(key)
            yield from ((group, by_group[group]) for group in self._groups if group in by_group)

    def on_settled(self, done: Settled) -> None:
        """Take in that a bundle is packed, or lost."""
        self._under_way -= 1
        assert isinstance(done.order, PackOrder)
        self._counters.add("compression_seconds", done.seconds)
        failed = len(done.failed)
        if not done.abandoned:
            good = len(done.keys) - failed
            page_bytes = self._book.page_bytes[done.order.group] * self._ranks
            self._counters.add("pages_compressed", good)
            self._counters.add("bytes_compressed", good * page_bytes)
            self._counters.add("compression_failures", failed)
