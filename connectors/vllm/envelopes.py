"""Subclasses of vLLM's message types, which carry tiered-kv's messages between the scheduler and
the workers."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tiered_kv.messages import Handshake, Orders, Reports


@dataclass(frozen=True)
class TieredHandshake(KVConnectorHandshakeMetadata):
    """The first message from a worker to the scheduler: its speeds, and the pages that its stores
    contain."""

    handshake: Handshake


@dataclass(frozen=True)
class TieredMetadata(KVConnectorMetadata):
    """A step's orders, from the scheduler to the workers."""

    orders: Orders


@dataclass(frozen=True)
class TieredWorkerMetadata(KVConnectorWorkerMetadata):
    """Results of orders, from a worker to the scheduler. vLLM merges the results of all ranks."""

    reports: Reports

    def aggregate(self, other: KVConnectorWorkerMetadata) -> TieredWorkerMetadata:
        assert isinstance(other, TieredWorkerMetadata)
        return TieredWorkerMetadata(self.reports.merge(other.reports))
