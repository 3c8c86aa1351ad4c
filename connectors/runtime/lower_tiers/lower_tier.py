"""One tier below CPU memory: its orders, its demotions and the reports of its stores.

Pages are demoted when CPU slots run short, before they would be evicted, and when a turn's decision
requires it. The workers' I/O threads carry the orders out independently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import filterfalse, islice

from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.formatting import count
from tiered_kv.keys import PageKey
from tiered_kv.messages import StoredPages, TierOrders, TierReport
from tiered_kv.orders import (
    DemoteOrder,
    LookupOrder,
    OrderId,
    Outbox,
    PromoteOrder,
    StoreOrder,
)
from tiered_kv.page_group import KvKind
from tiered_kv.pages.order_book import OrderBook, Settled
from tiered_kv.tiers import Knowledge, StoreId, TierSpec

from .demotion import (
    FIRST_PAUSE_S,
    Backlog,
    Doubt,
    LookAhead,
    Waiting,
    most_waiting,
    next_pause_s,
    runs_of,
)
from .reclaims import Reclaims

_SHARED_EVENTS = {
    "pages_promoted": "pages_fetched",
    "bytes_promoted": "bytes_fetched",
    "promotion_seconds": "fetch_seconds",
    "promotion_failures": "fetch_failures",
    "pages_demoted": "pages_shared",
    "bytes_demoted": "bytes_shared",
    "demotion_seconds": "share_seconds",
    "demotion_failures": "share_failures",
}
"""Event names of a shared tier, by the names that the same events of an engine's own tier have."""


logger = logging.getLogger(__name__)

STALLED_S = 5.0
"""Seconds after which an order that no turn waits for any longer blocks further orders: the store
evidently does not respond, and each order would keep CPU slots reserved."""
FORGIVEN = 1.1
"""Factor applied to the measured bandwidth for each promotion that was refused as too slow."""
NOW = 0.0
"""A value of ``due`` that means immediately, on any machine's clock."""
MOST_LOOKED_AT = 4096
"""Maximum number of waiting pages examined per call. Most may have been evicted while a disk hung,
and examining them must not prolong a step."""


