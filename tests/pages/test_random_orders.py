"""The page index and the order book agree with the model under random operations, and the machine
detects planted bugs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.pages.machine import OrdersMachine
from tests.pages.world import BANDWIDTH, PAGE_BYTES
from tiered_kv.keys import PageKey
from tiered_kv.orders import (
    DemoteOrder,
    LoadOrder,
    LookupOrder,
    OrderId,
    OrderReport,
    PromoteOrder,
)
from tiered_kv.pages.base import PageState
from tiered_kv.pages.cold_pages import Bundle, ColdPages, cold_place
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.pages.order_book import Flight, OrderBook, Settled
from tiered_kv.pages.tier_index import TierIndex
from tiered_kv.policies.cache.lru import LeastRecentlyUsed
from tiered_kv.testing.single_pages import commit
from tiered_kv.testing.stores import SSD

# Shrinking a failing example takes minutes, so it is done only with HYPOTHESIS_PROFILE=thorough.
QUICK = [Phase.explicit, Phase.generate]
THOROUGH = settings.get_current_profile_name() == "thorough"

TestOrders = OrdersMachine.TestCase
TestOrders.settings = settings(stateful_step_count=60, phases=list(Phase) if THOROUGH else QUICK)


class CommitsBeforeAllRanks(OrderBook):
    def settle(self, reports: Mapping[OrderId, OrderReport]) -> list[Settled[Any]]:
        for order_id, report in reports.items():
            flight = self._flights.get(order_id)
            if flight is not None and not isinstance(flight.order, LoadOrder | LookupOrder):
                for i, (key, slot) in enumerate(zip(flight.keys, flight.order.slots, strict=True)):
                    if i not in report.failed and self.index.state(key) is PageState.BEING_WRITTEN:
                        commit(self.index, key, slot)
        return super().settle(reports)


class IgnoresFailures(OrderBook):
    def _finish(self, flight: Any, report: OrderReport) -> Settled[Any]:
        return super()._finish(flight, replace(report, failed=frozenset()))


class ForgetsAFailureOfTheOtherRank(OrderBook):
    def settle(self, reports: Mapping[OrderId, OrderReport]) -> list[Settled[Any]]:
        for order_id in reports:
            flight = self._flights.get(order_id)
            if flight is not None and flight.report is not None:
                ranks = flight.report.ranks
                flight.report = OrderReport(ranks, frozenset(), 0, 0.0)
        return super().settle(reports)


def settled(flight: Flight[Any], report: OrderReport) -> Settled[Any]:
    """Return a finished order without any of its effects."""
    return Settled(flight.order, flight.keys, report.failed, flight.abandoned, report.seconds)


class NeverReleases(OrderBook):
    def _finish(self, flight: Any, report: OrderReport) -> Settled[Any]:
        if isinstance(flight.order, LoadOrder):
            return settled(flight, report)
        return super()._finish(flight, report)


class TriesAFailedPageAgain(OrderBook):
    def _finish(self, flight: Any, report: OrderReport) -> Settled[Any]:
        if isinstance(flight.order, LoadOrder):
            for key, slot in zip(flight.keys, flight.order.slots, strict=True):
                self.index.release(key, slot)
            return settled(flight, report)
        return super()._finish(flight, report)


class KeepsAbandonedPages(OrderBook):
    def abandon_saves(self) -> list[Any]:
        index, self.index = self.index, PageIndex(0, LeastRecentlyUsed())
        try:
            return super().abandon_saves()
        finally:
            self.index = index


class EvictsWhatIsRead(PageIndex):
    def acquire(self, key: PageKey) -> int:
        return self._resident[key]

    def release(self, key: PageKey, slot: int, *, used: bool = True) -> None:
        pass


class FreesSlotsInUse(PageIndex):
    """An index that frees the slots of pages in use. The index stays consistent, so only the bytes
    reveal the bug."""

    def forget(self, key: PageKey) -> None:
        if key in self._resident:
            self._eviction.removed(key)
        for pages in (self._being_written, self._resident):
            if key in pages:
                self._free.append(slot := pages.pop(key))
                self._reading -= self._reads[slot]
                self._reads[slot] = 0

    def _bury(self, key: PageKey, slot: int) -> None:
        pass


class ReadsBeforeItIsWhole(PageIndex):
    def reserve_all(self, keys: Sequence[PageKey]) -> list[int]:
        slots = super().reserve_all(keys)
        super().commit_all(keys[: len(slots)], slots)
        return slots

    def commit_all(self, keys: Sequence[PageKey], slots: Sequence[int]) -> Sequence[PageKey]:
        return [key for key in keys if self.state(key) is not PageState.MISSING]


class EvictsBundlesThatAreRead(ColdPages):
    def droppable(self, key: PageKey) -> Bundle | None:
        bundle = self._of[key]
        return bundle if bundle.state is PageState.COMPRESSED else None

    def release(self, place: int, copies: int = 1) -> list[int]:
        return super().release(place, copies) if cold_place(place) in self._bundles else []


class EvictsBundlesBeforeTheyArePacked(ColdPages):
    def droppable(self, key: PageKey) -> Bundle | None:
        bundle = self._of[key]
        return None if bundle.readers else bundle

    def finish(self, first_slot: int, kept: int) -> tuple[Sequence[PageKey], list[int]]:
        known = first_slot in self._bundles
        return super().finish(first_slot, kept) if known else ((), [])


class ReadsBeforeItIsPacked(ColdPages):
    def state(self, key: PageKey) -> PageState:
        return PageState.COMPRESSED if key in self._of else PageState.MISSING


class FreesSlotsThatAreStillPacked(ColdPages):
    def forget(self, key: PageKey) -> list[int]:
        bundle = self._of[key]
        if bundle.state is PageState.BEING_COMPRESSED:
            bundle.state = PageState.COMPRESSED
            self.readable.update(bundle.keys)
        return super().forget(key)


class KeepsOneSlotTooFew(ColdPages):
    def finish(self, first_slot: int, kept: int) -> tuple[Sequence[PageKey], list[int]]:
        return super().finish(first_slot, max(1, kept - 1) if kept else 0)


class KeepsWhatCouldNotBePacked(ColdPages):
    def finish(self, first_slot: int, kept: int) -> tuple[Sequence[PageKey], list[int]]:
        return super().finish(first_slot, kept or len(self._bundles[first_slot].slots))


class BelievesAFailedDemotion(OrderBook):
    def _finish(self, flight: Any, report: OrderReport) -> Settled[Any]:
        if isinstance(flight.order, DemoteOrder):
            report = replace(report, failed=frozenset())
        return super()._finish(flight, report)


class TrustsAFailedPromotion(OrderBook):
    def _finish(self, flight: Any, report: OrderReport) -> Settled[Any]:
        if isinstance(flight.order, PromoteOrder):
            report = replace(report, failed=frozenset())
        return super()._finish(flight, report)


class ForgetsNothingOnSsd(OrderBook):
    def forget_all(self) -> None:
        kept = list(self.stores[SSD].index)
        super().forget_all()
        self.stores[SSD].index.add(kept)


PLANNERS = [
    CommitsBeforeAllRanks,
    IgnoresFailures,
    ForgetsAFailureOfTheOtherRank,
    NeverReleases,
    TriesAFailedPageAgain,
    KeepsAbandonedPages,
    BelievesAFailedDemotion,
    TrustsAFailedPromotion,
    ForgetsNothingOnSsd,
]
INDEXES = [EvictsWhatIsRead, FreesSlotsInUse, ReadsBeforeItIsWhole]
COLD_PAGES = [
    EvictsBundlesThatAreRead,
    EvictsBundlesBeforeTheyArePacked,
    ReadsBeforeItIsPacked,
    FreesSlotsThatAreStillPacked,
    KeepsOneSlotTooFew,
    KeepsWhatCouldNotBePacked,
]
HUNT = settings(max_examples=500, stateful_step_count=60, phases=QUICK, report_multiple_bugs=False)


@pytest.mark.parametrize("broken", [*PLANNERS, *INDEXES, *COLD_PAGES])
def test_the_machine_detects_a_broken_part(broken: type[Any]) -> None:
    class Machine(OrdersMachine):
        def make(self, num_slots: int, ranks: int) -> OrderBook:
            index = broken if broken in INDEXES else PageIndex
            book: OrderBook = (broken if broken in PLANNERS else OrderBook)(
                index(num_slots, LeastRecentlyUsed()),
                ranks,
                [PAGE_BYTES],
                BANDWIDTH,
                {SSD: TierIndex()},
            )
            if broken in COLD_PAGES:
                book.index.cold = broken()
            return book

    with pytest.raises((AssertionError, ValueError, KeyError)):
        run_state_machine_as_test(Machine, settings=HUNT)


class OneWrongByte(OrdersMachine):
    """A worker that damages a single page on a single rank, and reports success."""

    def transported(self, content: bytes) -> bytes:
        return content.replace(b"save 3 rank 1", b"save 4 rank 1")


def test_the_machine_detects_a_single_wrong_page() -> None:
    with pytest.raises(AssertionError, match="a wrong page"):
        run_state_machine_as_test(OneWrongByte, settings=HUNT)
