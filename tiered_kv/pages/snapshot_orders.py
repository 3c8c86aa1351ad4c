"""Orders for snapshots of jobs: orders that are not sent yet, and the results of orders that were
sent.

The order book keeps the orders in flight. Pages that are written keep their slots until every
rank has reported. Pages that are read have their own slots from the start, and can be found only
once all of them have arrived on every rank. Single-threaded; no method blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.orders import ContextPage, OrderId, Outbox, SnapshotOrder

from .held_pages import HeldPages
from .order_book import OrderBook, Settled


@dataclass(slots=True, eq=False)
class SnapshotFlight:
    """An order for a snapshot. Written by ``SnapshotOrders``.

    Attributes:
        failed: number of pages that some rank could not move; None until every rank has reported.
    """

    order: SnapshotOrder
    failed: int | None = None

    @property
    def over(self) -> bool:
        """True once every rank has reported the order."""
        return self.failed is not None


class SnapshotOrders:
    """Orders for snapshots. Each result is stored in its ``SnapshotFlight``.

    Attributes:
        unsent: orders not yet sent.
    """

    def __init__(self, book: OrderBook) -> None:
        self._book = book
        self._flights: dict[OrderId, SnapshotFlight] = {}
        self.unsent = Outbox[SnapshotOrder]()

    @property
    def in_flight(self) -> int:
        """Number of orders not yet reported by every rank."""
        return len(self._flights)

    def write(self, folder: str, pages: Sequence[ContextPage], held: HeldPages) -> SnapshotFlight:
        """Order held pages to be written into the snapshot in ``folder``, and add the order to
        ``unsent``. See ``OrderBook.plan_export``."""
        return self._begin(self._book.plan_export(folder, pages, held))

    def read(self, path: str, pages: Sequence[ContextPage]) -> SnapshotFlight | None:
        """Order missing pages to be read from the snapshot at ``path``, and add the order to
        ``unsent``. Returns None if there are not enough slots. See ``OrderBook.plan_import``."""
        order = self._book.plan_import(path, pages)
        return self._begin(order) if order is not None else None

    def _begin(self, order: SnapshotOrder) -> SnapshotFlight:
        flight = self._flights[order.order_id] = SnapshotFlight(order)
        self.unsent.append(order)
        return flight

    def on_settled(self, done: Settled[SnapshotOrder]) -> None:
        """Record the result of an order that every rank has reported."""
        self._flights.pop(done.order.order_id).failed = len(done.failed)