class LowerTier:
    """Demotions, lookups and promotions of one tier and page group, and the replies to its stores.
    Owns its unsent orders.

    Args:
        store: the tier's stores of one page group.
        spec: the tier.
        chance: probability that a job between turns returns for a page.
        group_of: returns the group of a page; None if unknown.
        lasting: True if another engine can have the same fingerprint.

    Attributes:
        counters: counters of this tier.
        page_bytes: size of a page, over all ranks.
        on_evicted: called with the pages that a store evicted.
    """

    def __init__(
        self,
        store: StoreId,
        spec: TierSpec,
        engine: EngineState,
        book: OrderBook,
        chance: Callable[[PageKey], float],
        group_of: Callable[[PageKey], int | None],
        *,
        lasting: bool,
    ) -> None:
        facts, clock = engine.facts, engine.clock
        self.store = store
        self.spec = spec
        self.pages = book.stores[store]
        self.stored_bytes: dict[int, int] = {}
        self._facts = facts
        self._book = book
        self._index = book.index
        self._group_of = group_of
        self.counters = engine.counters.of_tier(spec.tier)
        self._clock = clock
        self.page_bytes = facts.ranks * facts.groups[store.group].page_bytes
        self.on_evicted: Callable[[Sequence[PageKey]], None] | None = None
        pages = None if spec.capacity_bytes is None else spec.capacity_bytes // self.page_bytes
        self._look_ahead = LookAhead.of(self._index.num_slots, pages)
        self._looked_at = -self._look_ahead.window  # slots allocated by the last search
        self._ahead = 0  # number of pages demoted in advance
        self._spared = 0  # pages passed over by evictions, as of the last search
        self._expected_bandwidth = self.pages.bandwidth
        self._pause_until = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._given_up: dict[OrderId, float] = {}
        self._doubt = Doubt()
        kinds = [group.reach.kind for group in facts.groups]
        self._in_runs = spec.in_runs and kinds[store.group] is KvKind.FULL
        # Without a full-attention group, nothing shows where a stored context ends.
        self._serves = not spec.shared or (lasting and KvKind.FULL in kinds)
        self._asked = spec.knowledge is Knowledge.ASKED
        self._events = _SHARED_EVENTS if spec.shared else {}
        self._backlog = Backlog()
        slots = self._index.num_slots
        self._most_waiting = most_waiting(slots) if spec.shared else slots
        self._demotes = Outbox[DemoteOrder]()
        self._promotes = Outbox[PromoteOrder]()
        self._lookups = Outbox[LookupOrder]()
        self._expedited = Outbox[OrderId]()
        self._fingerprints = Outbox[bytes]()  # fingerprint since the last reset
        self._lost = Outbox[PageKey]()
        self._released = Outbox[PageKey]()
        self._invalidated = Outbox[OrderId]()
        self._reclaims = Reclaims(self.pages.index, facts.ranks, chance, clock)

    @property
    def outboxes(self) -> tuple[Sized, ...]:
        """Lists of all unsent orders, by type. The list objects stay the same for the tier's
        lifetime."""
        orders = self._demotes, self._promotes, self._lookups, self._expedited, self._lost
        others = self._released, self._invalidated, self._fingerprints, self._reclaims.unsent
        return *orders, *others

    @property
    def has_more(self) -> bool:
        """True if pages are queued for demotion."""
        return bool(self._backlog)

    def take(self) -> TierOrders:
        """Remove and return the unsent orders."""
        timed: list[DemoteOrder | PromoteOrder] = [*self._demotes, *self._promotes]
        return TierOrders(
            demotes=self._demotes.take(),
            promotes=self._promotes.take(),
            lookups=self._lookups.take(),
            fingerprint=next(iter(self._fingerprints.take()), None),
            lost=self._lost.take(),
            released=self._released.take(),
            reclaims=self._reclaims.take(),
            invalidated=self._invalidated.take(),
            expedited=self._expedited.take(),
            sent_at=self._clock() if any(one.due > 0 for one in timed) else None,
        )

    # -- promotions ---------------------------------------------------------------

    @property
    def answers(self) -> bool:
        """False while the tier is not to be used: if it cannot have this engine's pages, if the
        store has not finished an order that its turn gave up long ago, or if other engines also
        write to the tier and its replies were recently wrong or late."""
        now = self._clock()
        if not self._serves or self._doubt.rules(now):
            return False
        if not self._given_up:
            return True
        self._given_up = {o: at for o, at in self._given_up.items() if self._book.under_way(o)}
        return all(now - at < STALLED_S for at in self._given_up.values())

    def order_given_up(self, order_id: OrderId) -> None:
        """Record that no turn waits for the order any longer."""
        now = self._clock()
        self._given_up.setdefault(order_id, now)
        if self._asked:
            self._doubt.late(now)

    def ask(
        self, keys: Sequence[PageKey], context: Sequence[PageKey], deadline_s: float
    ) -> OrderId | None:
        """Query the stores for the pages of this group among ``keys``. Returns the id of the queued
        lookup; None if the local index already has the answer for each of these pages.

        Args:
            context: the pages, and earlier pages of their context back to the start of a run.
        """
        order = self._book.plan_lookup(self.store, self._mine(keys), deadline_s)
        if order is None:
            return None
        if self._in_runs:
            runs = runs_of(self._mine(context))
            order = replace(order, runs=tuple(map(runs.__getitem__, order.keys)))
        self._lookups.append(order)
        return order.order_id

    def promote_seconds(self, pages: int) -> float:
        """Return the time until ``pages`` further pages are promoted, seconds."""
        return self._book.promote_seconds(self.store, pages)

    def promote(
        self, keys: Sequence[PageKey], due: float, turn: Turn | None = None
    ) -> PromoteOrder | None:
        """Order the promotion of pages. Returns None if there are no pages to promote, or no slots.

        Args:
            turn: the turn that needs the pages; None if they are promoted in advance.
        """
        order = self._book.plan_promote(self.store, keys, due)
        if order is not None:
            self._promotes.append(order)
            if turn is not None:
                turn.promoted.pages += len(order.keys)
                turn.promoted.nbytes += len(order.keys) * self._book.page_bytes[self.store.group]
        return order

    def expedite(self, order_id: OrderId) -> None:
        """Carry out a promotion now rather than when it is due."""
        self._expedited.append(order_id)

    def refused(self) -> None:
        """Raise the bandwidth estimate a little after a promotion was refused as too slow, because
        a refused promotion yields no new measurement."""
        known, expected = self.pages.bandwidth, self._expected_bandwidth
        self.pages.bandwidth = max(known, min(FORGIVEN * known, expected))

    # -- demotions ----------------------------------------------------------------

    @property
    def takes(self) -> bool:
        """False while the tier accepts no pages, because it is paused after a failure, or because
        no engine would find them."""
        return self._serves and self._clock() >= self._pause_until

    def demote(self, keys: Sequence[PageKey]) -> None:
        """Demote the pages that are in CPU memory and not in the tier, a limited number at a time.
        Further pages are queued, up to the number that CPU memory may keep for the tier. The limit
        matters for a hung disk, which reports nothing and so causes no pause.

        Args:
            keys: for a shared tier, pages of a context from its start.
        """
        if not self.takes:
            return
        self._feed()
        context = self._mine(keys)
        mine = [*self.pages.index.unwritten(context)]  # a long context is mostly stored
        excluded = self.pages.demoting.union(self._index.unreadable(mine))
        fresh = [*filterfalse(excluded.__contains__, mine)]
        runs = runs_of(context) if self._in_runs and fresh else {}
        left = max(0, self._most_waiting + self._room - len(self._backlog))
        if self.spec.shared:  # own tiers receive the other pages before eviction
            self.counters.add("pages_not_shared", len(fresh[left:]))
        self._backlog.add(Waiting(fresh[:left], runs))
        self._feed()

    def _mine(self, keys: Sequence[PageKey]) -> Sequence[PageKey]:
        """Return the pages of this store's group."""
        if len(self._facts.groups) == 1:
            return keys
        return [key for key in keys if self._group_of(key) == self.store.group]

    def demote_ahead(self) -> None:
        """Demote the pages that would be evicted next, if a search for such pages is due."""
        self._feed()
        index, look = self._index, self._look_ahead
        taken, spared = index.taken, index.spared
        if spared == self._spared and not look.due(
            free=index.free_slots,
            num_slots=index.num_slots,
            taken=taken,
            looked_at=self._looked_at,
            ahead=self._ahead,
        ):
            return
        room = look.most_demoting - len(self.pages.demoting)
        if room <= 0 or not self.takes:
            return
        unwritten = self.pages.index.unwritten(index.least_valuable(look.window))
        wanted: Iterable[PageKey] = filterfalse(index.superseded, unwritten)
        if len(self._facts.groups) > 1:
            wanted = self._mine([*wanted])
        victims = [*islice(wanted, room + 1)]
        if len(victims) <= room:
            self._looked_at, self._spared = taken, spared
        self._ahead += min(len(victims), room)
        self.demote(victims[:room])

    def supersede(self, keys: Sequence[PageKey]) -> None:
        """Evict these pages first once the stores need space, unless they are used by then."""
        self.pages.index.supersede(self._mine(keys))

    def _feed(self) -> None:
        """Demote queued pages. Their number is limited, so that other pages remain evictable."""
        looked_at = 0
        while self._backlog and (room := self._room) and looked_at < MOST_LOOKED_AT:
            waiting = self._backlog.take(room)
            looked_at += len(waiting.keys)
            self._order_down(*waiting, room)

    @property
    def _room(self) -> int:
        """Return the number of pages that may be demoted now."""
        return max(0, self._look_ahead.most_demoting - len(self.pages.demoting))

    def _order_down(
        self, keys: Sequence[PageKey], runs: Mapping[PageKey, PageKey], most: int
    ) -> None:
        """Order the demotion of the first of these pages that the tier lacks."""
        order = self._book.plan_demote(self.store, keys, NOW, most)
        if order is None:
            return
        if runs:
            order = replace(order, runs=tuple(map(runs.__getitem__, order.keys)))
        self._demotes.append(order)

    # -- reports ------------------------------------------------------------------

    def on_promoted(self, done: Settled[PromoteOrder]) -> None:
        """Count a promotion that has finished on every rank, and the pages that it failed to read.
        With several ranks, failed pages are dropped from every rank's store. The result affects the
        trust in a tier to which other engines also write."""
        failed, good = len(done.failed), len(done.keys) - len(done.failed)
        nbytes = good * self.page_bytes
        self._count(pages_promoted=good, bytes_promoted=nbytes, promotion_seconds=done.seconds)
        self._count(promotion_failures=0 if done.abandoned else failed)
        self._judge(done)
        self._lose(done)

    def on_demoted(self, done: Settled[DemoteOrder]) -> None:
        """Count a demotion that has finished on every rank. If it failed, pause the tier, and clear
        the queue of pages to demote."""
        failed, good = len(done.failed), len(done.keys) - len(done.failed)
        nbytes = good * self.page_bytes
        self._count(pages_demoted=good, bytes_demoted=nbytes, demotion_seconds=done.seconds)
        if failed and not done.abandoned:
            self._count(demotion_failures=failed)
            self._pause()
            self._backlog.clear()
            self._lose(done)
        elif good:
            self._pause_s = FIRST_PAUSE_S
        if self.spec.shared:
            self._feed()

    def on_looked_up(self, done: Settled[LookupOrder]) -> None:
        """Trust the tier again, because its store answered a lookup in time on every rank."""
        if done.order.order_id not in self._given_up:
            self._doubt.worked()

    def _pause(self) -> None:
        """Order no demotions for a while, longer after each successive failure."""
        now = self._clock()
        if now >= self._pause_until:  # several orders may fail at the same time
            self._pause_until = now + self._pause_s
            if not self.spec.shared:  # stores of shared tiers pause by themselves
                self._pause_s = next_pause_s(self._pause_s)

    def _count(self, **amounts: float) -> None:
        for event, amount in amounts.items():
            self.counters.add(self._events.get(event, event), amount)

    def _judge(self, done: Settled[PromoteOrder]) -> None:
        """Stop querying a tier to which other engines also write for a while, if it lacked most of
        the pages that it had reported. Otherwise trust the tier again."""
        if not self._asked or done.abandoned:
            return
        if 2 * len(done.failed) > len(done.keys):  # mostly useless
            self._doubt.failed(self._clock())
        elif done.order.order_id not in self._given_up:
            self._doubt.worked()

    def _lose(self, done: Settled[PromoteOrder] | Settled[DemoteOrder]) -> None:
        if self._facts.ranks > 1:  # a page that one rank lacks is useless to the others
            self._lost += [done.keys[i] for i in done.failed]

    def on_reports(self, reports: Mapping[int, TierReport]) -> None:
        """Handle the reports of the ranks' stores."""
        for rank, report in reports.items():
            self.stored_bytes[rank] = report.stored_bytes
            for name, amount in report.counters.items():
                self.counters.add(name, amount)
            if report.gone:
                self.pages.index.discard(report.gone)
                self._evicted(report.gone)
                if self._facts.ranks > 1:
                    self._lost += report.gone
            if report.proposal is not None:
                self._evict_superseded()
                self._reclaims.answer(rank, report.proposal)

    def forget(self, keys: Sequence[PageKey]) -> None:
        """Forget pages that no job needs any more, here and in the stores. None of them may be
        in an unfinished demotion."""
        mine = self._mine(keys)
        self.pages.index.discard(mine)
        self._released += mine

    def _evicted(self, keys: Sequence[PageKey], ranks: int = 1) -> None:
        self.counters.add("ssd_pages_reclaimed", ranks * len(keys))
        if self.on_evicted is not None:
            self.on_evicted(keys)
        self._reclaims.forget(keys)

    def _evict_superseded(self) -> None:
        """Drop the superseded pages from every store, so that their segments are reclaimed soon: a
        store reclaims its emptiest segments first."""
        if dead := self.pages.index.take_superseded():
            self._evicted(dead, self._facts.ranks)
            self._lost += dead

    def invalidate(self, saves: Iterable[OrderId]) -> None:
        """Exclude the slots of these saves from flushes, because their content may be invalid."""
        self._invalidated += saves

    def on_handshake(self, ranks: Mapping[int, StoredPages]) -> None:
        """Record the initial content of the stores. Only pages that every rank has are recorded:
        none if a rank lacks the tier."""
        tier = self.spec.tier
        lists = [stored.keys for stored in ranks.values()]
        if len(lists) < self._facts.ranks:
            logger.warning(
                "only %d of %d ranks have tier %s: its stored pages are not used",
                len(lists),
                self._facts.ranks,
                tier,
            )
            return
        everywhere = set(lists[0]).intersection(*lists[1:])
        self.pages.index.add(key for key in lists[0] if key in everywhere)
        self._lost += sorted(set().union(*lists) - everywhere)
        self._expected_bandwidth = min(stored.bandwidth for stored in ranks.values())
        self.pages.bandwidth = self._expected_bandwidth
        self.stored_bytes.update({rank: stored.stored_bytes for rank, stored in ranks.items()})
        if everywhere:
            kept = count(len(everywhere), "page")
            logger.info("tier %s has %s from the previous engine", tier, kept)

    def close(self) -> None:
        """Log the tier's totals."""
        if totals := {name: n for name, n in sorted(self.counters.totals.items()) if n}:
            logger.info("totals of tier %s: %s", self.spec.tier, totals)

    def reset(self, fingerprint: bytes) -> None:
        """Start a new generation: stored pages and orders become invalid. Call before the order
        book forgets its pages."""
        unsent: list[StoreOrder] = [*self._demotes, *self._promotes, *self._lookups]
        for order in unsent:
            self._book.cancel(order)
        for outbox in self._demotes, self._promotes, self._lookups, self._expedited, self._lost:
            outbox.clear()
        self._released.clear()
        self._backlog.clear()
        self._reclaims.clear()
        self._fingerprints[:] = [fingerprint]
        self._serves = not self.spec.shared  # no other engine has pages of this generation
