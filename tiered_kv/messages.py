"""Messages between the scheduler half and the workers: orders to workers, reports from workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .keys import PageKey
from .orders import (
    DemoteOrder,
    FailLoad,
    LoadOrder,
    LookupOrder,
    OrderId,
    OrderReport,
    PackOrder,
    PromoteOrder,
    SaveOrder,
    SnapshotOrder,
)
from .tiers import StoreId


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured speeds of one rank's machine.

    Attributes:
        copy: copy rate from CPU memory to VRAM, bytes of pages per second; 0 if the rank has no
            slots in CPU memory.
        flops: rate of a matrix product, floating-point operations per second.
    """

    copy: float
    flops: float


@dataclass(frozen=True, slots=True)
class Proposal:
    """A segment that a rank's store proposes to delete in order to free space.

    Attributes:
        segment: number of the segment.
        keys: live pages of the segment, oldest first.
    """

    segment: int
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class Reclaim:
    """An order to delete a segment.

    Attributes:
        segment: number of the segment.
        survivors: pages of the segment to write once more before the deletion.
    """

    segment: int
    survivors: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class TierOrders:
    """Orders for the workers' I/O threads of one store.

    Attributes:
        fingerprint: digest of the new generation of pages after a cache reset. The contents of the
            store and all earlier orders are then invalid. None without a reset.
        lost: pages that some rank has lost, so that the other ranks can forget them, and
            superseded pages that every rank forgets because space is short.
        released: pages to forget. They must not be written to the store any more.
        reclaims: segments to delete, by rank.
        invalidated: saves whose slots have undefined contents, and must not be flushed.
        expedited: deferred promotions that are due now.
        sent_at: time of sending on the clock of the orders' ``due``, which a worker on another
            machine does not share; None if no order has a ``due``.
    """

    demotes: tuple[DemoteOrder, ...] = ()
    promotes: tuple[PromoteOrder, ...] = ()
    lookups: tuple[LookupOrder, ...] = ()
    fingerprint: bytes | None = None
    lost: tuple[PageKey, ...] = ()
    released: tuple[PageKey, ...] = ()
    reclaims: Mapping[int, Reclaim] = field(default_factory=dict)
    invalidated: tuple[OrderId, ...] = ()
    expedited: tuple[OrderId, ...] = ()
    sent_at: float | None = None


@dataclass(frozen=True, slots=True)
class TierReport:
    """Changes in a rank's store of one tier.

    Attributes:
        gone: pages that are no longer stored.
        proposal: segment that should be deleted next. It is reported again until it is deleted;
            None if no segment should be deleted.
        counters: increments of counters since the last report, by name.
        stored_bytes: size of the store's live pages as stored, bytes.
    """

    gone: tuple[PageKey, ...] = ()
    proposal: Proposal | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    stored_bytes: int = 0

    def followed_by(self, later: TierReport) -> TierReport:
        """Return this report merged with a later report of the same rank."""
        counters = dict(self.counters)
        for name, amount in later.counters.items():
            counters[name] = counters.get(name, 0) + amount
        return TierReport(self.gone + later.gone, later.proposal, counters, later.stored_bytes)


@dataclass(frozen=True, slots=True)
class StoredPages:
    """Pages that a rank's store of one tier has from previous engines.

    Attributes:
        keys: the pages, oldest first.
        bandwidth: expected rate of promotions, bytes of pages per second.
        stored_bytes: size of the pages as stored, bytes.
    """

    keys: tuple[PageKey, ...]
    bandwidth: float
    stored_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AdoptedBundle:
    """Pages that are compressed together in a rank's CPU memory, from a previous engine.

    Attributes:
        slots: slots of the bundle, in order.
        keys: keys of the pages.
        saved: time at which every rank had the page, nanoseconds since 1970; one per key.
    """

    slots: tuple[int, ...]
    keys: tuple[PageKey, ...]
    saved: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdoptedPages:
    """Pages that a rank's CPU memory has from a previous engine.

    Attributes:
        slots: slots of the uncompressed pages.
        keys: keys of these pages, one per slot.
        saved: time at which every rank had the page, nanoseconds since 1970; one per slot.
        bundles: the compressed pages.
    """

    slots: tuple[int, ...] = ()
    keys: tuple[PageKey, ...] = ()
    saved: tuple[int, ...] = ()
    bundles: tuple[AdoptedBundle, ...] = ()


