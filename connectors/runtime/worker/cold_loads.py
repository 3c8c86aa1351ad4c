"""Restores of which some pages are compressed: two copies, whose results become that of one."""

from __future__ import annotations

from tiered_kv.orders import LoadOrder, OrderId
from tiered_kv.transfer.base import CopyJob, CopyResult, Direction


class ColdLoads:
    """Restores in two parts: the pages that are not compressed, and the rest."""

    def __init__(self) -> None:
        self._raw: dict[OrderId, list[int]] = {}  # places of the pages that are not compressed
        self._first: dict[OrderId, CopyResult] = {}

    def split(self, order: LoadOrder) -> CopyJob | None:
        """The copy of an order's pages that are not compressed; None if all are."""
        raw = [i for i, slot in enumerate(order.slots) if slot >= 0]
        if not raw:
            return None
        self._raw[order.order_id] = raw
        blocks, slots = [order.blocks[i] for i in raw], [order.slots[i] for i in raw]
        return CopyJob(order.order_id, Direction.LOAD, blocks, slots, order.group)

    def on_raw(self, result: CopyResult) -> CopyResult | None:
        """Take in the result of a copy of pages that are not compressed; gives that of its order,
        None until both parts are over."""
        raw = self._raw.get(OrderId(result.job_id))
        if raw is None:
            return result
        failed = frozenset(raw[i] for i in result.failed)
        return self._merge(CopyResult(result.job_id, failed, result.nbytes, result.seconds))

    def on_cold(self, result: CopyResult) -> CopyResult | None:
        """The same for the other part, whose indices are those of the order."""
        return self._merge(result) if OrderId(result.job_id) in self._raw else result

    def _merge(self, result: CopyResult) -> CopyResult | None:
        order_id = OrderId(result.job_id)
        first = self._first.pop(order_id, None)
        if first is None:
            self._first[order_id] = result
            return None
        del self._raw[order_id]
        return CopyResult(
            result.job_id,
            first.failed | result.failed,
            first.nbytes + result.nbytes,
            max(first.seconds, result.seconds),
        )
