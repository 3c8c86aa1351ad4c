"""One rank's side of a tier below CPU memory: its store, the I/O thread of the store, and the final
flush."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tiered_kv.codecs.base import CodedPage
from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.connectors.runtime.lower_tiers.demotion import last_flush
from tiered_kv.keys import Fingerprint, PageKey
from tiered_kv.machine import CORES, usable_cores
from tiered_kv.messages import StoredPages, TierOrders, TierReport
from tiered_kv.orders import OrderId, OrderReport, PackOrder, SaveOrder
from tiered_kv.pages.cold_pages import cold_place
from tiered_kv.storage.base import PageStore, StoreSite, StoreTier
from tiered_kv.storage.bundles import Bundles
from tiered_kv.storage.io_thread import IoThread
from tiered_kv.tiers import Knowledge
from tiered_kv.transfer.host_memory import CpuPool

logger = logging.getLogger(__name__)

FLUSH_S = 3.0
"""Time limit of the final flush, seconds. vLLM gives a worker 5 seconds to stop, then signals the
worker again (which does not interrupt the flush), and kills it 4 seconds later. Python alone needs
2 seconds to exit."""


class TierWorker:
    """The store of one tier and page group, on one rank.

    Args:
        tier: the tier.
        group_at: position of the page group.
        rank: index of this worker.
        fingerprint: fingerprint of the group's pages.
        pool: slots from which pages are read and to which they are written.
        bundles: compressed pages of the group; None if there are none.
        clock: monotonic seconds.

    Raises:
        ConfigError: the store cannot be opened; the message says what to do.
    """

    def __init__(
        self,
        tier: StoreTier,
        group_at: int,
        facts: EngineFacts,
        rank: int,
        fingerprint: Fingerprint,
        pool: CpuPool,
        bundles: Bundles | None,
        clock: Callable[[], float],
    ) -> None:
        group = facts.groups[group_at]
        self.name = tier.spec.tier
        self._cold = bundles
        self._group = group_at
        self._tier = tier
        self._site = StoreSite(
            fingerprint=fingerprint.digest(),
            rank=rank,
            ranks=facts.ranks,
            replica=facts.replica,
            lasting=fingerprint.lasting,
            page_format=group.page_format,
            cores=max(1, usable_cores() // facts.ranks),
        )
        with _on_all_cores():
            store = tier.open(self._site)
            self.io = IoThread(store, pool.slots[:, : group.page_bytes], clock, self._cold_page)
        if bundles is not None:  # so that pages need not be encoded again
            bundles.encode_like(lambda: self.io.store.codec_of_new_pages)
        self.stored = StoredPages(tuple(store.keys()), tier.bandwidth, store.stored_bytes)
        # By slot: pages that may exist nowhere else, with the save that wrote them; newest last.
        self._holds: dict[int, tuple[PageKey, OrderId]] = {}
        # By first slot of a bundle: its pages that may exist nowhere else. An entry may be stale
        # because its slots were reused; its pages then fail their digest check.
        self._bundles: dict[int, Sequence[tuple[PageKey, OrderId]]] = {}
        # Unreported saves up to this order are invalid. Orders are numbered in sequence, and all
        # orders in flight become invalid together.
        self._invalid_to = OrderId(0)
        self._counted = Counter[str]()
        self._counted_of = store
        self._failures = 0
        self._said = TierReport()

    # -- orders in ----------------------------------------------------------------

    def carry_out(self, orders: TierOrders) -> None:
        """Pass a step's orders to the I/O thread."""
        if orders.fingerprint is not None:
            self._site = replace(self._site, fingerprint=orders.fingerprint, lasting=False)
            self._holds.clear()
            self._bundles.clear()
            site = self._site
            self.io.replace_store(lambda: self._tier.open(site))
        if orders.invalidated:
            invalid = frozenset(orders.invalidated)
            self._invalid_to = max(self._invalid_to, *invalid)
            for slot, (_, order_id) in list(self._holds.items()):
                if order_id in invalid:
                    del self._holds[slot]
            for first, pages in self._bundles.items():
                self._bundles[first] = [page for page in pages if page[1] not in invalid]
        if orders.lost:
            self.io.drop(orders.lost)
        if orders.released:
            self.io.drop(orders.released)
            released = frozenset(orders.released)
            self._holds = {at: page for at, page in self._holds.items() if page[0] not in released}
            for first, pages in self._bundles.items():
                self._bundles[first] = [page for page in pages if page[0] not in released]
        if (dying := orders.reclaims.get(self._site.rank)) is not None:
            self.io.reclaim(dying.segment, dying.survivors)
        for lookup in orders.lookups:
            self.io.look_up(lookup)
        # The clocks of different machines start at different times.
        ahead_s = 0.0 if orders.sent_at is None else self.io.now() - orders.sent_at
        for promote in orders.promotes:
            self.io.submit(promote, ahead_s)
        for demote in orders.demotes:
            self.io.submit(demote, ahead_s)
        if orders.expedited:
            self.io.expedite(orders.expedited)

    def saved(self, order: SaveOrder, failed: frozenset[int]) -> None:
        """Record that slots now hold pages that may exist nowhere else."""
        if order.order_id <= self._invalid_to:
            return
        for i, (slot, key) in enumerate(zip(order.slots, order.keys, strict=True)):
            if i not in failed:
                self._holds[slot] = (key, order.order_id)

    def forget_slots(self, slots: tuple[int, ...]) -> None:
        """Record that slots are about to be overwritten."""
        for slot in slots:
            self._holds.pop(slot, None)
            self._bundles.pop(slot, None)

    def packed(self, order: PackOrder) -> None:
        """Record that pages are about to be compressed in their slots."""
        held = [self._holds.pop(slot, None) for slot in order.slots]
        self.forget_slots(order.slots)
        if self._cold is not None and order.group == self._group:
            self._bundles[order.slots[0]] = [page for page in held if page is not None]

    def _cold_page(self, key: PageKey, place: int) -> CodedPage | None:
        return self._cold.copy(cold_place(place), key) if self._cold is not None else None

    # -- reports out ----------------------------------------------------------------

    def take_reports(self) -> tuple[dict[OrderId, OrderReport], TierReport | None]:
        """Return the results of orders, and the changes in the store; None instead of the changes
        if there are none."""
        reports, gone = self.io.take_reports(), self.io.take_gone()
        proposal = self.io.proposal
        if not reports and not gone and proposal == self._said.proposal:
            return reports, None
        store, added = self.io.store, Counter[str]()
        if store is not self._counted_of:  # a reset happened in between
            added += self._count_up(self._counted_of)
            self._counted, self._counted_of = Counter(), store
        added += self._count_up(store)
        failures = self.io.failures
        added["remote_errors" if self._tier.spec.shared else "ssd_errors"] += (
            failures - self._failures
        )
        self._failures = failures
        self._said = TierReport(tuple(gone), proposal, dict(+added), store.stored_bytes)
        return reports, self._said

    def _count_up(self, store: PageStore) -> Counter[str]:
        """Return the numbers of events of a store since the last call."""
        totals = Counter(store.counters())
        added, self._counted = totals - self._counted, totals
        return added

    def close(self) -> None:
        """Flush as many pages as time allows, newest first, and release the store.

        Pages are not flushed to a store that other engines write to, because every page meant for
        such a store was written earlier.
        """
        last: list[tuple[PageKey, int]] = []
        if self._site.lasting and self._tier.spec.knowledge is Knowledge.KNOWN:
            packed = self._bundles.items()
            held = [(key, cold_place(first)) for first, pages in packed for key, _ in pages]
            held += [(key, slot) for slot, (key, _) in self._holds.items()]
            last = last_flush(held, set(self.io.store.keys()))
        written = self.io.close(last, FLUSH_S, discard=not self._site.lasting)
        if last:
            logger.info("flushed %d of %d pages to tier %s", written, len(last), self.name)


@contextmanager
def _on_all_cores() -> Iterator[None]:
    """Let threads that are started in a ``with`` block run on all cores of the process, even if
    this thread is bound to one core."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)
