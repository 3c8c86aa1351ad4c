"""What crosses between the halves each step, in vLLM's envelopes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tiered_kv.keys import PageKey
from tiered_kv.orders import (
    DemoteOrder,
    LoadOrder,
    OrderId,
    OrderReport,
    PromoteOrder,
    SaveOrder,
)
from tiered_kv.storage.store.store import Proposal

from .profile import Speeds


@dataclass(frozen=True, slots=True)
class SsdOrders:
    """What the workers' I/O threads shall do.

    Attributes:
        fingerprint: of the new generation of pages, after a cache reset: what is on disk
            is invalid, and so is every order sent before.
        lost: pages that some rank has lost: the others can forget them.
        reclaims: by rank, a segment that shall die and the pages that survive it.
        distrusted: saves whose slots may hold anything: not to be flushed.
        hurried: promotions that are due at once, whatever they said.
        sent_at: on the clock of the orders' ``due``, which a worker on another machine does not
            share; None if no order has one.
    """

    demotes: tuple[DemoteOrder, ...] = ()
    promotes: tuple[PromoteOrder, ...] = ()
    fingerprint: bytes | None = None
    lost: tuple[PageKey, ...] = ()
    reclaims: Mapping[int, Proposal] = field(default_factory=dict)
    distrusted: tuple[OrderId, ...] = ()
    hurried: tuple[OrderId, ...] = ()
    sent_at: float | None = None


@dataclass(frozen=True, slots=True)
class SsdReport:
    """What a rank says of its segment store.

    Attributes:
        gone: pages that are no longer there.
        proposal: a segment that should die, until it does.
        counters: what was added to counters of these names since the last report.
        stored_bytes: bytes its live pages take on disk.
    """

    gone: tuple[PageKey, ...] = ()
    proposal: Proposal | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    stored_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StoredPages:
    """What a rank has on SSD from before.

    Attributes:
        keys: of its pages, oldest first.
        bandwidth: bytes of pages a second that it expects to promote.
        stored_bytes: bytes they take on disk.
    """

    keys: tuple[PageKey, ...]
    bandwidth: float
    stored_bytes: int = 0


@dataclass(frozen=True)
class TieredHandshake(KVConnectorHandshakeMetadata):
    """A worker's word at start.

    Attributes:
        speeds: of its machine.
        stored: what its segment store has; None without one.
    """

    speeds: Speeds
    stored: StoredPages | None


@dataclass(frozen=True)
class TieredMetadata(KVConnectorMetadata):
    """Scheduler half → worker half: this step's orders.

    Attributes:
        seen_failures: for each rank, how many failed sync restores the scheduler knows
            of. Saves that a worker makes before its failures are seen may hold KV
            computed from bytes that never arrived, so the worker fails them.
    """

    saves: tuple[SaveOrder, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    seen_failures: Mapping[int, int] = field(default_factory=dict)
    ssd: SsdOrders | None = None


@dataclass(frozen=True)
class TieredWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker half → scheduler half: what became of orders, merged over ranks."""

    reports: Mapping[OrderId, OrderReport]
    failures: Mapping[int, int] = field(default_factory=dict)
    """Failed sync restores so far, by rank."""
    ssd: Mapping[int, SsdReport] = field(default_factory=dict)
    """By rank."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> TieredWorkerMetadata:
        assert isinstance(other, TieredWorkerMetadata)
        reports = dict(self.reports)
        for order_id, report in other.reports.items():
            mine = reports.get(order_id)
            reports[order_id] = mine.merge(report) if mine else report
        return TieredWorkerMetadata(
            reports, {**self.failures, **other.failures}, {**self.ssd, **other.ssd}
        )
