"""The worker half's stand-in: carries the scheduler half's orders out, over links.

What it answers is what the real one does (``connectors.vllm.worker_half``): a report for every
order, requests whose restore has arrived, segments of the SSD store that should die. Nothing is
copied; only time passes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

from tiered_kv.keys import PageKey
from tiered_kv.messages import Orders, Proposal, Reclaim, Reports, TierOrders, TierReport
from tiered_kv.orders import (
    DemoteOrder,
    LoadOrder,
    Order,
    OrderId,
    OrderReport,
    PromoteOrder,
    RestoreMode,
    SaveOrder,
)
from tiered_kv.page_group import CONTEXT
from tiered_kv.tiers import SSD, StoreId

from .links import Link
from .machines import Machine

STORE = StoreId(SSD, CONTEXT)
SEGMENTS = 32
"""Number of segments of an SSD store."""


class SsdStore:
    """Pages in segments, of which the oldest dies when there is no room for a new one."""

    def __init__(self, pages: int) -> None:
        self._per_segment = max(1, pages // SEGMENTS)
        self._most = max(2, pages // self._per_segment)
        self._segments: dict[int, dict[PageKey, None]] = {0: {}}
        self._where: dict[PageKey, int] = {}
        self._newest = 0

    def __len__(self) -> int:
        return len(self._where)

    def put(self, key: PageKey) -> None:
        """Store a page; one that is there already stays where it is."""
        if key in self._where:
            return
        if len(self._segments[self._newest]) >= self._per_segment:
            self._newest += 1
            self._segments[self._newest] = {}
        self._segments[self._newest][key] = None
        self._where[key] = self._newest

    def has(self, key: PageKey) -> bool:
        return key in self._where

    @property
    def proposal(self) -> Proposal | None:
        """The segment that should die, once the store is full."""
        if len(self._segments) <= self._most:
            return None
        oldest = next(iter(self._segments))
        return Proposal(oldest, tuple(self._segments[oldest]))

    def reclaim(self, dying: Reclaim) -> tuple[list[PageKey], int]:
        """Let a segment die but for those named; returns who is gone, and how many were
        written again."""
        pages = self._segments.pop(dying.segment, None)
        if pages is None:
            return [], 0
        for key in pages:
            del self._where[key]
        kept = [key for key in dying.survivors if key in pages]
        for key in kept:
            self.put(key)
        return [key for key in pages if key not in self._where], len(kept)


@dataclass(frozen=True, slots=True)
class Heard:
    """The worker's report at the end of a step.

    Attributes:
        arrived: requests whose async restore is over.
        reports: for the scheduler half; None if nothing happened.
    """

    arrived: set[str]
    reports: Reports | None


class SimWorker:
    """All ranks as one.

    Args:
        page_bytes: of a page over all ranks.
        ssd_pages: capacity of the SSD tier; 0 is none.
    """

    def __init__(self, machine: Machine, page_bytes: int, ssd_pages: int) -> None:
        self.up = Link(machine.link)
        self.down = Link(machine.link)
        self.ssd_read = Link(machine.ssd_read, latency_s=100e-6)
        self.ssd_write = Link(machine.ssd_write, latency_s=100e-6)
        self.store = SsdStore(ssd_pages) if ssd_pages else None
        self._page_bytes = page_bytes
        self._later: list[tuple[float, int, Order]] = []  # not due yet
        self._flying: list[tuple[float, int, Order, float]] = []  # over at; took
        self._tie = 0
        self._gone: list[PageKey] = []
        self._said: Proposal | None = None
        self._written = self._read = 0

    @property
    def next_event(self) -> float:
        """Time at which something will be over or due; infinite if nothing is under way."""
        flying = self._flying[0][0] if self._flying else float("inf")
        return min(flying, self._later[0][0] if self._later else float("inf"))

    # -- a step ---------------------------------------------------------------------

    def restore(self, orders: Orders, now: float) -> float:
        """Begin restores; returns when the step may compute: after its sync ones."""
        if (ssd := orders.stores.get(STORE)) is not None:
            self._carry_out(ssd, now)
        ready = now
        for load in orders.loads:
            end = self.up.send(len(load.blocks) * self._page_bytes, now)
            self._fly(load, end, end - now)
            if load.mode is RestoreMode.SYNC:
                ready = max(ready, end)
        return ready

    def save(self, orders: Orders, now: float) -> None:
        """Begin saves, behind the step's computing."""
        for order in orders.saves:
            begin = now
            end = self.down.send(len(order.blocks) * self._page_bytes, now)
            self._fly(order, end, end - begin)

    def hear(self, now: float) -> Heard:
        """Report what is over by now."""
        while self._later and self._later[0][0] <= now:
            due, _, order = heapq.heappop(self._later)
            self._start(order, max(due, 0.0))
        reports: dict[OrderId, OrderReport] = {}
        arrived: set[str] = set()
        while self._flying and self._flying[0][0] <= now:
            _, _, order, took = heapq.heappop(self._flying)
            reports[order.order_id] = self._land(order, took)
            if isinstance(order, LoadOrder) and order.mode is RestoreMode.ASYNC:
                arrived.add(order.request_id)
        said = self._say()
        if not reports and said is None:
            return Heard(arrived, None)
        return Heard(arrived, Reports(reports, {}, {STORE: {0: said}} if said else {}))

    # -- orders -----------------------------------------------------------------------

    def _fly(self, order: Order, end: float, took: float) -> None:
        self._tie += 1
        heapq.heappush(self._flying, (end, self._tie, order, took))

    def _carry_out(self, orders: TierOrders, now: float) -> None:
        hurried = set(orders.expedited)
        if hurried:
            early = [one for one in self._later if one[2].order_id in hurried]
            self._later = [one for one in self._later if one[2].order_id not in hurried]
            heapq.heapify(self._later)
            for _, _, hurry in early:
                self._start(hurry, now)
        wanted: tuple[PromoteOrder | DemoteOrder, ...] = (*orders.promotes, *orders.demotes)
        for order in wanted:
            if order.due > now:
                self._tie += 1
                heapq.heappush(self._later, (order.due, self._tie, order))
            else:
                self._start(order, now)
        dying = orders.reclaims.get(0)
        if dying is not None and self.store is not None:
            gone, again = self.store.reclaim(dying)
            self._gone += gone
            if again:
                self.ssd_write.send(again * self._page_bytes, now)

    def _start(self, order: Any, now: float) -> None:
        reads = isinstance(order, PromoteOrder)
        link = self.ssd_read if reads else self.ssd_write
        end = link.send(len(order.keys) * self._page_bytes, now)
        self._fly(order, end, end - now)

    def _land(self, order: Order, took: float) -> OrderReport:
        failed: frozenset[int] = frozenset()
        store = self.store
        if isinstance(order, DemoteOrder) and store is not None:
            for key in order.keys:
                store.put(key)
            self._written += len(order.keys) * self._page_bytes
            count = len(order.keys)
        elif isinstance(order, PromoteOrder) and store is not None:
            failed = frozenset(i for i, key in enumerate(order.keys) if not store.has(key))
            self._read += len(order.keys) * self._page_bytes
            count = len(order.keys)
        else:
            count = len(order.slots) if isinstance(order, (SaveOrder, LoadOrder)) else 0
        return OrderReport(1, failed, count * self._page_bytes, took)

    def _say(self) -> TierReport | None:
        if self.store is None:
            return None
        proposal = self.store.proposal
        if not self._gone and proposal == self._said and not (self._written or self._read):
            return None
        counters = {"ssd_bytes_written": self._written, "ssd_bytes_read": self._read}
        self._written = self._read = 0
        gone, self._gone, self._said = tuple(self._gone), [], proposal
        return TierReport(gone, proposal, counters, len(self.store) * self._page_bytes)
