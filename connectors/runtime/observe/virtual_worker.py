"""A worker without bytes: it reports orders as done once they would be, at the rates that prices go
by.

All ranks as one. Nothing is copied, and there is no thread: the clock says what is over when
somebody asks.

A store of a tier without its bytes: the pages that it would have, by segment.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from tiered_kv.keys import PageKey
from tiered_kv.messages import Orders, Proposal, Reclaim, Reports, TierOrders, TierReport
from tiered_kv.orders import (
    DemoteOrder,
    LoadOrder,
    LookupOrder,
    OrderId,
    OrderReport,
    PackOrder,
    PromoteOrder,
    SaveOrder,
    StoreOrder,
)
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.tiers import StoreId

SEGMENTS = 32
"""Number of segments of a store."""


class VirtualStore:
    """Pages in segments, of which the oldest dies when there is no room for a new one.

    Args:
        pages: pages that it has room for; None for a store without a known end.
    """

    def __init__(self, pages: int | None) -> None:
        self._per_segment = max(1, pages // SEGMENTS) if pages is not None else 1 << 62
        self._most = max(2, pages // self._per_segment) if pages is not None else 2
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
        """True if the page is there."""
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


BUNDLE_SHARE = 22 / 32
"""Share of its slots that a bundle of bf16 fills: 1.5 times smaller, the last slot half full."""


CopyOrder: TypeAlias = SaveOrder | LoadOrder | PackOrder
VirtualOrder: TypeAlias = CopyOrder | StoreOrder


class Line(NamedTuple):
    """Way of bytes, one order after the other: to or from CPU memory, or the disk of a tier."""

    what: str
    inwards: bool


@dataclass(frozen=True, slots=True, order=True)
class _Flight:
    """An order under way.

    Attributes:
        over_at: time at which it is over, seconds.
        took_s: time that it takes by itself.
        store: the store that it goes to; None for copies.
    """

    over_at: float
    order_id: OrderId
    order: VirtualOrder
    took_s: float
    store: VirtualStore | None


class _Stored:
    """A tier's store of a page group, and what the scheduler half has heard of it."""

    def __init__(self, pages: int | None) -> None:
        self.room = pages
        self.pages = VirtualStore(pages)
        self.gone: list[PageKey] = []
        self.said: Proposal | None = None
        self.changed = False


