"""A worker on a simulated machine: orders take the time of the machine's links.

It reports what the real worker half (``tiered_kv.connectors.runtime.worker``) does: a result for
every order, requests whose async restore has finished, blocks that a restore did not fill, and
segments that a full SSD store would delete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tiered_kv.connectors.runtime.observe.virtual_worker import (
    CopyLines,
    Line,
    VirtualStore,
    VirtualWorker,
)
from tiered_kv.connectors.vllm.envelopes import TieredWorkerMetadata
from tiered_kv.messages import Orders
from tiered_kv.orders import LoadOrder, OrderId, RestoreMode
from tiered_kv.tiers import SSD, StoreId

from .machines import Machine

COPY_LATENCY_S, SSD_LATENCY_S = 20e-6, 100e-6
"""Seconds that each transfer takes in addition to its bytes."""


class SimWorker:
    """All ranks of a machine together.

    Args:
        page_bytes: size of a page of each group over all ranks.
        ssd_bytes: capacity of the SSD tier, divided equally among the groups; 0 without one.

    Attributes:
        up, down: links from and to CPU memory.
        ssd_read, ssd_write: links from and to SSD.
    """

    def __init__(self, machine: Machine, page_bytes: Sequence[int], ssd_bytes: int) -> None:
        self.up = Line(machine.link, COPY_LATENCY_S)
        self.down = Line(machine.link, COPY_LATENCY_S)
        self.ssd_read = Line(machine.ssd_read, SSD_LATENCY_S)
        self.ssd_write = Line(machine.ssd_write, SSD_LATENCY_S)
        lines = CopyLines(
            save=self.down,
            load=self.up,
            encode=Line(machine.encode, COPY_LATENCY_S),
            decode=Line(machine.decode, COPY_LATENCY_S),
        )
        share = ssd_bytes // len(page_bytes)
        stores = {
            StoreId(SSD, group): VirtualStore(share // nbytes, self.ssd_read, self.ssd_write)
            for group, nbytes in enumerate(page_bytes)
            if share
        }
        self._worker = VirtualWorker(page_bytes, lines, stores)
        self._one_group = len(page_bytes) == 1
        self._loads: dict[OrderId, LoadOrder] = {}  # under way
        self._parts = Counter[str]()  # loads under way of each request
        self._more: set[str] = set()  # requests of which further loads follow
        self._arrived: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()

    @property
    def next_event(self) -> float:
        """Time at which the next order finishes or is due; infinite without orders."""
        return self._worker.next_event

    def restore(self, orders: Orders, now: float) -> float:
        """Start a step's orders except its saves. Returns the time at which the step may compute:
        after its sync restores."""
        ready = self._worker.carry_out(replace(orders, saves=()), now)
        for load in orders.loads:
            self._loads[load.order_id] = load
            self._parts[load.request_id] += 1
            (self._more.add if load.more else self._more.discard)(load.request_id)
        for refused in orders.failed_loads:
            self._more.discard(refused.request_id)
            if self._one_group:
                self._bad_blocks.update(refused.blocks)
            else:  # vLLM cannot distinguish the blocks of several groups
                self._failed.add(refused.request_id)
            if not self._parts[refused.request_id]:
                del self._parts[refused.request_id]
                self._arrived.add(refused.request_id)
        return ready

    def save(self, orders: Orders, now: float) -> None:
        """Start a step's saves, after its forward pass."""
        self._worker.carry_out(Orders(saves=orders.saves), now)

    def report(self, now: float) -> Any:
        """Return vLLM's ``KVConnectorOutput`` of what finished since the last call."""
        from vllm.v1.outputs import KVConnectorOutput

        arrived, self._arrived = self._arrived, set()
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        reports = self._worker.take_reports(now)
        done = reports.orders if reports is not None else ()
        for load in filter(None, (self._loads.pop(order_id, None) for order_id in done)):
            self._parts[load.request_id] -= 1
            if not self._parts[load.request_id]:  # one for each group
                del self._parts[load.request_id]
                if load.mode is RestoreMode.ASYNC and load.request_id not in self._more:
                    arrived.add(load.request_id)
        failed = arrived & self._failed
        self._failed -= failed
        return KVConnectorOutput(
            finished_recving=arrived,
            failed_recving=failed,
            invalid_block_ids=bad_blocks,
            kv_connector_worker_meta=None if reports is None else TieredWorkerMetadata(reports),
        )
