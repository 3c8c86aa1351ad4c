"""A worker on a simulated machine. The machine's links determine how long orders take.

The worker makes the same reports as the real worker half (``tiered_kv.connectors.runtime.worker``):
a result for every order, requests whose async restore has finished, blocks that a restore did not
fill, and segments that a full SSD store would delete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.outputs import KVConnectorOutput

from tiered_kv.connectors.runtime.observe.virtual_worker import (
    CopyLines,
    Line,
    VirtualStore,
    VirtualWorker,
)
from tiered_kv.connectors.vllm.envelopes import TieredWorkerMetadata
from tiered_kv.messages import Orders
from tiered_kv.orders import OrderId, RestoreMode
from tiered_kv.tiers import SSD, StoreId

from .machines import Machine

COPY_LATENCY_S, SSD_LATENCY_S = 20e-6, 100e-6
"""Fixed latency of each transfer, seconds."""


class SimWorker:
    """The worker of all ranks of a machine.

    Args:
        page_bytes: page size of each group, over all ranks.
        ssd_bytes: capacity of the SSD tier, divided equally among the groups; 0 for no SSD tier.

    Attributes:
        lines: links from (``up``) and to (``down``) CPU memory, and to the SSD.
    """

    def __init__(self, machine: Machine, page_bytes: Sequence[int], ssd_bytes: int) -> None:
        up, down, encode, decode = (
            Line(speed, COPY_LATENCY_S)
            for speed in (machine.link, machine.link, machine.encode, machine.decode)
        )
        read, write = (Line(one, SSD_LATENCY_S) for one in (machine.ssd_read, machine.ssd_write))
        self.lines = {"up": up, "down": down, "ssd_read": read, "ssd_write": write}
        share = ssd_bytes // len(page_bytes)
        stores = {
            StoreId(SSD, group): VirtualStore(share // nbytes, read, write)
            for group, nbytes in enumerate(page_bytes)
            if share
        }
        copies = CopyLines(save=down, load=up, encode=encode, decode=decode)
        self._worker = VirtualWorker(page_bytes, copies, stores)
        self._one_group = len(page_bytes) == 1
        self._loading: dict[OrderId, str] = {}  # request of each async restore in flight
        self._more: set[str] = set()  # requests whose restore needs further orders
        self._finished: set[str] = set()  # requests with a part that has arrived or failed
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()

    @property
    def next_event(self) -> float:
        """Time at which the next order finishes or is due; infinite without orders."""
        return self._worker.next_event

    def restore(self, orders: Orders, now: float) -> float:
        """Start a step's orders, except its saves. Returns the time at which the step can start to
        compute, because its sync restores have finished.
        """
        for load in orders.loads:
            if load.mode is RestoreMode.ASYNC:
                self._loading[load.order_id] = load.request_id
            (self._more.add if load.more else self._more.discard)(load.request_id)
        for refused in orders.failed_loads:
            self._more.discard(refused.request_id)
            self._finished.add(refused.request_id)
            if self._one_group:
                self._bad_blocks.update(refused.blocks)
            else:  # vLLM cannot distinguish blocks of several groups
                self._failed.add(refused.request_id)
        return self._worker.carry_out(replace(orders, saves=()), now)

    def save(self, orders: Orders, now: float) -> None:
        """Start the saves of a step, after its forward pass."""
        self._worker.carry_out(Orders(saves=orders.saves), now)

    def report(self, now: float) -> Any:
        """Return vLLM's ``KVConnectorOutput`` for the work that finished since the last call."""
        reports = self._worker.take_reports(now)
        done = self._loading.keys() & (reports.orders if reports is not None else ())
        self._finished.update(self._loading.pop(order_id) for order_id in done)
        arrived = (
            self._finished - self._more - set(self._loading.values())
        )  # a request has one load per group
        failed = arrived & self._failed
        self._failed -= failed
        self._finished = set()
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        return KVConnectorOutput(
            finished_recving=arrived,
            failed_recving=failed,
            invalid_block_ids=bad_blocks,
            kv_connector_worker_meta=None if reports is None else TieredWorkerMetadata(reports),
        )
