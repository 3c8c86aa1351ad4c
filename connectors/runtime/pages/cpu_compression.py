"""Compression of CPU memory: when free slots are scarce, pages are compressed in place, in bundles
of several pages.

The pages that have been in CPU memory longest are compressed first. The only cost is decoding time,
so pages are compressed before any page is evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.keys import PageKey
from tiered_kv.messages import Handshake
from tiered_kv.orders import Outbox, PackOrder
from tiered_kv.pages.order_book import OrderBook, Settled

LEAST_PAGES, MOST_PAGES = 4, 32
BUNDLE_BYTES = 64 << 20
"""Minimum and maximum number of pages in a bundle, and its maximum size, bytes. On average, half of
a bundle's last slot is wasted. The waste is a smaller fraction of a larger bundle, but a bundle is
evicted as a whole."""
FREE_SHARE = 8
"""One slot in ``FREE_SHARE`` is kept free for saves, as far as compression can free slots. Fewer
slots are kept free if recent bursts took fewer."""
FORGETS = 0.98
"""Fraction of the burst size that is retained from one poll to the next."""
MOST_PACKING = 8
"""Maximum number of bundles being compressed. Their pages cannot be read in the meantime."""
LOOKED_AT = 4 * MOST_PACKING * MOST_PAGES
"""Maximum number of pages examined when choosing bundles."""
STAGING_SHARE, MOST_STAGING = 16, 32
"""One slot in ``STAGING_SHARE``, up to ``MOST_STAGING`` slots, is reserved for decoded pages. The
pages in half of these slots are copied while the other half is filled."""
LEAST_RATIO = 1.3
"""Minimum compression ratio. A bundle of 32 pages of fp16 or fp8 saves 5 or 6 slots, but takes as
long to decode as a bundle of bf16 pages, which saves 10 slots."""


def staging_slots(num_slots: int) -> int:
    """Return the number of slots reserved for pages decoded on their way to VRAM; 0 if there are
    too few slots to compress any pages.

    Args:
        num_slots: total number of slots.
    """
    return min(MOST_STAGING, num_slots // STAGING_SHARE // 2 * 2)


def bundle_pages(page_bytes: int) -> int:
    """Return the number of pages in a bundle.

    Args:
        page_bytes: size of a page on one rank, bytes.
    """
    return max(LEAST_PAGES, min(MOST_PAGES, BUNDLE_BYTES // page_bytes))


def bundles_of(pages: int, most: int) -> list[int]:
    """Return the sizes of the bundles that a run of pages is divided into, in order. The remaining
    pages are not compressed until more pages follow.

    Args:
        pages: length of the run.
        most: number of pages in a bundle (``bundle_pages``). The last bundle may have half as many.
    """
    whole, rest = divmod(pages, most)
    return [most] * whole + [rest] * (rest >= max(LEAST_PAGES, most // 2))


def bundles_to_pack(*, num_slots: int, free: int, burst: int, under_way: int) -> int:
    """Return the maximum number of bundles to compress now.

    Args:
        num_slots: total number of slots.
        free: number of free slots.
        burst: number of slots recently taken in one burst.
        under_way: number of bundles being compressed.
    """
    wanted = max(1, min(burst, num_slots // FREE_SHARE))
    return max(0, MOST_PACKING - under_way) if free < wanted else 0


def burst(taken: int, before: int) -> int:
    """Return the number of slots recently taken in one burst.

    Args:
        taken: slots taken since the last poll.
        before: result of the last poll.
    """
    return max(taken, int(FORGETS * before))


def worth_compressing(page_bytes: int, stored_bytes: int) -> bool:
    """Return True if pages of a format are worth compressing.

    Args:
        page_bytes: size of a page.
        stored_bytes: size of the encoded page.
    """
    return page_bytes >= LEAST_RATIO * stored_bytes


class Compression:
    """Orders the compression of pages. Owns the unsent orders.

    Args:
        group_of: returns the group of a page; None if unknown.
    """

    def __init__(
        self,
        engine: EngineState,
        book: OrderBook,
        group_of: Callable[[PageKey], int | None],
    ) -> None:
        self._book = book
        self._ranks = engine.facts.ranks
        self._index = book.index
        self._group_of = group_of
        self._counters = engine.counters
        self._groups: Sequence[int] = ()
        self._together: Sequence[int] = ()  # pages per bundle, by group
        self._under_way = 0
        self._taken = self._burst = 0
        self.unsent = Outbox[PackOrder]()

    def on_handshake(self, ranks: Mapping[int, Handshake]) -> None:
        """Record the groups whose pages all ranks can compress."""
        able = [set(one.compresses) for one in ranks.values()]
        self._groups = sorted(set.intersection(*able)) if able else ()
        self._together = [bundle_pages(nbytes) for nbytes in self._book.page_bytes]

    def pack_ahead(self) -> None:
        """Compress the pages that have been in CPU memory longest, if free slots are scarce."""
        if not self._groups:
            return
        index, taken = self._index, self._index.taken
        self._burst, self._taken = burst(taken - self._taken, self._burst), taken
        left = bundles_to_pack(
            num_slots=index.num_slots,
            free=index.free_slots,
            burst=self._burst,
            under_way=self._under_way,
        )
        for group, keys in self._by_group(index.oldest_raw(LOOKED_AT) if left else ()):
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
        """Yield the pages of each list in ``stretches`` by group, as (group, pages), for the groups
        that can be compressed."""
        for keys in stretches:
            if len(self._together) == 1:
                yield self._groups[0], keys
                continue
            by_group = dict[int | None, list[PageKey]]()
            for key in keys:
                by_group.setdefault(self._group_of(key), []).append(key)
            yield from ((group, by_group[group]) for group in self._groups if group in by_group)

    def on_settled(self, done: Settled[PackOrder]) -> None:
        """Count a bundle that was compressed, or whose compression failed."""
        self._under_way -= 1
        self._counters.add("compression_seconds", done.seconds)
        failed = len(done.failed)
        if not done.abandoned:
            good = len(done.keys) - failed
            page_bytes = self._book.page_bytes[done.order.group] * self._ranks
            self._counters.add("pages_compressed", good)
            self._counters.add("bytes_compressed", good * page_bytes)
            self._counters.add("compression_failures", failed)
