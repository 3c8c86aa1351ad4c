"""The planner: turns decisions into orders, and reports back into visible pages.

It owns every order in flight. An order is two-phase like the index it mutates: when it
is planned its slots are reserved (or acquired), when all ranks have reported it is
settled, and only then are pages visible, slots reusable and source blocks free.

One thread, no locks, nothing blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tiered_kv.keys import PageKey
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

from .cpu_index import PageIndex
from .ssd_index import SsdIndex

ASSUMED_SSD_BANDWIDTH = 1e9
"""Bytes of pages per second that a rank promotes, until the worker has measured it."""
RELEASED_AT_ONCE = 16_384
"""Pages of restores that are over which are let go after a step; others stay a step longer."""
MIN_SSD_SAMPLE = 1 << 22
"""Bytes a promotion must have moved to say something about bandwidth."""


@dataclass(frozen=True, slots=True)
class Settled:
    """An order that every rank has reported.

    Attributes:
        order: the order; its blocks may be given up now.
        keys: the order's pages, in the order of its blocks.
        failed: indices of pages whose copy failed on some rank.
        abandoned: the pages were forgotten meanwhile (a cache reset).
    """

    order: Order
    keys: tuple[PageKey, ...]
    failed: frozenset[int]
    abandoned: bool


@dataclass(slots=True)
class _Flight:
    order: Order
    keys: tuple[PageKey, ...]
    report: OrderReport | None = None
    abandoned: bool = False


class Planner:
    """Orders in flight between the indices and ``ranks`` workers.

    Args:
        index: the pages; mutated by planning and by settling.
        ranks: how many workers must report an order before it counts.
        page_bytes: bytes of a page on one rank, for the bandwidth estimates.
        bandwidth: bytes per second of one rank's copies, assumed until measured.

    Attributes:
        ssd: the pages on SSD; empty without an SSD tier.
        ssd_bandwidth: bytes of pages per second that a rank promotes.
        unsaved: pages left without a slot so far.
    """

    def __init__(self, index: PageIndex, ranks: int, page_bytes: int, bandwidth: float) -> None:
        self.index = index
        self.ssd = SsdIndex()
        self.bandwidth = bandwidth
        self.ssd_bandwidth = ASSUMED_SSD_BANDWIDTH
        self.unsaved = 0
        self._ranks = ranks
        self._page_bytes = page_bytes
        self._next_id = 0
        self._flights: dict[OrderId, _Flight] = {}
        self._promoting: dict[PageKey, OrderId] = {}
        self._demoting: set[PageKey] = set()
        self._not_yet_due: dict[OrderId, float] = {}
        self._read: deque[tuple[Sequence[PageKey], Sequence[int]]] = deque()  # not released yet

    @property
    def in_flight(self) -> int:
        """Orders not yet reported by every rank."""
        return len(self._flights)

    def saves_under_way(self) -> Iterator[SaveOrder]:
        """Saves in flight whose source blocks are still held, oldest first."""
        for flight in self._flights.values():
            if isinstance(flight.order, SaveOrder) and not flight.abandoned:
                yield flight.order

    def under_way(self, order_id: OrderId) -> bool:
        """Whether the order is in flight, and its pages still wanted."""
        flight = self._flights.get(order_id)
        return flight is not None and not flight.abandoned

    def expected(self, now: float) -> int:
        """Orders in flight that are due: those whose report is worth stepping for."""
        if self._not_yet_due:
            self._not_yet_due = {
                order: due for order, due in self._not_yet_due.items() if due > now
            }
        return len(self._flights) - len(self._not_yet_due)

    def hurry(self, orders: Iterable[OrderId], now: float) -> list[OrderId]:
        """Orders that were to be carried out later, and are wanted now; those due already are
        left out."""
        found = [one for one in orders if self._not_yet_due.get(one, now) > now]
        for one in found:
            del self._not_yet_due[one]
        return found

    @property
    def promoting(self) -> Mapping[PageKey, OrderId]:
        """Pages on their way up from SSD, and the orders that bring them."""
        return self._promoting

    @property
    def demoting(self) -> int:
        """Pages on their way down to SSD."""
        return len(self._demoting)

    def copy_seconds(self, pages: int) -> float:
        """Time one rank needs to copy that many pages, at the bandwidth seen so far."""
        return pages * self._page_bytes / self.bandwidth

    def promote_seconds(self, pages: int) -> float:
        """Time until that many pages more are up from SSD, behind those already ordered and due."""
        due = len(self._promoting) - self.ahead
        return (pages + max(0, due)) * self._page_bytes / self.ssd_bandwidth

    @property
    def ahead(self) -> int:
        """Pages on their way up that were not due when last looked at (``expected``, ``hurry``)."""
        return sum(len(self._flights[order].keys) for order in self._not_yet_due)

    # -- planning -----------------------------------------------------------------

    def plan_save(self, pages: Mapping[PageKey, int]) -> SaveOrder | None:
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
        order = SaveOrder(self._new_id(), tuple(fresh.values())[: len(slots)], slots, keys)
        self._flights[order.order_id] = _Flight(order, keys)
        return order

    def plan_load(
        self, request_id: str, keys: Sequence[PageKey], blocks: Sequence[int], mode: RestoreMode
    ) -> LoadOrder:
        """Order a copy CPU → VRAM; every page must be readable and stays so until settled.

        Raises:
            KeyError, ValueError: a page is not readable; nothing has changed.
        """
        if len(keys) != len(blocks):
            raise ValueError(f"{len(keys)} pages cannot fill {len(blocks)} blocks")
        slots = self.index.acquire_all(keys)
        order = LoadOrder(self._new_id(), request_id, tuple(blocks), tuple(slots), mode)
        self._flights[order.order_id] = _Flight(order, tuple(keys))
        return order

    def plan_demote(self, keys: Sequence[PageKey], due: float) -> DemoteOrder | None:
        """Order a copy CPU → SSD of the pages that are readable and not on SSD already.

        They stay readable meanwhile, and are not evicted. None if there are none.
        """
        wanted = tuple(
            key
            for key in dict.fromkeys(keys)
            if key not in self.ssd and key not in self._demoting and self.index.readable(key)
        )
        if not wanted:
            return None
        slots = tuple(self.index.acquire(key) for key in wanted)
        order = DemoteOrder(self._new_id(), wanted, slots, due)
        self._demoting.update(wanted)
        self._send(order)
        return order

    def plan_promote(self, keys: Sequence[PageKey], due: float) -> PromoteOrder | None:
        """Order a copy SSD → CPU of the pages that are on SSD and not in CPU memory.

        Their slots are reserved now, evicting if need be; the first pages are taken where
        slots are short. None if nothing can be ordered.
        """
        ssd, known = self.ssd, self.index.known
        wanted = [key for key in dict.fromkeys(keys) if key in ssd and not known(key)]
        slots = tuple(self.index.reserve_all(wanted)) if wanted else ()
        if not slots:
            return None
        wanted = wanted[: len(slots)]
        order = PromoteOrder(self._new_id(), tuple(wanted), slots, due)
        self._promoting.update(dict.fromkeys(wanted, order.order_id))
        self._send(order)
        return order

    def _send(self, order: DemoteOrder | PromoteOrder) -> None:
        self._flights[order.order_id] = _Flight(order, order.keys)
        if order.due > 0:
            self._not_yet_due[order.order_id] = order.due

    def cancel(self, order: SaveOrder | DemoteOrder | PromoteOrder) -> None:
        """Take back an order that was never sent: as if every page of it had failed, but
        that nothing is known against those on SSD."""
        flight = self._flights.pop(order.order_id)
        self._not_yet_due.pop(order.order_id, None)
        for key, slot in zip(flight.keys, order.slots, strict=True):
            if isinstance(order, DemoteOrder):
                self._demoting.discard(key)
                self.index.release(key, slot, used=False)
            else:
                self._promoting.pop(key, None)
                self.index.abort(key, slot)

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
        """Forget every page in CPU memory and on SSD. Slots in use are freed as orders settle."""
        for flight in self._flights.values():
            flight.abandoned = True
        self._promoting.clear()
        self._demoting.clear()
        self.index.clear()
        self.ssd.clear()

    # -- settling -----------------------------------------------------------------

    def settle(self, reports: Mapping[OrderId, OrderReport]) -> list[Settled]:
        """Take in reports; returns the orders that are now complete on every rank.

        A save's pages become readable unless their copy failed. A load's pages are
        released, and those that failed are forgotten, so that they are not tried again.
        Demoted pages are on SSD, promoted ones readable; those that could not be promoted
        are not on SSD. Reports of orders nobody knows are ignored.
        """
        done = []
        for order_id, report in reports.items():
            flight = self._flights.get(order_id)
            if flight is None:
                continue
            flight.report = flight.report.merge(report) if flight.report else report
            if flight.report.ranks < self._ranks:
                continue
            del self._flights[order_id]
            self._not_yet_due.pop(order_id, None)
            self._learn(flight.order, flight.report)
            done.append(self._finish(flight, flight.report.failed))
        self._release_some()
        return done

    def _release_some(self) -> None:
        """Let pages go that were restored before. Nobody waits for that, and it takes time."""
        pages = 0
        while self._read and pages < RELEASED_AT_ONCE:
            keys, slots = self._read.popleft()
            self.index.release_all(keys, slots)
            pages += len(keys)

    def _finish(self, flight: _Flight, failed: frozenset[int]) -> Settled:
        order, index = flight.order, self.index
        if isinstance(order, SaveOrder) and not failed:
            index.commit_all(flight.keys, order.slots)
            return Settled(order, flight.keys, failed, flight.abandoned)
        if isinstance(order, LoadOrder) and not failed:
            self._read.append((flight.keys, order.slots))
            return Settled(order, flight.keys, failed, flight.abandoned)
        pages = list(zip(flight.keys, order.slots, strict=True))
        if isinstance(order, LoadOrder):
            for i, (key, slot) in enumerate(pages):
                index.release(key, slot)
                if i in failed:
                    index.forget(key)
        elif isinstance(order, DemoteOrder):
            for key, slot in pages:
                index.release(key, slot, used=False)
            if not flight.abandoned:
                self._demoting.difference_update(flight.keys)
                self.ssd.add(key for i, key in enumerate(flight.keys) if i not in failed)
        else:
            for i in failed:
                index.abort(*pages[i])
            good = [page for i, page in enumerate(pages) if i not in failed]
            index.commit_all([key for key, _ in good], [slot for _, slot in good])
            if isinstance(order, PromoteOrder) and not flight.abandoned:
                for key in flight.keys:
                    self._promoting.pop(key, None)
                self.ssd.discard(flight.keys[i] for i in failed)
        return Settled(order, flight.keys, failed, flight.abandoned)

    def _learn(self, order: Order, report: OrderReport) -> None:
        if report.seconds <= 0:
            return
        seen = report.nbytes / report.seconds
        if isinstance(order, PromoteOrder):
            if report.nbytes >= min(MIN_SSD_SAMPLE, self._page_bytes * 8):
                self.ssd_bandwidth += 0.3 * (seen - self.ssd_bandwidth)
        elif not isinstance(order, DemoteOrder) and report.nbytes >= self._page_bytes:
            self.bandwidth += 0.2 * (seen - self.bandwidth)

    def _new_id(self) -> OrderId:
        self._next_id += 1
        return OrderId(self._next_id)