@dataclass(frozen=True, slots=True)
class Settlement:
    """Notifies workers of a finished order that filled slots, after every rank has reported it.

    Attributes:
        bad: indices of the order's pages that must not be found by a later engine.
        at: time of settlement, nanoseconds since 1970.
    """

    order_id: OrderId
    bad: frozenset[int]
    at: int


@dataclass(frozen=True, slots=True)
class Handshake:
    """A worker's first message.

    Attributes:
        speeds: speeds of its machine.
        slots: number of slots of its CPU memory.
        page_bytes: size of a page of each group on this rank, bytes.
        compresses: groups whose pages it can compress.
        stored: contents of its stores.
        adopted: pages that its CPU memory has from a previous engine.
    """

    speeds: Speeds
    slots: int
    page_bytes: tuple[int, ...]
    compresses: tuple[int, ...] = ()
    stored: Mapping[StoreId, StoredPages] = field(default_factory=dict)
    adopted: AdoptedPages = field(default_factory=AdoptedPages)


@dataclass(frozen=True, slots=True)
class Orders:
    """A step's orders, from the scheduler half to all workers.

    Attributes:
        failed_loads: restores that the engine expects but that cannot be ordered.
        seen_failures: number of failed sync restores that the scheduler half has handled, by rank.
            Saves that a worker makes before its failures are handled may contain KV computed from
            bytes that never arrived, so the worker fails them.
        stores: orders for stores.
        snapshots: orders for snapshots of jobs.
        settled: finished orders; empty unless CPU memory outlives the engine.
        reset: True after a cache reset if CPU memory outlives the engine: later engines must not
            find the pages in it.
    """

    saves: tuple[SaveOrder, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    packs: tuple[PackOrder, ...] = ()
    failed_loads: tuple[FailLoad, ...] = ()
    seen_failures: Mapping[int, int] = field(default_factory=dict)
    stores: Mapping[StoreId, TierOrders] = field(default_factory=dict)
    snapshots: tuple[SnapshotOrder, ...] = ()
    settled: tuple[Settlement, ...] = ()
    reset: bool = False


@dataclass(frozen=True, slots=True)
class Reports:
    """Results of orders, from the workers to the scheduler half.

    Attributes:
        orders: reports by order, merged over ranks.
        failures: failed sync restores so far, by rank.
        stores: reports of stores, by store and rank.
    """

    orders: Mapping[OrderId, OrderReport] = field(default_factory=dict)
    failures: Mapping[int, int] = field(default_factory=dict)
    stores: Mapping[StoreId, Mapping[int, TierReport]] = field(default_factory=dict)

    def merge(self, other: Reports) -> Reports:
        """Return these reports merged with the reports of another rank, or with later reports of
        the same rank.

        vLLM delivers two reports of a rank together after a step that failed on another rank
        (``--enable-fault-tolerance``, 0.33).
        """
        orders = dict(self.orders)
        for order_id, report in other.orders.items():
            mine = orders.get(order_id)
            orders[order_id] = mine.merge(report) if mine else report
        failures = dict(self.failures)
        for rank, failed in other.failures.items():
            failures[rank] = max(failed, failures.get(rank, 0))
        stores = {store: dict(ranks) for store, ranks in self.stores.items()}
        for store, ranks in other.stores.items():
            merged = stores.setdefault(store, {})
            for rank, news in ranks.items():
                merged[rank] = merged[rank].followed_by(news) if rank in merged else news
        return Reports(orders, failures, stores)
