"""The path between the scheduler half and the workers: sends orders, and receives reports.

A report that completes an order is passed to the listeners for the order's type. If CPU memory
outlives the engine, the workers are notified which saves and promotions every rank has completed,
because only the scheduler half receives the reports of all ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from itertools import chain
from typing import Any

from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.lower_tiers.all_tiers import Tiers
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.formatting import count
from tiered_kv.messages import Handshake, Orders, Reports, Settlement
from tiered_kv.orders import (
    DemoteOrder,
    ExportOrder,
    ImportOrder,
    LoadOrder,
    LookupOrder,
    OrderId,
    OrderKind,
    Outbox,
    PackOrder,
    PromoteOrder,
    RestoreMode,
    SaveOrder,
)
from tiered_kv.pages.cpu_index import PageIndex
from tiered_kv.pages.order_book import AnyOrder, OrderBook, Settled
from tiered_kv.pages.snapshot_orders import SnapshotOrders
from tiered_kv.transfer.memory_file.validation import agreed, agreed_bundles

from .cpu_compression import Compression
from .pieces import RestorePieces
from .restores import Restores
from .saves import Saves


class Settlements:
    """Queue of settlements. A settlement notifies the workers of a save or promotion that every
    rank has completed.

    Args:
        wanted: False if CPU memory ends with the engine; then nothing is collected.
        wall: nanoseconds since 1970.

    Attributes:
        unsent: settlements not sent yet.
        reset: True if the workers must be notified of a cache reset.
    """

    def __init__(
        self, index: PageIndex, *, wanted: bool, wall: Callable[[], int] = time.time_ns
    ) -> None:
        self.reset = False
        self._index = index
        self._wanted = wanted
        self._wall = wall
        self.unsent = Outbox[Settlement]()

    def on_settled(self, done: Settled[SaveOrder] | Settled[PromoteOrder]) -> None:
        """Queue a notification of a finished save or promotion whose pages are available now."""
        order = done.order
        if not self._wanted:
            return
        place = self._index.place
        pages = enumerate(zip(order.keys, order.slots, strict=True))
        bad = frozenset(i for i, (key, slot) in pages if place(key) != slot)
        self.unsent.append(Settlement(order.order_id, bad, self._wall()))

    def on_reset(self) -> None:
        """Make the workers forget all pages, and send no further settlements: no other engine has
        keys of the new generation."""
        self.unsent.clear()
        self.reset, self._wanted = self._wanted, False

    def take_reset(self) -> bool:
        """Return True at the first call after a reset of which the workers must be notified."""
        reset, self.reset = self.reset, False
        return reset


logger = logging.getLogger(__name__)

MAX_PUSH_S = 30.0
"""Maximum time without orders or reports, seconds. An idle engine keeps stepping for copies in
flight, but not for a worker that has stopped reporting."""


class OrderDispatch:
    """Collects the orders of a step, and passes each report to its component.

    Attributes:
        snapshots: snapshot orders.
        restored: turns whose async restore finished and that have not been scheduled since then.
        seen_failures: number of reported restore failures, by rank.
        awaits_demotions: True if an idle engine should step until its demotions are reported.
    """

    def __init__(
        self,
        engine: EngineState,
        book: OrderBook,
        saves: Saves,
        restores: Restores,
        pieces: RestorePieces,
        compression: Compression,
        tiers: Tiers,
        settlements: Settlements,
    ) -> None:
        self.snapshots = snapshots = SnapshotOrders(book)
        self.restored: dict[str, Turn] = {}
        self.seen_failures: Mapping[int, int] = {}
        self.awaits_demotions = False
        self._book = book
        self._saves = saves
        self._restores = restores
        self._pieces = pieces
        self._compression = compression
        self._tiers = tiers
        self._settlements = settlements
        self._turns = engine.turns.by_id
        self._ranks = engine.facts.ranks
        self._clock = engine.clock
        self._tier_outboxes = {store: tier.outboxes for store, tier in tiers.items()}
        self._outboxes: tuple[Sized, ...] = (
            saves.unsent,
            restores.unsent,
            restores.refused,
            compression.unsent,
            snapshots.unsent,
            settlements.unsent,
            *chain.from_iterable(self._tier_outboxes.values()),
        )
        self._no_orders = Orders()
        self._last_word = self._clock()  # when the last orders were sent or reports received
        self._step = 0
        self._listeners: dict[OrderKind, Sequence[Callable[[Settled[Any]], None]]] = {}
        self.listen(SaveOrder, settlements.on_settled, saves.on_settled, self._on_saved)
        self.listen(LoadOrder, self._on_loaded)
        self.listen(PackOrder, compression.on_settled)
        self.listen(DemoteOrder, lambda done: tiers[done.order.store].on_demoted(done))
        self.listen(
            PromoteOrder,
            settlements.on_settled,
            lambda done: tiers[done.order.store].on_promoted(done),
        )
        self.listen(LookupOrder, lambda done: tiers[done.order.store].on_looked_up(done))
        self.listen(ExportOrder, snapshots.on_settled)
        self.listen(ImportOrder, snapshots.on_settled)

    def on_handshake(self, said: Mapping[int, Handshake]) -> None:
        """Record each rank's measured speed and resident pages. With pipeline parallelism the ranks
        have different layers, and therefore different page sizes."""
        book, ranks = self._book, list(said.values())
        if copies := [one.speeds.copy for one in ranks if one.speeds.copy]:
            book.bandwidth = min(copies)
        if ranks:  # also without measured speeds, to exclude the staging slots
            book.index.limit(min(one.slots for one in ranks))
            sizes = zip(*(one.page_bytes for one in ranks), strict=True)
            book.page_bytes = [max(size) for size in sizes]
        if len(ranks) == self._ranks:
            adopted = [one.adopted for one in ranks]
            book.index.adopt(agreed(adopted), agreed_bundles(adopted))
            if len(book.index):
                kept = count(len(book.index), "page")
                logger.info("CPU memory has %s from the previous engine", kept)
        self._compression.on_handshake(said)
        for store, tier in self._tiers.items():
            there = {rank: one.stored[store] for rank, one in said.items() if store in one.stored}
            tier.on_handshake(there)

    def take(self) -> Orders:
        """Remove and return the orders that have not been sent."""
        if self._pieces:
            self._advance_pieces()
        if not self._unsent:
            return self._no_orders
        self._last_word = self._clock()
        unsent = [store for store, outboxes in self._tier_outboxes.items() if any(outboxes)]
        return Orders(
            saves=self._saves.unsent.take(),
            loads=self._restores.unsent.take(),
            packs=self._compression.unsent.take(),
            failed_loads=self._restores.refused.take(),
            seen_failures=self.seen_failures,
            stores={store: self._tiers[store].take() for store in unsent},
            snapshots=self.snapshots.unsent.take(),
            settled=self._settlements.unsent.take(),
            reset=self._settlements.take_reset(),
        )

    def restore(self, turn: Turn, tokens: int) -> None:
        """Order the restore that the engine expects, in pieces if necessary.

        Raises:
            KeyError, RuntimeError: this restore was not offered, or one of its pages has been
                evicted; follow with ``Restores.refuse``.
        """
        until = turn.restore.hit.pieces_until if turn.restore.hit is not None else None
        if runs := self._restores.order(turn, tokens):
            self._pieces.begin(turn, runs, tokens, until)

    def retries(self, turn: Turn) -> bool:
        """Return True once if the engine retries a turn whose async restore failed entirely."""
        if not self._restores.retries(turn):
            return False
        self.restored.pop(turn.request_id, None)  # the turn has no blocks any more
        return True

    def _advance_pieces(self) -> None:
        for turn in self._pieces.advance():
            self.restored[turn.request_id] = turn

    @property
    def _unsent(self) -> bool:
        return any(self._outboxes) or self._settlements.reset  # evaluated in every step

    @property
    def under_way(self) -> bool:
        """True if a step would send orders, or could receive reports of earlier ones."""
        return self._under_way(demotions=True)

    def on_idle(self) -> bool:
        """Return True if an idle engine should keep stepping.

        Demotions in flight alone are no reason, because their threads write without steps. A store
        may be slow, and until it finishes, stepping would keep cores busy and could slow down a
        store on the same machine. Demotions are a reason if more pages are queued for demotion, or
        with ``awaits_demotions``, because only a step sends orders and takes the workers' reports.
        """
        demotions = self.awaits_demotions or any(tier.has_more for tier in self._tiers.values())
        return self._under_way(demotions=demotions)

    @property
    def demotes_only(self) -> bool:
        """True if nothing but demotions is under way."""
        return not self._under_way(demotions=False)

    def _under_way(self, *, demotions: bool) -> bool:
        if self._unsent or self._pieces:
            return True
        now = self._clock()
        expected = self._book.expected(now)
        if not demotions:
            expected -= self._book.number(OrderKind.DEMOTE)
        return expected > 0 and now - self._last_word < MAX_PUSH_S

    def listen(self, kind: type[AnyOrder], *listeners: Callable[[Settled[AnyOrder]], None]) -> None:
        """Register the listeners that are called, in this order, for each order of a type that
        every rank has reported."""
        self._listeners[kind.kind] = listeners

    def begin_step(self, step: int) -> None:
        """Start a step. Reports received from now on belong to it."""
        self._step = step
        self._restores.begin_step()
        self._pieces.begin_step()

    def on_reports(self, reports: Reports) -> None:
        """Pass on the workers' reports.

        Raises:
            Exception: the first error of a tier or a listener, raised after all have been called.
                An error in one listener must not keep other listeners from releasing resources.
        """
        self._last_word = self._clock()
        dropped: Sequence[OrderId] = ()
        if any(n > self.seen_failures.get(rank, 0) for rank, n in reports.failures.items()):
            # Saves ordered since the failure may be of blocks that were computed on invalid KV.
            dropped = self._saves.drop_unsent()
            self.seen_failures = {**self.seen_failures, **reports.failures}
            self._no_orders = Orders(seen_failures=self.seen_failures)
        settled = self._book.settle(reports.orders)
        told: list[Callable[[], None]] = [
            partial(self._tiers[store].on_reports, ranks)
            for store, ranks in reports.stores.items()
            if store in self._tiers
        ]
        told += [
            partial(listener, done)
            for done in settled
            for listener in self._listeners[done.order.kind]
        ]
        errors = list[Exception]()
        for tell in told:
            try:
                tell()
            except Exception as error:
                errors.append(error)
        for order_id in dropped:
            self._tiers.save_over(order_id)
        if self._pieces:
            self._advance_pieces()  # before another component takes the promoted pages' slots
        for tier in self._tiers.own:
            tier.demote_ahead()
        self._compression.pack_ahead()
        if errors:
            raise errors[0]

    def _on_saved(self, done: Settled[SaveOrder]) -> None:
        self._tiers.save_over(done.order.order_id)

    def _on_loaded(self, done: Settled[LoadOrder]) -> None:
        order, failed = done.order, done.failed
        restored = self._restores.on_settled(done)
        self._pieces.on_settled(done)
        turn = self._turns.get(order.request_id)
        if turn is not None and failed and order.mode is RestoreMode.ASYNC:
            self._restores.on_failed(turn)
        if turn is not None and self._restores.on_part_loaded(turn):
            self.restored[turn.request_id] = turn
        # The engine hashes the blocks of an async restore only after the restore succeeded.
        if failed and order.mode is RestoreMode.SYNC:
            bad = {order.blocks[i] for i in failed}
            turns = self._turns.values()
            self._restores.forget_bad_blocks(bad, restored, turns, self._saves, self._step)
