"""The planner: turns decisions into orders, and reports back into visible pages.

It owns every order in flight. An order is two-phase like the index it mutates: when it
is planned its slots are reserved (or acquired), when all ranks have reported it is
settled, and only then are pages visible, slots reusable and source blocks free.

One thread, no locks, nothing blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiered_kv.index import PageIndex
from tiered_kv.keys import PageKey
from tiered_kv.orders import LoadOrder, OrderId, OrderReport, RestoreMode, SaveOrder


@dataclass(frozen=True, slots=True)
class Settled:
    """An order that every rank has reported.

    Attributes:
        order: the order; its blocks may be given up now.
        keys: the order's pages, in the order of its blocks.
        failed: indices of pages whose copy failed on some rank.
        abandoned: the pages were forgotten meanwhile (a cache reset).
    """

    order: SaveOrder | LoadOrder
    keys: tuple[PageKey, ...]
    failed: frozenset[int]
    abandoned: bool


@dataclass(slots=True)
class _Flight:
    order: SaveOrder | LoadOrder
    keys: tuple[PageKey, ...]
    report: OrderReport | None = None
    abandoned: bool = False


class Planner:
    """Orders in flight between the index and ``ranks`` workers.

    Args:
        index: the pages; mutated by planning and by settling.
        ranks: how many workers must report an order before it counts.
        page_bytes: bytes of a page on one rank, for the bandwidth estimate.
        bandwidth: bytes per second of one rank's copies, assumed until measured.
    """

    def __init__(self, index: PageIndex, ranks: int, page_bytes: int, bandwidth: float) -> None:
        self.index = index
        self.bandwidth = bandwidth
        self.unsaved = 0
        self._ranks = ranks
        self._page_bytes = page_bytes
        self._next_id = 0
        self._flights: dict[OrderId, _Flight] = {}

    @property
    def in_flight(self) -> int:
        """Orders not yet reported by every rank."""
        return len(self._flights)

    def copy_seconds(self, pages: int) -> float:
        """Time one rank needs to copy that many pages, at the bandwidth seen so far."""
        return pages * self._page_bytes / self.bandwidth

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
        blocks = tuple(fresh.values())[: len(slots)]
        order = SaveOrder(self._new_id(), blocks, slots)
        self._flights[order.order_id] = _Flight(order, keys[: len(slots)])
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
        slots: list[int] = []
        try:
            for key in keys:
                slots.append(self.index.acquire(key))
        except (KeyError, ValueError):
            for key, slot in zip(keys, slots, strict=False):
                self.index.release(key, slot)
            raise
        order = LoadOrder(self._new_id(), request_id, tuple(blocks), tuple(slots), mode)
        self._flights[order.order_id] = _Flight(order, tuple(keys))
        return order

    def cancel(self, order: SaveOrder) -> None:
        """Take back a save that was never sent."""
        flight = self._flights.pop(order.order_id)
        for key, slot in zip(flight.keys, order.slots, strict=True):
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

    def settle(self, reports: Mapping[OrderId, OrderReport]) -> list[Settled]:
        """Take in reports; returns the orders that are now complete on every rank.

        A save's pages become readable unless their copy failed. A load's pages are
        released, and those that failed are forgotten, so that they are not tried again.
        Reports of orders nobody knows are ignored.
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
            self._learn(flight.report)
            done.append(self._finish(flight, flight.report.failed))
        return done

    def _finish(self, flight: _Flight, failed: frozenset[int]) -> Settled:
        order, index = flight.order, self.index
        if isinstance(order, SaveOrder) and not failed:
            index.commit_all(flight.keys, order.slots)
            return Settled(order, flight.keys, failed, flight.abandoned)
        pages = list(zip(flight.keys, order.slots, strict=True))
        if isinstance(order, LoadOrder):
            for i, (key, slot) in enumerate(pages):
                index.release(key, slot)
                if i in failed:
                    index.forget(key)
        else:
            for i in failed:
                index.abort(*pages[i])
            good = [page for i, page in enumerate(pages) if i not in failed]
            index.commit_all([key for key, _ in good], [slot for _, slot in good])
        return Settled(order, flight.keys, failed, flight.abandoned)

    def _learn(self, report: OrderReport) -> None:
        if report.seconds > 0 and report.nbytes >= self._page_bytes:
            seen = report.nbytes / report.seconds
            self.bandwidth += 0.2 * (seen - self.bandwidth)

    def _new_id(self) -> OrderId:
        self._next_id += 1
        return OrderId(self._next_id)
