"""A worker that moves no bytes: it reports each order once its bytes would have been moved.

It represents all ranks. Its owner provides the lines that bytes take, the size of each store, and
the time: observe mode estimates costs by the same rates, and the simulator has those of a machine.
There is no thread. Finished orders are found when the owner polls.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from tiered_kv.keys import PageKey
from tiered_kv.messages import Orders, Proposal, Reclaim, Reports, TierOrders, TierReport
from tiered_kv.orders import (
    DemoteOrder,
    LoadOrder,
    OrderId,
    OrderKind,
    OrderReport,
    PackOrder,
    PromoteOrder,
    RestoreMode,
    SaveOrder,
    StoreOrder,
)
from tiered_kv.tiers import StoreId

SEGMENTS = 32
"""Segments of a store."""
BUNDLE_SHARE = 22 / 32
"""Fraction of its slots that a bundle of bf16 fills: 1.5 times smaller, the last slot half full."""

CopyOrder: TypeAlias = SaveOrder | LoadOrder | PackOrder


class Line:
    """Carries transfers one after another, in one direction.

    Args:
        bandwidth: bytes per second.
        latency_s: added to each transfer.

    Attributes:
        carried: bytes so far.

    Raises:
        ValueError: the bandwidth is not above 0.
    """

    def __init__(self, bandwidth: float, latency_s: float = 0.0) -> None:
        if bandwidth <= 0:
            raise ValueError("a line needs a bandwidth above 0")
        self.bandwidth = bandwidth
        self.latency_s = latency_s
        self.carried = 0
        self._free_at = 0.0

    def send(self, nbytes: int, now: float) -> float:
        """Queue a transfer. Returns the time at which it finishes."""
        self._free_at = max(now, self._free_at) + self.seconds(nbytes)
        self.carried += nbytes
        return self._free_at

    def seconds(self, nbytes: int) -> float:
        """Duration of a transfer that waits for no other, as a worker measures it."""
        return self.latency_s + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class CopyLines:
    """Lines of copies between VRAM and CPU memory, and of the codec of cold pages there."""

    save: Line
    load: Line
    encode: Line
    decode: Line


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """A store of a tier.

    Attributes:
        pages: capacity; None for a store without a known limit.
        read, write: lines to it; stores of one disk have the same.
    """

    pages: int | None
    read: Line
    write: Line


class VirtualStore:
    """Keys of the pages that a store would hold, in segments. A full store proposes its oldest
    segment for deletion.

    Args:
        pages: capacity; None for a store without a known limit.
        first: number of the first segment.

    Attributes:
        newest: number of the segment that pages are written to.
    """

    def __init__(self, pages: int | None, first: int = 0) -> None:
        self._per_segment = max(1, pages // SEGMENTS) if pages is not None else 1 << 62
        self._most = max(2, pages // self._per_segment) if pages is not None else 2
        self._segments: dict[int, dict[PageKey, None]] = {first: {}}
        self._where: dict[PageKey, int] = {}
        self.newest = first

    def __len__(self) -> int:
        return len(self._where)

    def put(self, key: PageKey) -> None:
        """Store a page. A page that is stored already stays in its segment."""
        if key in self._where:
            return
        if len(self._segments[self.newest]) >= self._per_segment:
            self.newest += 1
            self._segments[self.newest] = {}
        self._segments[self.newest][key] = None
        self._where[key] = self.newest

    def has(self, key: PageKey) -> bool:
        """True if the page is stored."""
        return key in self._where

    @property
    def proposal(self) -> Proposal | None:
        """Segment to delete next; None while the store has free space."""
        if len(self._segments) <= self._most:
            return None
        oldest = next(iter(self._segments))
        return Proposal(oldest, tuple(self._segments[oldest]))

    def reclaim(self, dying: Reclaim) -> tuple[list[PageKey], int]:
        """Delete a segment, and write its survivors again. Returns the pages that are gone, and the
        number of pages that were written again."""
        pages = self._segments.pop(dying.segment, None)
        if pages is None:
            return [], 0
        for key in pages:
            del self._where[key]
        kept = [key for key in dying.survivors if key in pages]
        for key in kept:
            self.put(key)
        return [key for key in pages if key not in self._where], len(kept)


class _Stored:
    """A store, and what was not reported of it yet."""

    def __init__(self, spec: StoreSpec, page_bytes: int) -> None:
        self.spec = spec
        self.page_bytes = page_bytes
        self.pages = VirtualStore(spec.pages)
        self._gone: list[PageKey] = []
        self._proposed: Proposal | None = None
        self.changed = False

    def reset(self) -> None:
        """Start over with an empty store. Orders in flight go to the old one, and so does a reclaim
        that answers its last proposal."""
        self.pages = VirtualStore(self.spec.pages, self.pages.newest + 1)
        self._gone, self.changed = [], True

    def reclaim(self, dying: Reclaim, now: float) -> None:
        """Delete a segment. Its survivors are written behind what was sent before."""
        gone, again = self.pages.reclaim(dying)
        self._gone += gone
        self.changed = self.changed or bool(gone)
        if again:
            self.spec.write.send(again * self.page_bytes, now)

    def take_report(self, ranks: int) -> TierReport | None:
        """News since the last call; None without any."""
        proposal = self.pages.proposal
        if not self.changed and proposal == self._proposed:
            return None
        gone, self._gone = tuple(self._gone), []
        self.changed, self._proposed = False, proposal
        return TierReport(gone, proposal, {}, len(self.pages) * self.page_bytes * ranks)


class _Flight(NamedTuple):
    """An order under way.

    Attributes:
        over_at: time at which it finishes, seconds.
        sent: position in the sequence of orders sent, which decides ties.
        took_s: duration without waiting.
        pages: store that the order goes to; None for copies.
    """

    over_at: float
    sent: int
    order: Any
    nbytes: int
    took_s: float
    pages: VirtualStore | None


class VirtualWorker:
    """Carries out orders without moving bytes.

    Args:
        page_bytes: size of a page of each group on one rank, bytes.
        lines: lines of copies.
        stores: the stores of the tiers below CPU memory.
        ranks: number of ranks that each report stands for.
    """

    def __init__(
        self,
        page_bytes: Sequence[int],
        lines: CopyLines,
        stores: Mapping[StoreId, StoreSpec],
        ranks: int = 1,
    ) -> None:
        self._page_bytes = page_bytes
        self._lines = lines
        self._stores = {
            store: _Stored(spec, page_bytes[store.group]) for store, spec in stores.items()
        }
        self._ranks = ranks
        self._sent = count()
        self._flying: list[_Flight] = []
        self._later: list[tuple[float, int, StoreOrder]] = []  # not due yet
        self._part_slots = 0.0  # of bundles so far, beyond whole slots

    @property
    def next_event(self) -> float:
        """Time at which the next order finishes or is due; infinite without orders."""
        flying = self._flying[0].over_at if self._flying else float("inf")
        return min(flying, self._later[0][0] if self._later else float("inf"))

    def carry_out(self, orders: Orders, now: float) -> float:
        """Start a step's orders. Returns the time at which the last of its sync restores finishes,
        or ``now`` without any."""
        for store, tier_orders in orders.stores.items():
            self._carry_out_tier(self._stores[store], tier_orders, now)
        ready = now
        for load in orders.loads:
            over_at = self._copy(load, self._lines.load, now, len(load.cold))
            if load.mode is RestoreMode.SYNC:
                ready = max(ready, over_at)
        for pack in orders.packs:
            self._copy(pack, self._lines.encode, now)
        for save in orders.saves:
            self._copy(save, self._lines.save, now)
        return ready

    def _carry_out_tier(self, stored: _Stored, orders: TierOrders, now: float) -> None:
        if orders.fingerprint is not None:
            stored.reset()
        if orders.expedited:
            self._expedite(set(orders.expedited), now)
        for lookup in orders.lookups:
            self._start(lookup, now)
        moves: tuple[PromoteOrder | DemoteOrder, ...] = (*orders.promotes, *orders.demotes)
        for order in moves:
            if order.due > now:
                heapq.heappush(self._later, (order.due, next(self._sent), order))
            else:
                self._start(order, now)
        if (dying := orders.reclaims.get(0)) is not None:
            stored.reclaim(dying, now)

    def _expedite(self, hurried: set[OrderId], now: float) -> None:
        early = [order for _, _, order in self._later if order.order_id in hurried]
        self._later = [one for one in self._later if one[2].order_id not in hurried]
        heapq.heapify(self._later)
        for order in early:
            self._start(order, now)

    def _copy(self, order: CopyOrder, line: Line, now: float, cold: int = 0) -> float:
        """Start a copy, of which ``cold`` pages are decoded while the rest is copied. Returns the
        time at which it finishes."""
        page_bytes = self._page_bytes[order.group]
        nbytes = len(order.slots) * page_bytes
        over_at, took_s = line.send(nbytes, now), line.seconds(nbytes)
        if cold:
            over_at = max(over_at, self._lines.decode.send(cold * page_bytes, now))
            took_s = max(took_s, self._lines.decode.seconds(cold * page_bytes))
        flight = _Flight(over_at, next(self._sent), order, nbytes, took_s, None)
        heapq.heappush(self._flying, flight)
        return over_at

    def _start(self, order: StoreOrder, now: float) -> None:
        """Start an order of a store. Lookups take no time."""
        stored = self._stores[order.store]
        nbytes = len(order.keys) * stored.page_bytes
        over_at, took_s = now, 0.0
        if order.kind is not OrderKind.LOOK_UP:
            spec = stored.spec
            line = spec.write if order.kind is OrderKind.DEMOTE else spec.read
            over_at, took_s = line.send(nbytes, now), line.seconds(nbytes)
        flight = _Flight(over_at, next(self._sent), order, nbytes, took_s, stored.pages)
        heapq.heappush(self._flying, flight)

    def take_reports(self, now: float) -> Reports | None:
        """Reports of what finished since the last call; None if nothing did."""
        while self._later and self._later[0][0] <= now:
            due, _, order = heapq.heappop(self._later)
            self._start(order, due)
        reports = dict[OrderId, OrderReport]()
        while self._flying and self._flying[0].over_at <= now:
            done = heapq.heappop(self._flying)
            reports[done.order.order_id] = self._finish(done)
        found = {store: stored.take_report(self._ranks) for store, stored in self._stores.items()}
        news = {store: {0: report} for store, report in found.items() if report is not None}
        return Reports(reports, {}, news) if reports or news else None

    def _finish(self, done: _Flight) -> OrderReport:
        order, pages = done.order, done.pages
        failed, slots = frozenset[int](), 0
        if order.kind is OrderKind.PACK:
            slots = self._filled(order)
        elif pages is not None:
            self._stores[order.store].changed = True
            if order.kind is OrderKind.DEMOTE:
                for key in order.keys:
                    pages.put(key)
            else:
                failed = frozenset(i for i, key in enumerate(order.keys) if not pages.has(key))
        return OrderReport(self._ranks, failed, done.nbytes, done.took_s, slots)

    def _filled(self, order: PackOrder) -> int:
        """Slots that a bundle fills: a whole number, on average ``BUNDLE_SHARE`` of its slots."""
        self._part_slots += BUNDLE_SHARE * len(order.slots)
        filled = min(len(order.slots), max(1, round(self._part_slots)))
        self._part_slots -= filled
        return filled