class VirtualWorker:
    """Carries orders out by saying so.

    Args:
        book: tells the rates, and the size of pages.
        ranks: ranks that every report stands for.
        rooms: pages that each store has room for; None for one without a known end.
    """

    def __init__(self, book: OrderBook, ranks: int, rooms: Mapping[StoreId, int | None]) -> None:
        self._book = book
        self._ranks = ranks
        self._stores = {name: _Stored(room) for name, room in rooms.items()}
        self._free_at: dict[Line, float] = {}
        self._flying: list[_Flight] = []
        self._later: list[tuple[float, OrderId, StoreOrder]] = []  # not due yet
        self._part_slots = 0.0  # of bundles so far, beside whole ones

    def carry_out(self, orders: Orders, now: float) -> None:
        """Begin with a step's orders."""
        for name, tier_orders in orders.stores.items():
            self._carry_out_stores(name, tier_orders, now)
        copies: tuple[CopyOrder, ...] = (*orders.loads, *orders.packs, *orders.saves)
        for order in copies:
            self.begin(order, now)

    def _carry_out_stores(self, name: StoreId, orders: TierOrders, now: float) -> None:
        stored = self._stores[name]
        if orders.fingerprint is not None:  # what is under way goes to the old one
            stored.pages, stored.gone = VirtualStore(stored.room), []
            stored.changed = True
        if orders.expedited:
            self._expedite(set(orders.expedited), now)
        dying = orders.reclaims.get(0)
        if dying is not None:
            gone, _ = stored.pages.reclaim(dying)
            stored.gone += gone
            stored.changed = True
        wanted: tuple[StoreOrder, ...] = (*orders.lookups, *orders.promotes, *orders.demotes)
        for order in wanted:
            due = 0.0 if isinstance(order, LookupOrder) else order.due
            if due > now:
                heapq.heappush(self._later, (due, order.order_id, order))
            else:
                self.begin(order, now)

    def _expedite(self, hurried: set[OrderId], now: float) -> None:
        early = [order for _, order_id, order in self._later if order_id in hurried]
        self._later = [one for one in self._later if one[1] not in hurried]
        heapq.heapify(self._later)
        for order in early:
            self.begin(order, now)

    def begin(self, order: VirtualOrder, now: float) -> None:
        """Begin with an order, behind those before it on the same line."""
        line, seconds = self._cost(order)
        over_at = max(now, self._free_at.get(line, now)) + seconds
        self._free_at[line] = over_at
        store = None
        if isinstance(order, (DemoteOrder, PromoteOrder, LookupOrder)):
            store = self._stores[order.store].pages
        heapq.heappush(self._flying, _Flight(over_at, order.order_id, order, seconds, store))

    def _cost(self, order: VirtualOrder) -> tuple[Line, float]:
        """The line that an order takes, and its seconds there."""
        book = self._book
        if isinstance(order, LookupOrder):
            return Line(f"questions to {order.store.tier}", inwards=True), 0.0
        if isinstance(order, (DemoteOrder, PromoteOrder)):
            line = Line(str(order.store.tier), inwards=isinstance(order, DemoteOrder))
            nbytes = len(order.keys) * book.page_bytes[order.store.group]
            return line, nbytes / book.stores[order.store].bandwidth
        nbytes = len(order.slots) * book.page_bytes[order.group]
        if isinstance(order, PackOrder):
            return Line("codec", inwards=True), nbytes / book.bandwidth
        return Line("CPU memory", inwards=isinstance(order, SaveOrder)), nbytes / book.bandwidth

    def hear(self, now: float) -> Reports | None:
        """Reports of what is over since the last call; None if nothing is."""
        while self._later and self._later[0][0] <= now:
            due, _, order = heapq.heappop(self._later)
            self.begin(order, due)
        reports = dict[OrderId, OrderReport]()
        while self._flying and self._flying[0].over_at <= now:
            done = heapq.heappop(self._flying)
            reports[done.order_id] = self._land(done)
        told = {name: self._say(name) for name in self._stores}
        news = {name: {0: said} for name, said in told.items() if said is not None}
        return Reports(reports, {}, news) if reports or news else None

    def _land(self, done: _Flight) -> OrderReport:
        order, store = done.order, done.store
        failed, slots = frozenset[int](), 0
        if isinstance(order, (SaveOrder, LoadOrder, PackOrder)):
            nbytes = len(order.slots) * self._book.page_bytes[order.group]
            slots = self._filled(order) if isinstance(order, PackOrder) else 0
        else:
            assert store is not None
            nbytes = len(order.keys) * self._book.page_bytes[order.store.group]
            if isinstance(order, DemoteOrder):
                for key in order.keys:
                    store.put(key)
                self._stores[order.store].changed = True
            else:
                failed = frozenset(i for i, key in enumerate(order.keys) if not store.has(key))
        return OrderReport(self._ranks, failed, nbytes, done.took_s, slots)

    def _filled(self, order: PackOrder) -> int:
        """Slots that a bundle fills: whole ones, and in the mean the share that they should."""
        self._part_slots += BUNDLE_SHARE * len(order.slots)
        filled = min(len(order.slots), max(1, round(self._part_slots)))
        self._part_slots -= filled
        return filled

    def _say(self, name: StoreId) -> TierReport | None:
        """News of a store; None if there are none."""
        stored = self._stores[name]
        proposal = stored.pages.proposal
        if not stored.changed and proposal == stored.said:
            return None
        gone, stored.gone = tuple(stored.gone), []
        stored.changed, stored.said = False, proposal
        nbytes = len(stored.pages) * self._book.page_bytes[name.group] * self._ranks
        return TierReport(gone, proposal, {}, nbytes)
