"""The order book: creates orders for decisions, and makes pages visible when orders are reported.

The book owns every order in flight, of any type. An order has two phases. When it is planned, its
slots are reserved or acquired in the index. When all ranks have reported it, it is settled. Only
then do pages become visible, slots reusable and source blocks free.

Single-threaded, no locks, and no method blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count, filterfalse, islice
from typing import Any, Generic, TypeVar

from tiered_kv.keys import PageKey
from tiered_kv.orders import (
    ContextPage,
    DemoteOrder,
    ExportOrder,
    ImportOrder,
    LoadOrder,
    LookupOrder,
    Order,
    OrderId,
    OrderKind,
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
from .held_pages import HeldPages
from .tier_index import TierIndex, TierPages

MIN_SAMPLE = 1 << 22
"""Minimum size of a promotion that updates the bandwidth estimate, bytes. If eight pages are
smaller than this, eight pages are enough."""
SETTLED_AT_ONCE = 2048
"""Approximate number of pages of reported orders that are settled per step. Further orders are
settled in the next step."""

AnyOrder = TypeVar("AnyOrder", bound=Order)
DoneOrder = TypeVar("DoneOrder", bound=Order, covariant=True)


@dataclass(slots=True)
class Flight(Generic[AnyOrder]):
    """An order in flight.

    Attributes:
        keys: pages of the order.
        report: merged reports of the ranks so far; None before the first report.
        abandoned: True if the pages were forgotten in the meantime.
    """

    order: AnyOrder
    keys: tuple[PageKey, ...]
    report: OrderReport | None = None
    abandoned: bool = False


@dataclass(frozen=True, slots=True)
class Settled(Generic[DoneOrder]):
    """An order that every rank has reported.

    Attributes:
        order: the order. Its blocks may be freed now.
        keys: the order's pages, in the order of its blocks.
        failed: indices of pages whose copy failed on some rank.
        abandoned: True if the pages were forgotten in the meantime (a cache reset).
        seconds: time that the slowest rank spent on the order.
    """

    order: DoneOrder
    keys: tuple[PageKey, ...]
    failed: frozenset[int]
    abandoned: bool
    seconds: float

    @property
    def good(self) -> Sequence[PageKey]:
        """Return the pages whose copy succeeded on every rank, in the same order."""
        if not self.failed:
            return self.keys
        if len(self.failed) == len(self.keys):
            return ()
        return [key for i, key in enumerate(self.keys) if i not in self.failed]


class OrderBook:
    """Orders in flight between the indices and ``ranks`` workers.

    Args:
        index: the pages in CPU memory; mutated by planning and by settling.
        ranks: number of workers that must report an order before it is settled.
        page_bytes: size of a page of each group on one rank, bytes, for the bandwidth estimates.
        bandwidth: assumed copy rate of one rank until it is measured, bytes per second.
        stores: indices of the lower tiers, fastest first.

    Attributes:
        stores: pages of the lower tiers, fastest first.
        page_bytes: size of a page of each group on the rank where it is largest, bytes.
        unsaved: number of pages that were not saved so far, because they got no slot.
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
        self._flights: dict[OrderId, Flight[Any]] = {}
        self._of_kind: dict[OrderKind, dict[OrderId, Flight[Any]]] = {k: {} for k in OrderKind}
        self._settle: Mapping[OrderKind, Callable[[Settled[Any], OrderReport], None]] = {
            OrderKind.SAVE: self._saved,
            OrderKind.LOAD: self._loaded,
            OrderKind.PACK: self._packed,
            OrderKind.DEMOTE: self._demoted,
            OrderKind.PROMOTE: self._promoted,
            OrderKind.LOOK_UP: self._looked_up,
            OrderKind.EXPORT: self._exported,
            OrderKind.IMPORT: self._imported,
        }
        self._promoting: dict[PageKey, OrderId] = {}
        self._not_yet_due: dict[OrderId, float] = {}
        # Reported by every rank, not settled yet.
        self._reported: deque[tuple[Flight[Any], OrderReport]] = deque()
        self._read: deque[tuple[Sequence[PageKey], Sequence[int]]] = deque()  # not released yet

    @property
    def in_flight(self) -> int:
        """Number of orders not yet reported by every rank."""
        return len(self._flights)

    @property
    def behind(self) -> bool:
        """True if ``settle`` has work left, even without new reports."""
        return bool(self._reported or self._read)

    def flights(self) -> Iterable[Flight[Any]]:
        """Return all orders in flight, oldest first."""
        return self._flights.values()

    def number(self, kind: OrderKind) -> int:
        """Return the number of orders of a type in flight."""
        return len(self._of_kind[kind])

    def saves_under_way(self) -> Iterator[SaveOrder]:
        """Yield the saves in flight whose source blocks are still held, oldest first."""
        for flight in self._of_kind[OrderKind.SAVE].values():
            if not flight.abandoned:
                yield flight.order

    def under_way(self, order_id: OrderId) -> bool:
        """True if the order is in flight and its pages are still needed."""
        flight = self._flights.get(order_id)
        return flight is not None and not flight.abandoned

    def expected(self, now: float) -> int:
        """Return the number of orders in flight that are due. An idle engine runs a step to
        receive their reports."""
        if self._not_yet_due:
            self._not_yet_due = {
                order: due for order, due in self._not_yet_due.items() if due > now
            }
        return len(self._flights) - len(self._not_yet_due)

    def expedite(self, orders: Iterable[OrderId], now: float) -> list[PromoteOrder]:
        """Make deferred promotions due now. Returns the promotions that were not yet due."""
        early = [one for one in orders if self._not_yet_due.pop(one, now) > now]
        up = self._of_kind[OrderKind.PROMOTE]
        return [up[one].order for one in early if one in up]

    def store_of(self, order_id: OrderId) -> StoreId:
        """Return the store for which an order was planned. Raises KeyError if the order is not in
        flight; the order must be a demotion, a promotion or a lookup."""
        order: StoreOrder = self._flights[order_id].order
        return order.store

    @property
    def promoting(self) -> Mapping[PageKey, OrderId]:
        """Return the pages being promoted to CPU memory, each with the order that promotes it."""
        return self._promoting

    def copy_seconds(self, pages: int, group: int = CONTEXT) -> float:
        """Return the time that one rank needs to copy ``pages`` pages at the measured bandwidth,
        seconds."""
        return pages * self.page_bytes[group] / self.bandwidth

    def promote_seconds(self, store: StoreId, pages: int) -> float:
        """Return the time until ``pages`` more pages are promoted from a store, after the
        promotions that are already ordered and due, seconds."""
        state = self.stores[store]
        due = state.promoting - self.ahead(store)
        return (pages + max(0, due)) * self.page_bytes[store.group] / state.bandwidth

    def ahead(self, store: StoreId | None = None) -> int:
        """Return the number of pages being promoted, from one store or from all, that were not due
        at the last call of ``expected`` or ``expedite``."""
        up = self._of_kind[OrderKind.PROMOTE]
        orders = (up[order_id].order for order_id in self._not_yet_due if order_id in up)
        return sum(len(order.keys) for order in orders if store in (None, order.store))

    def stored_nowhere(self, keys: Collection[PageKey]) -> Collection[PageKey]:
        """Return the keys that no lower tier has, in the same order."""
        for tier in self.stores.values():
            keys = tier.index.absent(keys)
        return keys

    # -- planning -----------------------------------------------------------------

    def plan_save(
        self, pages: Mapping[PageKey, int], group: int = CONTEXT, before: SaveOrder | None = None
    ) -> SaveOrder | None:
        """Order a VRAM → CPU copy of the missing pages among ``pages``.

        Returns None if no page is missing or no slot is available. Pages left without a slot are
        not saved, and are counted in ``unsaved``.

        Args:
            pages: pages to save, each with the VRAM block that contains it.
            before: unsent order of the group that the new order replaces and includes. If the
                method returns None, this order remains valid.
        """
        fresh = self.index.missing(pages)
        if not fresh:
            return None
        keys = tuple(fresh)
        slots = tuple(self.index.reserve_all(keys))
        self.unsaved += len(keys) - len(slots)
        if not slots:
            return None
        keys, blocks = keys[: len(slots)], tuple(fresh.values())[: len(slots)]
        order_id = next(self._ids) if before is None else before.order_id
        if before is not None:
            keys, blocks, slots = before.keys + keys, before.blocks + blocks, before.slots + slots
        order = SaveOrder(order_id, group, blocks, slots, keys)
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
        """Order a CPU → VRAM copy. Every page must be readable, and stays readable until the order
        is settled.

        Raises:
            KeyError: a page is not readable. In this case nothing changes.
            ValueError: the numbers of pages and blocks differ.
        """
        if len(keys) != len(blocks):
            raise ValueError(f"{len(keys)} pages cannot fill {len(blocks)} blocks")
        where, slots = tuple(blocks), tuple(self.index.acquire_all(keys))
        self.index.promoted.read(keys)
        cold = tuple(compress(keys, map((0).__gt__, slots))) if self.index.cold.compressed else ()
        order = LoadOrder(next(self._ids), group, request_id, where, slots, mode, more, cold)
        self._begin(order, tuple(keys))
        return order

    def plan_pack(self, keys: Sequence[PageKey], group: int) -> PackOrder:
        """Order resident pages that no copy reads to be compressed together, in place. Raises
        KeyError if a page is not resident."""
        slots = tuple(self.index.pack(keys))
        order = PackOrder(next(self._ids), group, slots, tuple(keys))
        self._begin(order, order.keys)
        return order

    def plan_demote(
        self, store: StoreId, keys: Sequence[PageKey], due: float, most: int | None = None
    ) -> DemoteOrder | None:
        """Order a CPU → tier copy of the pages that are readable, not yet in the tier, and not
        being demoted to it already.

        The pages stay readable meanwhile, and are not evicted. Returns None if there are no such
        pages.

        Args:
            most: maximum number of pages, counted from the first; None for all.
        """
        state = self.stores[store]
        lacked = [*state.index.unwritten(dict.fromkeys(keys))]
        gone = {*self.index.unreadable(lacked)}
        there = filterfalse(gone.__contains__, lacked)
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
        """Order a tier → CPU copy of the missing pages among ``keys`` that the tier has.

        The slots are reserved now, evicting pages if needed. If there are too few slots, only the
        first pages are promoted. Returns None if no page can be promoted.
        """
        state = self.stores[store]
        wanted = state.index.present(self.index.missing(dict.fromkeys(keys)).keys())
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
        """Order a lookup of these pages in the tier. Returns None if the tier's index already has
        the answer for all of them."""
        wanted = tuple(self.stores[store].index.unanswered(keys))
        if not wanted:
            return None
        order = LookupOrder(next(self._ids), store, wanted, deadline_s)
        self._send(order, 0.0)
        return order

    def plan_export(
        self, folder: str, pages: Sequence[ContextPage], held: HeldPages
    ) -> ExportOrder:
        """Order held pages to be written into a snapshot. The order holds them from now on, until
        it is settled.

        Raises:
            KeyError: a page is not held.
        """
        keys = tuple(page.key for page in pages)
        slots, (groups, blocks) = held.hand_over(keys), _places(pages)
        order = ExportOrder(next(self._ids), folder, groups, blocks, keys, slots)
        self._begin(order, keys)
        return order

    def plan_import(self, path: str, pages: Sequence[ContextPage]) -> ImportOrder | None:
        """Order missing pages to be read from a snapshot. Returns None if there are not enough
        slots for all of them now. The pages become readable together, once all of them have
        arrived."""
        keys = tuple(page.key for page in pages)
        slots = tuple(self.index.reserve_all(keys))
        if len(slots) < len(keys):
            for key, slot in zip(keys, slots, strict=False):
                self.index.abort(key, slot)
            return None
        groups, blocks = _places(pages)
        order = ImportOrder(next(self._ids), path, groups, blocks, keys, slots)
        self._begin(order, keys)
        return order

    def _send(self, order: StoreOrder, due: float) -> None:
        self._begin(order, order.keys)
        if due > 0:
            self._not_yet_due[order.order_id] = due

    def _begin(self, order: Order, keys: tuple[PageKey, ...]) -> None:
        flight = Flight(order, keys)
        self._flights[order.order_id] = self._of_kind[order.kind][order.order_id] = flight

    def _end(self, order_id: OrderId) -> Flight[Any]:
        flight = self._flights.pop(order_id)
        self._not_yet_due.pop(order_id, None)
        del self._of_kind[flight.order.kind][order_id]
        return flight

    def cancel(self, order: SaveOrder | StoreOrder) -> None:
        """Cancel an order that was never sent. The effect is the same as if all its pages had
        failed, except that pages in a tier remain recorded as present."""
        flight = self._end(order.order_id)
        if isinstance(order, LookupOrder):
            return
        for key, slot in zip(flight.keys, order.slots, strict=True):
            if isinstance(order, DemoteOrder):
                self.stores[order.store].end_demotion((key,))
                self.index.release(key, slot, used=False)
            else:
                self._promoting.pop(key, None)
                self.index.abort(key, slot)
        if isinstance(order, PromoteOrder) and not flight.abandoned:
            self.stores[order.store].promoting -= len(flight.keys)

    def abandon_saves(self) -> list[SaveOrder]:
        """Forget the pages of every save in flight, so that their source blocks may be freed.

        The slots stay allocated until the workers report, because bytes are still being copied to
        them. Returns the abandoned orders.
        """
        abandoned = []
        for flight in self._of_kind[OrderKind.SAVE].values():
            if not flight.abandoned:
                flight.abandoned = True
                for key in flight.keys:
                    self.index.forget(key)
                abandoned.append(flight.order)
        return abandoned

    def forget_all(self) -> None:
        """Forget every page in all tiers. Slots in use are freed as their orders settle."""
        for flight in self._flights.values():
            flight.abandoned = True
        self._promoting.clear()
        self.index.clear()
        for tier in self.stores.values():
            tier.promoting = 0
            tier.end_demotion([*tier.demoting])
            tier.index.clear()

    # -- settling -----------------------------------------------------------------

    def settle(self, reports: Mapping[OrderId, OrderReport]) -> list[Settled[Any]]:
        """Handle reports. Returns the orders that are settled: complete on every rank.

        Reports of restores are handled immediately, because requests wait for them. If there are
        many other pages, some orders are settled in later calls.

        A save's pages become readable unless their copy failed. A load's pages are released, and
        pages that failed are forgotten, so that they are not tried again. Demoted pages are added
        to their tier, and promoted pages become readable. Pages that could not be promoted are
        removed from their tier. Reports of unknown orders are ignored.
        """
        done = []
        for order_id, report in reports.items():
            flight = self._flights.get(order_id)
            if flight is None or self._is_reported(flight):
                continue
            flight.report = flight.report.merge(report) if flight.report else report
            if not self._is_reported(flight):
                continue
            if flight.order.kind is OrderKind.LOAD:
                done.append(self._finish(flight, flight.report))
            else:
                self._reported.append((flight, flight.report))
        pages = 0
        while self._reported and pages < SETTLED_AT_ONCE:
            flight, report = self._reported.popleft()
            pages += len(flight.keys)
            done.append(self._finish(flight, report))
        while self._read and pages < SETTLED_AT_ONCE:
            keys, slots = self._read.popleft()
            pages += len(keys)
            self.index.release_all(keys, slots)
        return done

    def _is_reported(self, flight: Flight[Any]) -> bool:
        return flight.report is not None and flight.report.ranks >= self._ranks

    def _finish(self, flight: Flight[Any], report: OrderReport) -> Settled[Any]:
        order, failed = flight.order, report.failed
        self._end(order.order_id)
        done = Settled(order, flight.keys, failed, flight.abandoned, report.seconds)
        self._settle[order.kind](done, report)
        return done

    def _saved(self, done: Settled[SaveOrder], report: OrderReport) -> None:
        self._copied(report, done.order.group)
        self._commit(done)

    def _loaded(self, done: Settled[LoadOrder], report: OrderReport) -> None:
        if not done.order.cold:  # decoding is not a copy
            self._copied(report, done.order.group)
        if not done.failed:
            keys, slots = done.keys, done.order.slots
            for at in range(0, len(keys), SETTLED_AT_ONCE):
                part = slice(at, at + SETTLED_AT_ONCE)
                self._read.append((keys[part], slots[part]))
            return
        for i, (key, slot) in enumerate(zip(done.keys, done.order.slots, strict=True)):
            self.index.release(key, slot)
            if i in done.failed:
                self.index.forget(key)

    def _packed(self, done: Settled[PackOrder], report: OrderReport) -> None:
        self.index.packed(done.order.slots[0], 0 if done.failed else report.slots)

    def _demoted(self, done: Settled[DemoteOrder], _: OrderReport) -> None:
        self.index.release_all(done.keys, done.order.slots, used=False)
        if not done.abandoned:
            tier = self.stores[done.order.store]
            tier.end_demotion(done.keys)
            tier.index.add(done.good)

    def _promoted(self, done: Settled[PromoteOrder], report: OrderReport) -> None:
        store = done.order.store
        tier, nbytes = self.stores[store], self.page_bytes[store.group]
        if report.seconds > 0 and report.nbytes >= min(MIN_SAMPLE, nbytes * 8):
            tier.bandwidth += 0.3 * (report.nbytes / report.seconds - tier.bandwidth)
        keys = self._commit(done)
        if done.abandoned:
            return
        self.index.promoted.came_up(keys, nbytes)
        for key in done.keys:
            self._promoting.pop(key, None)
        tier.promoting -= len(done.keys)
        tier.index.discard(done.keys[i] for i in done.failed)

    def _looked_up(self, done: Settled[LookupOrder], _: OrderReport) -> None:
        if not done.abandoned:
            answers = self.stores[done.order.store].index
            answers.answer(done.good, True)
            nothing = len(done.failed) == len(done.keys)  # the usual answer
            answers.answer(done.keys if nothing else [done.keys[i] for i in done.failed], False)

    def _exported(self, done: Settled[ExportOrder], _: OrderReport) -> None:
        self.index.release_all(done.keys, done.order.slots, used=False)

    def _imported(self, done: Settled[ImportOrder], _: OrderReport) -> None:
        """Make the pages readable if all of them arrived, because a context needs each of them."""
        if not done.failed:
            self.index.commit_all(done.keys, done.order.slots)
            return
        for key, slot in zip(done.keys, done.order.slots, strict=True):
            self.index.abort(key, slot)

    def _commit(self, done: Settled[SaveOrder] | Settled[PromoteOrder]) -> Sequence[PageKey]:
        """Make the pages that reached CPU memory readable, and return these pages."""
        keys, slots = done.good, done.order.slots
        if done.failed:
            for i in done.failed:
                self.index.abort(done.keys[i], slots[i])
            slots = tuple(slot for i, slot in enumerate(slots) if i not in done.failed)
        return self.index.commit_all(keys, slots)

    def _copied(self, report: OrderReport, group: int) -> None:
        """Update the estimated copy bandwidth from a report."""
        if report.seconds > 0 and report.nbytes >= self.page_bytes[group]:
            self.bandwidth += 0.2 * (report.nbytes / report.seconds - self.bandwidth)


def _places(pages: Sequence[ContextPage]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(page.group for page in pages), tuple(page.block for page in pages)
