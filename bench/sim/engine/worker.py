"""The worker half's stand-in: carries the scheduler half's orders out, over links.

What it answers is what the real one does (``connectors.vllm.worker_half``): a report for every
order, requests whose restore has arrived, segments of the SSD store that should die. Nothing is
copied; only time passes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiered_kv.connectors.runtime.observe.virtual_worker import BUNDLE_SHARE, VirtualStore
from tiered_kv.keys import PageKey
from tiered_kv.messages import Orders, Proposal, Reports, TierOrders, TierReport
from tiered_kv.orders import (
    DemoteOrder,
    LoadOrder,
    Order,
    OrderId,
    OrderReport,
    PackOrder,
    PromoteOrder,
    RestoreMode,
    SaveOrder,
)
from tiered_kv.tiers import SSD, StoreId

from .links import Link
from .machines import Machine


class _Store:
    """The SSD store of a page group, and what the scheduler half has not heard of it yet."""

    def __init__(self, page_bytes: int, pages: int) -> None:
        self.page_bytes = page_bytes
        self.pages = VirtualStore(pages)
        self.gone: list[PageKey] = []
        self.written = self.read = 0
        self._said: Proposal | None = None

    def say(self) -> TierReport | None:
        """News since the last call; None if there are none."""
        proposal = self.pages.proposal
        if not self.gone and proposal == self._said and not (self.written or self.read):
            return None
        counters = {"ssd_bytes_written": self.written, "ssd_bytes_read": self.read}
        self.written = self.read = 0
        gone, self.gone, self._said = tuple(self.gone), [], proposal
        return TierReport(gone, proposal, counters, len(self.pages) * self.page_bytes)


@dataclass(frozen=True, slots=True)
class Heard:
    """The worker's report at the end of a step.

    Attributes:
        arrived: requests whose async restore is over.
        reports: for the scheduler half; None if nothing happened.
        bad_blocks: blocks whose restore failed; none with several groups.
        failed: requests whose restore failed; none with one group.
    """

    arrived: set[str]
    reports: Reports | None
    bad_blocks: set[int]
    failed: set[str]


class SimWorker:
    """All ranks as one.

    Args:
        page_bytes: of a page of each group over all ranks.
        ssd_bytes: capacity of the SSD tier; 0 is none. Every group's store may have an equal share,
            as those of a real one do.
    """

    def __init__(self, machine: Machine, page_bytes: Sequence[int], ssd_bytes: int) -> None:
        self.up = Link(machine.link)
        self.down = Link(machine.link)
        self.encode = Link(machine.encode)
        self.decode = Link(machine.decode)
        self.ssd_read = Link(machine.ssd_read, latency_s=100e-6)
        self.ssd_write = Link(machine.ssd_write, latency_s=100e-6)
        share = ssd_bytes // len(page_bytes)
        self.stores = [_Store(nbytes, share // nbytes) for nbytes in page_bytes if share]
        self._page_bytes = page_bytes
        self._parts = Counter[str]()  # loads under way of each request
        self._more: set[str] = set()  # requests of which further loads follow
        self._arrived: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()
        self._later: list[tuple[float, int, Order]] = []  # not due yet
        self._flying: list[tuple[float, int, Order, float]] = []  # over at; took
        self._tie = 0
        self._part_slots = 0.0  # of bundles so far, beside whole ones

    @property
    def next_event(self) -> float:
        """Time at which something will be over or due; infinite if nothing is under way."""
        flying = self._flying[0][0] if self._flying else float("inf")
        return min(flying, self._later[0][0] if self._later else float("inf"))

    # -- a step ---------------------------------------------------------------------

    def restore(self, orders: Orders, now: float) -> float:
        """Begin restores; returns when the step may compute: after its sync ones."""
        for group in range(len(self.stores)):
            if (ssd := orders.stores.get(StoreId(SSD, group))) is not None:
                self._carry_out(self.stores[group], ssd, now)
        ready = now
        for load in orders.loads:
            self._parts[load.request_id] += 1
            (self._more.add if load.more else self._more.discard)(load.request_id)
            end = self._load(load, now)
            if load.mode is RestoreMode.SYNC:
                ready = max(ready, end)
        for pack in orders.packs:
            self._send(pack, self.encode, len(pack.slots), pack.group, now)
        for refused in orders.failed_loads:
            self._more.discard(refused.request_id)
            if len(self._page_bytes) == 1:
                self._bad_blocks.update(refused.blocks)
            else:  # vLLM cannot tell the groups of blocks apart
                self._failed.add(refused.request_id)
            if not self._parts[refused.request_id]:
                del self._parts[refused.request_id]
                self._arrived.add(refused.request_id)
        return ready

    def save(self, orders: Orders, now: float) -> None:
        """Begin saves, behind the step's computing."""
        for order in orders.saves:
            self._send(order, self.down, len(order.blocks), order.group, now)

    def hear(self, now: float) -> Heard:
        """Report what is over by now."""
        while self._later and self._later[0][0] <= now:
            due, _, order = heapq.heappop(self._later)
            self._start(order, max(due, 0.0))
        reports: dict[OrderId, OrderReport] = {}
        arrived, self._arrived = self._arrived, set()
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        while self._flying and self._flying[0][0] <= now:
            _, _, order, took = heapq.heappop(self._flying)
            reports[order.order_id] = self._land(order, took)
            if isinstance(order, LoadOrder):
                self._parts[order.request_id] -= 1
                if not self._parts[order.request_id]:  # one for each group
                    del self._parts[order.request_id]
                    if order.mode is RestoreMode.ASYNC and order.request_id not in self._more:
                        arrived.add(order.request_id)
        failed = arrived & self._failed
        self._failed -= failed
        told = {StoreId(SSD, at): store.say() for at, store in enumerate(self.stores)}
        news = {store: {0: said} for store, said in told.items() if said is not None}
        if not reports and not news:
            return Heard(arrived, None, bad_blocks, failed)
        return Heard(arrived, Reports(reports, {}, news), bad_blocks, failed)

    # -- orders -----------------------------------------------------------------------

    def _load(self, load: LoadOrder, now: float) -> float:
        """Queue a restore; returns when it is there. Cold pages are copied as they are decoded."""
        nbytes, cold = len(load.blocks) * self._page_bytes[load.group], len(load.cold)
        end = self.up.send(nbytes, now)
        took = self.up.seconds(nbytes)
        if cold:
            decoded = cold * self._page_bytes[load.group]
            end = max(end, self.decode.send(decoded, now))
            took = max(took, self.decode.seconds(decoded))
        self._tie += 1
        heapq.heappush(self._flying, (end, self._tie, load, took))
        return end

    def _send(self, order: Order, link: Link, pages: int, group: int, now: float) -> float:
        """Queue an order's pages; returns when they are there."""
        nbytes = pages * self._page_bytes[group]
        end = link.send(nbytes, now)
        self._tie += 1
        heapq.heappush(self._flying, (end, self._tie, order, link.seconds(nbytes)))
        return end

    def _carry_out(self, store: _Store, orders: TierOrders, now: float) -> None:
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
        if dying is not None:
            gone, again = store.pages.reclaim(dying)
            store.gone += gone
            if again:
                self.ssd_write.send(again * store.page_bytes, now)

    def _start(self, order: Any, now: float) -> None:
        reads = isinstance(order, PromoteOrder)
        link = self.ssd_read if reads else self.ssd_write
        self._send(order, link, len(order.keys), order.store.group, now)

    def _land(self, order: Order, took: float) -> OrderReport:
        failed: frozenset[int] = frozenset()
        if isinstance(order, (DemoteOrder, PromoteOrder)):
            store = self.stores[order.store.group]
            nbytes = len(order.keys) * store.page_bytes
            if isinstance(order, DemoteOrder):
                for key in order.keys:
                    store.pages.put(key)
                store.written += nbytes
            else:
                missing = (i for i, key in enumerate(order.keys) if not store.pages.has(key))
                failed = frozenset(missing)
                store.read += nbytes
        else:
            assert isinstance(order, (SaveOrder, LoadOrder, PackOrder))
            nbytes = len(order.slots) * self._page_bytes[order.group]
        kept = self._kept(order) if isinstance(order, PackOrder) else 0
        return OrderReport(1, failed, nbytes, took, kept)

    def _kept(self, order: PackOrder) -> int:
        """Slots that a bundle fills: whole ones, and in the mean the share that they should."""
        self._part_slots += BUNDLE_SHARE * len(order.slots)
        kept = min(len(order.slots), max(1, round(self._part_slots)))
        self._part_slots -= kept
        return kept
