"""The messages between the scheduler half and the workers: orders out, reports in."""

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
        copy: bytes of pages a second from CPU memory to VRAM; 0 if there are no slots.
        flops: floating-point operations a second of a matrix product.
    """

    copy: float
    flops: float


@dataclass(frozen=True, slots=True)
class Proposal:
    """A segment that a rank's store would delete next, to make room.

    Attributes:
        keys: its live pages, oldest first.
    """

    segment: int
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class Reclaim:
    """An order to delete a segment.

    Attributes:
        survivors: pages of it to write once more first.
    """

    segment: int
    survivors: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class TierOrders:
    """Orders for the workers' I/O threads of one store.

    Attributes:
        fingerprint: digest of the new generation of pages, after a cache reset: what the store
            has is invalid, and so is every order sent before. None without a reset.
        lost: pages that some rank has lost: the others can forget them.
        reclaims: segments to delete, by rank.
        invalidated: saves whose slots may hold anything: not to be flushed.
        expedited: promotions that are due at once, whenever they were due before.
        sent_at: time on the clock of the orders' ``due``, which a worker on another machine does
            not share; None if no order has one.
    """

    demotes: tuple[DemoteOrder, ...] = ()
    promotes: tuple[PromoteOrder, ...] = ()
    lookups: tuple[LookupOrder, ...] = ()
    fingerprint: bytes | None = None
    lost: tuple[PageKey, ...] = ()
    reclaims: Mapping[int, Reclaim] = field(default_factory=dict)
    invalidated: tuple[OrderId, ...] = ()
    expedited: tuple[OrderId, ...] = ()
    sent_at: float | None = None


@dataclass(frozen=True, slots=True)
class TierReport:
    """News of a rank's store of one tier.

    Attributes:
        gone: pages that are no longer there.
        proposal: segment to delete next, repeated until it is deleted; None if there is none.
        counters: increments of counters since the last report, by name.
        stored_bytes: size of its live pages as stored, bytes.
    """

    gone: tuple[PageKey, ...] = ()
    proposal: Proposal | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    stored_bytes: int = 0

    def followed_by(self, later: TierReport) -> TierReport:
        """Return both of a rank's reports as one."""
        counters = dict(self.counters)
        for name, amount in later.counters.items():
            counters[name] = counters.get(name, 0) + amount
        return TierReport(self.gone + later.gone, later.proposal, counters, later.stored_bytes)


@dataclass(frozen=True, slots=True)
class StoredPages:
    """Pages that a rank's store of one tier has from before.

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
    """Pages that are compressed together in a rank's CPU memory, from an engine before.

    Attributes:
        slots: slots that they fill together, in their order.
        keys: their keys.
        saved: times at which every rank had them, nanoseconds since 1970, as many.
    """

    slots: tuple[int, ...]
    keys: tuple[PageKey, ...]
    saved: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdoptedPages:
    """Pages that a rank's CPU memory has from an engine before.

    Attributes:
        slots: slots of those that have one each.
        keys: their keys, as many.
        saved: times at which every rank had them, nanoseconds since 1970, as many.
        bundles: the others.
    """

    slots: tuple[int, ...] = ()
    keys: tuple[PageKey, ...] = ()
    saved: tuple[int, ...] = ()
    bundles: tuple[AdoptedBundle, ...] = ()


@dataclass(frozen=True, slots=True)
class Settlement:
    """Word to the workers about an order that filled slots, which every rank has reported.

    Attributes:
        bad: indices of its pages that must not be found by a later engine.
        at: time of it, nanoseconds since 1970.
    """

    order_id: OrderId
    bad: frozenset[int]
    at: int


@dataclass(frozen=True, slots=True)
class Handshake:
    """A worker's first message.

    Attributes:
        speeds: speeds of its machine.
        slots: pages that its share of CPU memory holds.
        page_bytes: size of a page of each group there, bytes.
        compresses: groups whose pages it can compress.
        stored: content of its stores.
        adopted: pages that its CPU memory has from before.
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
        failed_loads: restores that the engine counts on and that cannot be ordered.
        seen_failures: failed sync restores of each rank that the scheduler knows of. Saves
            that a worker makes before its failures are seen may hold KV computed from bytes
            that never arrived, so the worker fails them.
        stores: orders for stores.
        snapshots: orders for snapshots of jobs.
        settled: orders that are over, where CPU memory outlives the engine.
        reset: True after a cache reset there: what CPU memory holds must not be found again.
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
        stores: news of stores, by store and rank.
    """

    orders: Mapping[OrderId, OrderReport] = field(default_factory=dict)
    failures: Mapping[int, int] = field(default_factory=dict)
    stores: Mapping[StoreId, Mapping[int, TierReport]] = field(default_factory=dict)

    def merge(self, other: Reports) -> Reports:
        """Merge with the reports of another rank, or with later reports of the same rank.

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
