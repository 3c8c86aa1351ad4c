"""Orders for snapshots: pages of CPU memory that are written to one, or read from one.

They are two-phase, like the orders of the order book. Pages that are written stay where they are
until every rank has reported. Pages that are read have slots of their own from the start, and can
be found only once all of them have arrived, on every rank.

One thread, no locks, nothing blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from tiered_kv.keys import PageKey
from tiered_kv.orders import ExportOrder, ImportOrder, OrderId, OrderReport, SnapshotOrder

from .cpu_index import PageIndex
from .held_pages import HeldPages


@dataclass(frozen=True, slots=True)
class ContextPage:
    """A page of a context: that of a block of its group's table."""

    group: int
    block: int
    key: PageKey


@dataclass(slots=True, eq=False)
class SnapshotFlight:
    """An order for a snapshot, until every rank has reported it. Written by ``SnapshotOrders``.

    Attributes:
        report: the reports so far, merged.
        failed: number of pages that some rank could not move; None until every rank has reported.
    """

    order: SnapshotOrder
    report: OrderReport | None = None
    failed: int | None = None

    @property
    def over(self) -> bool:
        """True once every rank has reported the order."""
        return self.failed is not None


class SnapshotOrders:
    """Orders for snapshots that are in flight. Results stay with their ``SnapshotFlight``.

    Args:
        ranks: how many workers must report an order before it counts.
    """

    def __init__(self, index: PageIndex, ranks: int) -> None:
        self._index = index
        self._ranks = ranks
        self._ids = map(OrderId, count(-1, -1))
        self._flights: dict[OrderId, SnapshotFlight] = {}
        self.unsent: list[SnapshotOrder] = []

    @property
    def in_flight(self) -> int:
        """Orders not yet reported by every rank."""
        return len(self._flights)

    def take(self) -> tuple[SnapshotOrder, ...]:
        """Hand over the orders not yet sent."""
        orders, self.unsent = tuple(self.unsent), []
        return orders

    def write(self, folder: str, pages: Sequence[ContextPage], held: HeldPages) -> SnapshotFlight:
        """Order held pages to be written. The order holds them from now on, until every rank has
        reported it.

        Raises:
            KeyError: a page is not held.
        """
        keys = tuple(page.key for page in pages)
        groups, blocks = _places(pages)
        slots = held.hand_over(keys)
        return self._begin(ExportOrder(next(self._ids), folder, groups, blocks, keys, slots))

    def read(self, path: str, pages: Sequence[ContextPage]) -> SnapshotFlight | None:
        """Order pages to be read that CPU memory does not know; None if it has no slots for all of
        them now."""
        keys = tuple(page.key for page in pages)
        slots = tuple(self._index.reserve_all(keys))
        if len(slots) < len(keys):
            for key, slot in zip(keys, slots, strict=False):
                self._index.abort(key, slot)
            return None
        groups, blocks = _places(pages)
        return self._begin(ImportOrder(next(self._ids), path, groups, blocks, keys, slots))

    def _begin(self, order: SnapshotOrder) -> SnapshotFlight:
        flight = self._flights[order.order_id] = SnapshotFlight(order)
        self.unsent.append(order)
        return flight

    def settle(self, reports: Mapping[OrderId, OrderReport]) -> None:
        """Handle the workers' reports. Those of other orders are ignored."""
        if not self._flights:
            return
        for order_id, report in reports.items():
            flight = self._flights.get(order_id)
            if flight is None:
                continue
            flight.report = flight.report.merge(report) if flight.report else report
            if flight.report.ranks == self._ranks:
                del self._flights[order_id]
                flight.failed = len(flight.report.failed)
                self._finish(flight.order, failed=flight.failed > 0)

    def _finish(self, order: SnapshotOrder, *, failed: bool) -> None:
        index = self._index
        if isinstance(order, ExportOrder):
            for key, slot in zip(order.keys, order.slots, strict=True):
                index.release(key, slot, used=False)
        elif failed:
            for key, slot in zip(order.keys, order.slots, strict=True):
                index.abort(key, slot)
        else:
            index.commit_all(order.keys, order.slots)


def _places(pages: Sequence[ContextPage]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(page.group for page in pages), tuple(page.block for page in pages)
