"""A worker that moves no bytes: it reports each order at the time when the bytes would have
arrived.

The worker represents all ranks. Its owner provides the lines that transfers use, the size of each
store, and the time. Observe mode uses the rates that cost estimates use. The simulator uses the
rates of a machine.

There is no thread. Finished orders are found when the owner polls.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
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
"""Number of segments of a store."""
BUNDLE_SHARE = 22 / 32
"""Fraction of its slots that a bundle of bf16 pages fills: the pages shrink to two thirds, and the
last slot is half full."""

STORE_KINDS = frozenset({OrderKind.DEMOTE, OrderKind.PROMOTE, OrderKind.LOOK_UP})
CopyOrder: TypeAlias = SaveOrder | LoadOrder | PackOrder


class Line:
    """A link that carries transfers one after another, in one direction.

    Args:
        bandwidth: bytes per second.
        latency_s: time added to each transfer, seconds.

    Attributes:
        carried: bytes carried so far.

    Raises:
        ValueError: the bandwidth is not above 0.
    """

    def __init__(self, bandwidth: float, latency_s: float = 0.0) -> None:
        if bandwidth <= 0:
            raise ValueError("the bandwidth of a link must be above 0")
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
        """Return the duration of a transfer that does not queue, as a worker measures it."""
        return self.latency_s + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class CopyLines:
    """Lines for copies between VRAM and CPU memory, and for the codec of compressed pages."""

    save: Line
    load: Line
    encode: Line
    decode: Line


class VirtualStore:
    """Keys of the pages that a tier's store would hold, in segments. A full store proposes its
    emptiest segment for deletion if more than half of it is empty, otherwise the oldest.

    Args:
        pages: capacity; None for a store without a known limit.
        read, write: lines to the store; stores on one disk share them.

    Attributes:
        read, write: as passed in.
        generation: number of resets so far.
    """

    def __init__(self, pages: int | None, read: Line, write: Line) -> None:
        self.read = read
        self.write = write
        self.generation = 0
        self._per_segment = max(1, pages // SEGMENTS) if pages is not None else 1 << 62
        self._most = max(2, pages // self._per_segment) if pages is not None else 2
        self._segments: dict[int, dict[PageKey, None]] = {0: {}}
        self._where: dict[PageKey, int] = {}
        self._newest = 0
        self._gone: list[PageKey] = []
        self._proposed: Proposal | None = None
        self._changed = False

    def put(self, keys: Iterable[PageKey]) -> None:
        """Store pages. A page that is stored already stays in its segment."""
        for key in keys:
            if key not in self._where:
                if len(self._segments[self._newest]) >= self._per_segment:
                    self._newest += 1
                    self._segments[self._newest] = {}
                self._segments[self._newest][key] = None
                self._where[key] = self._newest

    def finish(self, order: StoreOrder, generation: int) -> frozenset[int]:
        """Finish an order that was sent in ``generation``. Returns the indices of its pages that
        failed: all of them if the store was reset since then."""
        self._changed = True
        if generation != self.generation:
            return frozenset(range(len(order.keys)))
        if order.kind is OrderKind.DEMOTE:
            self.put(order.keys)
        return frozenset(i for i, key in enumerate(order.keys) if key not in self._where)

    @property
    def proposal(self) -> Proposal | None:
        """Return the segment to delete next; None while the store has free space."""
        if len(self._segments) <= self._most:
            return None
        full = [number for number in self._segments if number != self._newest]
        dying = min(full, key=lambda number: len(self._segments[number]))
        if 2 * len(self._segments[dying]) >= self._per_segment:
            dying = full[0]
        return Proposal(dying, tuple(self._segments[dying]))

    def drop(self, keys: Iterable[PageKey]) -> None:
        """Forget pages. A segment that gets no further pages is deleted with its last page."""
        for key in keys:
            if (number := self._where.pop(key, None)) is not None:
                del self._segments[number][key]
                if not self._segments[number] and number != self._newest:
                    del self._segments[number]
        self._changed = True

    def reclaim(self, dying: Reclaim) -> int:
        """Delete a segment. Returns the number of surviving pages, which were rewritten."""
        pages = self._segments.pop(dying.segment, None)
        if pages is None:
            return 0
        for key in pages:
            del self._where[key]
        kept = [key for key in dying.survivors if key in pages]
        self.put(kept)
        self._gone += (key for key in pages if key not in self._where)
        self._changed = True
        return len(kept)

    def reset(self) -> None:
        """Drop all pages. Segment numbers continue, so that a reclaim from before the reset deletes
        no new segment."""
        self.generation += 1
        self._newest += 1
        self._segments = {self._newest: {}}
        self._where.clear()
        self._gone.clear()
        self._changed = True

    def take_report(self, page_bytes: int) -> TierReport | None:
        """Return the changes since the last call; None if there are none."""
        proposal = self.proposal
        if not self._changed and proposal == self._proposed:
            return None
        gone, self._gone = tuple(self._gone), []
        self._changed, self._proposed = False, proposal
        return TierReport(gone, proposal, {}, len(self._where) * page_bytes)


class _Waiting(NamedTuple):
    """An order that is not due yet.

    Attributes:
        due: time at which it starts, seconds.
        sent: position in the sequence of orders, which breaks ties.
        generation: number of resets of its store before the order was sent.
    """

    due: float
    sent: int
    order: StoreOrder
    generation: int


class _Flight(NamedTuple):
    """An order in flight.

    Attributes:
        over_at: time at which it finishes, seconds.
        sent: position in the sequence of orders, which breaks ties.
        took_s: duration without queueing on its line, seconds.
        generation: number of resets of its store before the order was sent; 0 for copies.
    """

    over_at: float
    sent: int
    order: Any
    nbytes: int
    took_s: float
    generation: int = 0


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
        stores: Mapping[StoreId, VirtualStore],
        ranks: int = 1,
    ) -> None:
        self._page_bytes = page_bytes
        self._lines = lines
        self._stores = stores
        self._ranks = ranks
        self._sent = count()
        self._flying: list[_Flight] = []
        self._later: list[_Waiting] = []
        self._part_slots = 0.0  # fraction of a slot carried over to the next bundle

    @property
    def next_event(self) -> float:
        """Time at which the next order finishes or is due; infinite without orders."""
        flying = self._flying[0].over_at if self._flying else float("inf")
        return min(flying, self._later[0].due if self._later else float("inf"))

    def carry_out(self, orders: Orders, now: float) -> float:
        """Start a step's orders. Returns the time at which the last sync restore finishes, or
        ``now`` if there is none."""
        for store, tier_orders in orders.stores.items():
            self._carry_out_tier(store, tier_orders, now)
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

    def _carry_out_tier(self, name: StoreId, orders: TierOrders, now: float) -> None:
        store = self._stores[name]
        if orders.fingerprint is not None:
            store.reset()
            self._expedite(
                {one.order.order_id for one in self._later if one.order.store == name}, now
            )
        if orders.expedited:
            self._expedite(set(orders.expedited), now)
        for lookup in orders.lookups:
            self._start(lookup, now, store.generation)
        moves: tuple[PromoteOrder | DemoteOrder, ...] = (*orders.promotes, *orders.demotes)
        for order in moves:
            if order.due > now:
                later = _Waiting(order.due, next(self._sent), order, store.generation)
                heapq.heappush(self._later, later)
            else:
                self._start(order, now, store.generation)
        if orders.lost:
            store.drop(orders.lost)
        dying = orders.reclaims.get(0)
        if dying is not None and (again := store.reclaim(dying)):
            store.write.send(again * self._page_bytes[name.group], now)

    def _expedite(self, hurried: set[OrderId], now: float) -> None:
        early = [one for one in self._later if one.order.order_id in hurried]
        self._later = [one for one in self._later if one.order.order_id not in hurried]
        heapq.heapify(self._later)
        for one in early:
            self._start(one.order, now, one.generation)

    def _copy(self, order: CopyOrder, line: Line, now: float, cold: int = 0) -> float:
        """Start a copy. Its ``cold`` compressed pages are decoded while the others are copied.
        Returns the time at which the copy finishes."""
        page_bytes = self._page_bytes[order.group]
        nbytes = len(order.slots) * page_bytes
        over_at, took_s = line.send(nbytes, now), line.seconds(nbytes)
        if cold:
            over_at = max(over_at, self._lines.decode.send(cold * page_bytes, now))
            took_s = max(took_s, self._lines.decode.seconds(cold * page_bytes))
        heapq.heappush(self._flying, _Flight(over_at, next(self._sent), order, nbytes, took_s))
        return over_at

    def _start(self, order: StoreOrder, now: float, generation: int) -> None:
        """Start an order of a store. Lookups take no time, nor do orders from before a reset."""
        store = self._stores[order.store]
        nbytes = len(order.keys) * self._page_bytes[order.store.group]
        over_at, took_s = now, 0.0
        if order.kind is not OrderKind.LOOK_UP and generation == store.generation:
            line = store.write if order.kind is OrderKind.DEMOTE else store.read
            over_at, took_s = line.send(nbytes, now), line.seconds(nbytes)
        flight = _Flight(over_at, next(self._sent), order, nbytes, took_s, generation)
        heapq.heappush(self._flying, flight)

    def take_reports(self, now: float) -> Reports | None:
        """Return the reports of orders that finished since the last call; None if there are
        none."""
        while self._later and self._later[0].due <= now:
            later = heapq.heappop(self._later)
            self._start(later.order, later.due, later.generation)
        reports = dict[OrderId, OrderReport]()
        while self._flying and self._flying[0].over_at <= now:
            done = heapq.heappop(self._flying)
            reports[done.order.order_id] = self._finish(done)
        news = {
            name: {0: report}
            for name, store in self._stores.items()
            if (report := store.take_report(self._page_bytes[name.group] * self._ranks))
        }
        return Reports(reports, {}, news) if reports or news else None

    def _finish(self, done: _Flight) -> OrderReport:
        order, failed, slots = done.order, frozenset[int](), 0
        if order.kind is OrderKind.PACK:
            slots = self._filled(order)
        elif order.kind in STORE_KINDS:
            failed = self._stores[order.store].finish(order, done.generation)
        return OrderReport(self._ranks, failed, done.nbytes, done.took_s, slots)

    def _filled(self, order: PackOrder) -> int:
        """Return the number of whole slots that a bundle fills, on average ``BUNDLE_SHARE`` of its
        slots."""
        self._part_slots += BUNDLE_SHARE * len(order.slots)
        filled = min(len(order.slots), max(1, round(self._part_slots)))
        self._part_slots -= filled
        return filled
