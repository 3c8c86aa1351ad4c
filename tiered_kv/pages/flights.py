"""Orders in flight, and the bandwidth that is learned from their reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tiered_kv.keys import PageKey
from tiered_kv.orders import LoadOrder, Order, OrderReport, PromoteOrder, SaveOrder

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
