"""The order book: turns decisions into orders, and reports back into visible pages.

It owns every order in flight. An order is two-phase like the index it mutates: when it
is planned its slots are reserved (or acquired), when all ranks have reported it is
settled, and only then are pages visible, slots reusable and source blocks free.

One thread, no locks, nothing blocks.

Orders in flight, and the bandwidth that is learned from their reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, filterfalse, islice
from typing import TypeAlias

from tiered_kv.keys import PageKey
from tiered_kv.orders import (
    DemoteOrder,
    LoadOrder,
    LookupOrder,
    Order,
    OrderId,
    OrderReport,
    PackOrder,
    PromoteOrder,
    RestoreMode,
    SaveOrder,
    StoreOrder,
)
from tiered_kv.page_group import CONTEXT
from tiered_kv.tiers import StoreId

from .cpu_index import PageIndex
from .tier_index import TierIndex, TierPages

CopyOrder: TypeAlias = SaveOrder | LoadOrder | PromoteOrder

MIN_SAMPLE = 1 << 22
"""Bytes a promotion must have moved to say something about bandwidth."""


@dataclass(slots=True)
class Flight:
    """An order in flight.

    Attributes:
        keys: its pages.
        report: reports of the ranks so far, merged; None before the first.
        abandoned: True if its pages were forgotten meanwhile.
    """

    order: Order
    keys: tuple[PageKey, ...]
    report: OrderReport | None = None
    abandoned: bool = False


@dataclass(frozen=True, slots=True)
class Settled:
    """An order that every rank has reported.

    Attributes:
        order: the order; its blocks may be given up now.
        keys: the order's pages, in the order of its blocks.
        failed: indices of pages whose copy failed on some rank.
        abandoned: the pages were forgotten meanwhile (a cache reset).
        seconds: time that the slowest rank spent on it.
    """

    order: Order
    keys: tuple[PageKey, ...]
    failed: frozenset[int]
    abandoned: bool
    seconds: float

    @property
    def good(self) -> Sequence[PageKey]:
        """The pages whose copy failed nowhere, in the same order."""
        if not self.failed:
            return self.keys
        return [key for i, key in enumerate(self.keys) if i not in self.failed]


def learned(bandwidth: float, order: CopyOrder, report: OrderReport, page_bytes: int) -> float:
    """The bandwidth of a rank's copies, or of its promotions, after a report of one.

    Args:
        bandwidth: before it, bytes of pages a second.
        page_bytes: size of a page of the order.
    """
    if report.seconds <= 0:
        return bandwidth
    seen = report.nbytes / report.seconds
    if isinstance(order, PromoteOrder):
        enough = report.nbytes >= min(MIN_SAMPLE, page_bytes * 8)
        return bandwidth + 0.3 * (seen - bandwidth) if enough else bandwidth
    if report.nbytes < page_bytes:
        return bandwidth
    if isinstance(order, LoadOrder) and order.cold:  # decoding is no copy
        return bandwidth
    return bandwidth + 0.2 * (seen - bandwidth)


KINDS = (SaveOrder, LoadOrder, PackOrder, DemoteOrder, PromoteOrder, LookupOrder)
"""Kinds of orders that are in flight until they are reported."""
RELEASED_AT_ONCE = 16_384
"""Pages of restores that are over which are let go after a step; others stay a step longer."""


class OrderBook:
    """Orders in flight between the indices and ``ranks`` workers.

    Args:
        index: the pages in CPU memory; mutated by planning and by settling.
        ranks: how many workers must report an order before it counts.
        page_bytes: size of a page of each group on one rank, bytes, for the bandwidth estimates.
        bandwidth: bytes per second of one rank's copies, assumed until measured.
        stores: indices of the tiers below, fastest first.

    Attributes:
        stores: pages of the tiers below, fastest first.
        page_bytes: size of a page of each group on the rank where it is largest, bytes.
        unsaved: pages left without a slot so far.
        by_kind: orders in flight of each kind; every kind is there.
    """

    def __init__(
        self,
        index: PageIndex,
        ranks: int,
        page_bytes: Sequence[int],
        bandwidth: float,
        stores: Mapping[StoreId, TierIndex] | None = None,
    ) -> None:
        self.index = index
        self.stores = {store: TierPages(pages) for store, pages in (stores or {}).items()}
        self.bandwidth = bandwidth
        self.unsaved = 0
        self._ranks = ranks
        self.page_bytes = list(page_bytes)
        self._ids = map(OrderId, count(1))
        self._flights: dict[OrderId, Flight] = {}
        self.by_kind: dict[type[Order], int] = dict.fromkeys(KINDS, 0)
        self._promoting: dict[PageKey, OrderId] = {}
        self._not_yet_due: dict[OrderId, float] = {}
        self._read: deque[tuple[Sequence[PageKey], Sequence[int]]] = deque()  # not released yet

    @property
    def in_flight(self) -> int:
        """Orders not yet reported by every rank."""
        return len(self._flights)

    def orders(self) -> Iterator[Order]:
        """The orders in flight, oldest first."""
        return (flight.order for flight in self._flights.values())

    def saves_under_way(self) -> Iterator[SaveOrder]:
        """Saves in flight whose source blocks are still held, oldest first."""
        for flight in self._flights.values():
            if isinstance(flight.order, SaveOrder) and not flight.abandoned:
                yield flight.order

    def under_way(self, order_id: OrderId) -> bool:
        """True if the order is in flight and its pages are still wanted."""
        flight = self._flights.get(order_id)
        return flight is not None and not flight.abandoned

    def expected(self, now: float) -> int:
        """Orders in flight that are due: those whose report is worth stepping for."""
        if self._not_yet_due:
            self._not_yet_due = {
                order: due for order, due in self._not_yet_due.items() if due > now
            }
        return len(self._flights) - len(self._not_yet_due)

    def expedite(self, orders: Iterable[OrderId], now: float) -> list[PromoteOrder]:
        """Make promotions due that were ordered for later; those due already are left out."""
        early = [one for one in orders if self._not_yet_due.pop(one, now) > now]
        found = (self._flights[one].order for one in early)
        return [order for order in found if isinstance(order, PromoteOrder)]

    def store_of(self, order_id: OrderId) -> StoreId:
        """The store that an order in flight goes to."""
        order = self._flights[order_id].order
        assert not isinstance(order, (SaveOrder, LoadOrder, PackOrder))
        return order.store

    @property
    def promoting(self) -> Mapping[PageKey, OrderId]:
        """Pages on their way up to CPU memory, and the orders that bring them."""
        return self._promoting

    def copy_seconds(self, pages: int, group: int = CONTEXT) -> float:
        """Time one rank needs to copy that many pages, at the bandwidth seen so far."""
        return pages * self.page_bytes[group] / self.bandwidth

    def promote_seconds(self, store: StoreId, pages: int) -> float:
        """Time until that many pages more are up from a store, behind those already ordered and
        due."""
        state = self.stores[store]
        due = state.promoting - self.ahead(store)
        return (pages + max(0, due)) * self.page_bytes[store.group] / state.bandwidth

    def ahead(self, store: StoreId | None = None) -> int:
        """Pages on their way up, from one store or all, that were not due when last looked at
        (``expected``, ``expedite``)."""
        orders = (self._flights[order_id].order for order_id in self._not_yet_due)
        return sum(
            len(order.keys)
            for order in orders
            if isinstance(order, PromoteOrder) and store in (None, order.store)
        )

    def stored_nowhere(self, keys: Collection[PageKey]) -> Collection[PageKey]:
        """The ones of these pages that no tier below has, in the same order."""
        for tier in self.stores.values():
            keys = tier.index.absent(keys)
        return keys

    # -- planning -----------------------------------------------------------------

    def plan_save(self, pages: Mapping[PageKey, int], group: int = CONTEXT) -> SaveOrder | None:
        """Order a copy VRAM → CPU of pages, from the blocks given; known ones are left out.

        Returns None if nothing needs saving or no slot can be had. Pages left without a
        slot are simply not saved, and counted in ``unsaved``.
        """
        fresh = self.index.unknown(pages)
        if not fresh:
            return None
        keys = tuple(fresh)
        slots = tuple(self.index.reserve_all(keys))
        self.unsaved += len(keys) - len(slots)
        if not slots:
            return None
        keys = keys[: len(slots)]
        order = SaveOrder(next(self._ids), group, tuple(fresh.values())[: len(slots)], slots, keys)
        self._begin(order, keys)
        return order

    def plan_load(
        self,
        request_id: str,
        keys: Sequence[PageKey],
        blocks: Sequence[int],
        mode: RestoreMode,
        group: int = CONTEXT,
        more: bool = False,
    ) -> LoadOrder:
        """Order a copy CPU → VRAM; every page must be readable and stays so until settled.

        Raises:
            KeyError, ValueError: a page is not readable; nothing has changed.
        """
        if len(keys) != len(blocks):
            raise ValueError(f"{len(keys)} pages cannot fill {len(blocks)} blocks")
        where, slots = tuple(blocks), tuple(self.index.acquire_all(keys))
        self.index.promoted.read(keys)
        cold = tuple(key for key, slot in zip(keys, slots, strict=True) if slot < 0)
        order = LoadOrder(next(self._ids), group, request_id, where, slots, mode, more, cold)
        self._begin(order, tuple(keys))
        return order

    def plan_pack(self, keys: Sequence[PageKey], group: int) -> PackOrder:
        """Order readable pages that nobody reads to be compressed together, where they are."""
        slots = tuple(self.index.pack(keys))
        order = PackOrder(next(self._ids), group, slots, tuple(keys))
        self._begin(order, order.keys)
        return order

    def plan_demote(
        self, store: StoreId, keys: Sequence[PageKey], due: float, most: int | None = None
    ) -> DemoteOrder | None:
        """Order a copy CPU → tier of the pages that are readable and not in the tier already.

        They stay readable meanwhile, and are not evicted. None if there are none.

        Args:
            most: pages at most, the first ones; None: all.
        """
        state = self.stores[store]
        there = filter(self.index.is_readable, state.index.unwritten(dict.fromkeys(keys)))
        wanted = tuple(islice(filterfalse(state.demoting.__contains__, there), most))
        if not wanted:
            return None
        slots = tuple(self.index.acquire_all(wanted))
        order = DemoteOrder(next(self._ids), store, wanted, slots, due)
        state.demoting.update(wanted)
        self._send(order, due)
        return order

    def plan_promote(
        self, store: StoreId, keys: Sequence[PageKey], due: float
    ) -> PromoteOrder | None:
        """Order a copy tier → CPU of the pages that are in the tier and not in CPU memory.

        Their slots are reserved now, evicting if need be; the first pages are taken where
        slots are short. None if nothing can be ordered.
        """
        state, known = self.stores[store], self.index.known
        wanted = [key for key in dict.fromkeys(keys) if key in state.index and not known(key)]
        slots = tuple(self.index.reserve_all(wanted)) if wanted else ()
        if not slots:
            return None
        wanted = wanted[: len(slots)]
        order = PromoteOrder(next(self._ids), store, tuple(wanted), slots, due)
        self._promoting.update(dict.fromkeys(wanted, order.order_id))
        state.promoting += len(wanted)
        self._send(order, due)
        return order

    def plan_lookup(
        self, store: StoreId, keys: Sequence[PageKey], deadline_s: float
    ) -> LookupOrder | None:
        """Order a question whether the tier has these pages; None if its index can tell."""
        wanted = tuple(self.stores[store].index.unanswered(keys))
        if not wanted:
            return None
        order = LookupOrder(next(self._ids), store, wanted, deadline_s)
        self._send(order, 0.0)
        return order

    def _send(self, order: StoreOrder, due: float) -> None:
        self._begin(order, order.keys)
        if due > 0:
            self._not_yet_due[order.order_id] = due

    def _begin(self, order: Order, keys: tuple[PageKey, ...]) -> None:
        self._flights[order.order_id] = Flight(order, keys)
        self.by_kind[type(order)] += 1

    def _end(self, order_id: OrderId) -> Flight:
        flight = self._flights.pop(order_id)
        self._not_yet_due.pop(order_id, None)
        self.by_kind[type(flight.order)] -= 1
        return flight

    def cancel(self, order: SaveOrder | StoreOrder) -> None:
        """Take back an order that was never sent: as if every page of it had failed, but
        that nothing is known against those in a tier."""
        flight = self._end(order.order_id)
        if isinstance(order, LookupOrder):
            return
        for key, slot in zip(flight.keys, order.slots, strict=True):
            if isinstance(order, DemoteOrder):
                self.stores[order.store].demoting.discard(key)
                self.index.release(key, slot, used=False)
            else:
                self._promoting.pop(key, None)
                self.index.abort(key, slot)
        if isinstance(order, PromoteOrder) and not flight.abandoned:
            self.stores[order.store].promoting -= len(flight.keys)

    def abandon_saves(self) -> list[SaveOrder]:
        """Forget the pages of every save in flight; their source blocks may be given up.

        The slots stay taken until the workers report, since their bytes still travel.
        Returns the orders so abandoned.
        """
        abandoned = []
        for flight in self._flights.values():
            if isinstance(flight.order, SaveOrder) and not flight.abandoned:
                flight.abandoned = True
                for key in flight.keys:
                    self.index.forget(key)
                abandoned.append(flight.order)
        return abandoned

    def forget_all(self) -> None:
        """Forget every page in CPU memory and below. Slots in use are freed as orders settle."""
        for flight in self._flights.values():
            flight.abandoned = True
        self._promoting.clear()
        self.index.clear()
        for tier in self.stores.values():
            tier.promoting = 0
            tier.demoting.clear()
            tier.index.clear()

    # -- settling -----------------------------------------------------------------

    def settle(self, reports: Mapping[OrderId, OrderReport]) -> list[Settled]:
        """Take in reports; returns the orders that are now complete on every rank.

        A save's pages become readable unless their copy failed. A load's pages are
        released, and those that failed are forgotten, so that they are not tried again.
        Demoted pages are in their tier, promoted ones readable; those that could not be promoted
        are not in their tier. Reports of orders nobody knows are ignored.
        """
        done = []
        for order_id, report in reports.items():
            flight = self._flights.get(order_id)
            if flight is None:
                continue
            flight.report = flight.report.merge(report) if flight.report else report
            if flight.report.ranks < self._ranks:
                continue
            self._end(order_id)
            self._learn(flight.order, flight.report)
            done.append(self._finish(flight, flight.report))
        self._release_some()
        return done

    def _release_some(self) -> None:
        """Let pages go that were restored before. Nobody waits for that, and it takes time."""
        pages = 0
        while self._read and pages < RELEASED_AT_ONCE:
            keys, slots = self._read.popleft()
            self.index.release_all(keys, slots)
            pages += len(keys)

    def _finish(self, flight: Flight, report: OrderReport) -> Settled:
        order, index, failed = flight.order, self.index, report.failed
        done = Settled(order, flight.keys, failed, flight.abandoned, report.seconds)
        if isinstance(order, PackOrder):
            index.packed(order.slots[0], 0 if failed else report.slots)
        elif isinstance(order, LookupOrder):
            if not flight.abandoned:
                answers = self.stores[order.store].index
                answers.answer(done.good, True)
                answers.answer((flight.keys[i] for i in failed), False)
        elif isinstance(order, LoadOrder) and not failed:
            self._read.append((flight.keys, order.slots))
        elif isinstance(order, LoadOrder):
            for i, (key, slot) in enumerate(zip(flight.keys, order.slots, strict=True)):
                index.release(key, slot)
                if i in failed:
                    index.forget(key)
        elif isinstance(order, DemoteOrder):
            index.release_all(flight.keys, order.slots, used=False)
            if not flight.abandoned:
                tier = self.stores[order.store]
                tier.demoting.difference_update(flight.keys)
                tier.index.add(done.good)
        else:
            self._commit(flight, order, failed)
        return done

    def _commit(
        self, flight: Flight, order: SaveOrder | PromoteOrder, failed: frozenset[int]
    ) -> None:
        """Have the pages readable that reached CPU memory."""
        keys, slots = flight.keys, order.slots
        if failed:
            for i in failed:
                self.index.abort(keys[i], slots[i])
            good = [i for i in range(len(keys)) if i not in failed]
            keys, slots = tuple(keys[i] for i in good), tuple(slots[i] for i in good)
        self.index.commit_all(keys, slots)
        if not isinstance(order, PromoteOrder) or flight.abandoned:
            return
        nbytes = self.page_bytes[order.store.group]
        self.index.promoted.came_up(filter(self.index.is_readable, keys), nbytes)
        for key in flight.keys:
            self._promoting.pop(key, None)
        tier = self.stores[order.store]
        tier.promoting -= len(flight.keys)
        tier.index.discard(flight.keys[i] for i in failed)

    def _learn(self, order: Order, report: OrderReport) -> None:
        if isinstance(order, PromoteOrder):
            tier, nbytes = self.stores[order.store], self.page_bytes[order.store.group]
            tier.bandwidth = learned(tier.bandwidth, order, report, nbytes)
        elif isinstance(order, (SaveOrder, LoadOrder)):
            nbytes = self.page_bytes[order.group]
            self.bandwidth = learned(self.bandwidth, order, report, nbytes)
