"""Orders for snapshots: pages of CPU memory that are written to one, or read from one.

They are two-phase, as those of the order book. Pages that are written stay where they are until
every rank has reported. Pages that are read have slots of their own from the first, and are found
only once all of them are there, on every rank.

One thread, no locks, nothing blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from tiered_kv.keys import PageKey
from tiered_kv.orders import ExportOrder, ImportOrder, OrderId, OrderReport, SnapshotOrder

from .cpu_index import PageIndex


@dataclass(frozen=True, slots=True)
class ContextPage:
    """A page of a context: that of a block of its group's table."""

    group: int
    block: int
    key: PageKey


@dataclass(slots=True)
class _Flight:
    order: SnapshotOrder
    report: OrderReport | None = None


class SnapshotOrders:
    """Orders for snapshots that are in flight.

    Args:
        ranks: how many workers must report an order before it counts.
    """

    def __init__(self, index: PageIndex, ranks: int) -> None:
        self._index = index
        self._ranks = ranks
        self._ids = map(OrderId, count(-1, -1))
        self._flights: dict[OrderId, _Flight] = {}
        self._failed: dict[OrderId, int] = {}
        self.unsent: list[SnapshotOrder] = []

    @property
    def in_flight(self) -> int:
        """Orders not yet reported by every rank."""
        return len(self._flights)

    def take(self) -> tuple[SnapshotOrder, ...]:
        """Hand over the orders not yet sent."""
        orders, self.unsent = tuple(self.unsent), []
        return orders

    def write(self, folder: str, pages: Sequence[ContextPage]) -> OrderId:
        """Order readable pages to be written.

        Raises:
            KeyError, ValueError: one of them is not readable; nothing has changed.
        """
        keys = tuple(page.key for page in pages)
        slots = tuple(self._index.acquire_all(keys))
        groups, blocks = _places(pages)
        order = ExportOrder(next(self._ids), folder, groups, blocks, keys, slots)
        return self._begin(order)

    def read(self, path: str, pages: Sequence[ContextPage]) -> OrderId | None:
        """Order pages to be read that CPU memory does not know; None if it has no room for all of
        them now."""
        keys = tuple(page.key for page in pages)
        slots = tuple(self._index.reserve_all(keys))
        if len(slots) < len(keys):
            for key, slot in zip(keys, slots, strict=False):
                self._index.abort(key, slot)
            return None
        groups, blocks = _places(pages)
        return self._begin(ImportOrder(next(self._ids), path, groups, blocks, keys, slots))

    def _begin(self, order: SnapshotOrder) -> OrderId:
        self._flights[order.order_id] = _Flight(order)
        self.unsent.append(order)
        return order.order_id

    def over(self, order_id: OrderId) -> bool:
        """True once every rank has reported the order."""
        return order_id not in self._flights

    def failures(self, order_id: OrderId) -> int:
        """Pages of an order that is over that some rank could not move; told once."""
        return self._failed.pop(order_id, 0)

    def settle(self, reports: Mapping[OrderId, OrderReport]) -> None:
        """Take in reports. Those of other orders are ignored."""
        if not self._flights:
            return
        for order_id, report in reports.items():
            flight = self._flights.get(order_id)
            if flight is None:
                continue
            flight.report = flight.report.merge(report) if flight.report else report
            if flight.report.ranks == self._ranks:
                del self._flights[order_id]
                self._finish(flight.order, flight.report)

    def _finish(self, order: SnapshotOrder, report: OrderReport) -> None:
        index = self._index
        if report.failed:
            self._failed[order.order_id] = len(report.failed)
        if isinstance(order, ExportOrder):
            for key, slot in zip(order.keys, order.slots, strict=True):
                index.release(key, slot, used=False)
        elif report.failed:
            for key, slot in zip(order.keys, order.slots, strict=True):
                index.abort(key, slot)
        elif index.commit_all(order.keys, order.slots) < len(order.keys):
            self._failed[order.order_id] = len(order.keys)  # a reset came between


def _places(pages: Sequence[ContextPage]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(page.group for page in pages), tuple(page.block for page in pages)
