"""What crosses between the halves each step, in vLLM's envelopes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tiered_kv.orders import LoadOrder, OrderId, OrderReport, SaveOrder


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


@dataclass(frozen=True)
class TieredWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker half → scheduler half: what became of orders, merged over ranks."""

    reports: Mapping[OrderId, OrderReport]
    failures: Mapping[int, int] = field(default_factory=dict)
    """Failed sync restores so far, by rank."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> TieredWorkerMetadata:
        assert isinstance(other, TieredWorkerMetadata)
        reports = dict(self.reports)
        for order_id, report in other.reports.items():
            mine = reports.get(order_id)
            reports[order_id] = mine.merge(report) if mine else report
        return TieredWorkerMetadata(reports, {**self.failures, **other.failures})
