"""The SSD tier as the scheduler half runs it: what goes down, what comes up, what may die.

Pages go down when CPU slots run short, before they would be evicted, and when a turn's
decision says so. They come up when the request that wants them arrives. Orders are for the
workers' I/O threads, which carry them out by themselves.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.keys import PageKey
from tiered_kv.messages import Proposal, Reclaim, SsdOrders, SsdReport, StoredPages
from tiered_kv.metrics import Counters
from tiered_kv.orders import DemoteOrder, OrderId, PromoteOrder
from tiered_kv.pages.order_book import Planner, Settled
from tiered_kv.pages.partial_blocks import TailIndex
from tiered_kv.policies.cache.promotion import Promotion, worth_promoting
from tiered_kv.policies.pricing.estimators import PrefillFit

logger = logging.getLogger(__name__)

MOST_AHEAD = 4096
"""Pages next in line for eviction that are kept on SSD as well, at most; three quarters of
the slots if that is less. What is evicted before it is on SSD is lost, and a demotion is
reported a step after it was ordered: so this must be several steps' saves. It does not cost
writes: under pressure every page is evicted, and written, once."""
MOST_DEMOTING = 256
"""Pages under way to SSD at a time, half of those ahead if that is less: they cannot be
evicted, and younger ones would be in their place."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""How long nothing is demoted after a demotion failed: doubled each time."""
NOW = 0.0
"""Due at once, on any machine's clock."""
AHEAD_SHARE = 4
"""One slot in so many may be reserved for promotions that are not due yet."""
REPEAT_S = 5.0
"""A proposal that stays is answered again after this: the store has not done it."""
TRIES = 2
"""Promotions planned for a turn: when it arrives, and when it is asked for if that was
not enough (slots were short, or the pages were evicted again)."""


class SsdTier:
    """Demotions, promotions and the answers to the stores. Owns the unsent orders.

    Args:
        capacity_bytes: of the SSD tier, all ranks together.
        cached: whether VRAM holds the block of a block hash.
        chance: that a waiting job comes back for a page.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        facts: EngineFacts,
        capacity_bytes: int,
        planner: Planner,
        tails: TailIndex,
        counters: Counters,
        cached: Callable[[bytes], bool],
        chance: Callable[[PageKey], float],
        clock: Callable[[], float],
    ) -> None:
        self._facts = facts
        self._planner = planner
        self._index = planner.index
        self._ssd = planner.ssd
        self._tails = tails
        self._counters = counters
        self._cached = cached
        self._chance = chance
        self._clock = clock
        on_ssd = capacity_bytes // (2 * facts.ranks * facts.page_bytes)
        self._window = max(1, min(self._index.num_slots * 3 // 4, MOST_AHEAD, on_ssd))
        self._looked_at = -self._window  # slots taken then
        self._ahead = 0  # pages demoted ahead: at most as many as slots were taken, or a store
        # smaller than the look-ahead would be written over and over
        self._unclaimed = 0
        self._expected_bandwidth = planner.ssd_bandwidth
        self._pause_until = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._after_save: dict[OrderId, Sequence[PageKey]] = {}
        self._backlog: deque[PageKey] = deque()
        self._demotes: list[DemoteOrder] = []
        self._promotes: list[PromoteOrder] = []
        self._hurried: list[OrderId] = []
        self._fingerprint: bytes | None = None
        self._lost: list[PageKey] = []
        self._reclaims: dict[int, Reclaim] = {}
        self._answered: dict[int, tuple[int, float]] = {}
        self._verdicts: dict[PageKey, tuple[bool, set[int]]] = {}
        self._distrusted: list[OrderId] = []
        self.stored_bytes: dict[int, int] = {}

    @property
    def unsent(self) -> bool:
        return bool(
            self._demotes
            or self._promotes
            or self._hurried
            or self._lost
            or self._distrusted
            or self._reclaims
            or self._fingerprint is not None
        )

    def take(self) -> SsdOrders | None:
        """What is to be sent; None if nothing."""
        if not self.unsent:
            return None
        timed: list[DemoteOrder | PromoteOrder] = [*self._demotes, *self._promotes]
        orders = SsdOrders(
            tuple(self._demotes),
            tuple(self._promotes),
            self._fingerprint,
            tuple(self._lost),
            dict(self._reclaims),
            tuple(self._distrusted),
            tuple(self._hurried),
            self._clock() if any(one.due > 0 for one in timed) else None,
        )
        self._hurried.clear()
        self._distrusted.clear()
        self._demotes.clear()
        self._promotes.clear()
        self._fingerprint = None
        self._lost.clear()
        self._reclaims.clear()
        return orders

    # -- up -----------------------------------------------------------------------

    def promote(self, turn: Turn, prefill: PrefillFit) -> None:
        """Order the pages up that the turn's prompt wants and only SSD has.

        Args:
            prefill: what computing their tokens takes instead.
        """
        room = max(1, self._index.num_slots // 2) - self._unclaimed
        if turn.promotions == TRIES or room <= 0 or not len(self._ssd):
            return
        turn.promotions += 1
        wanted, behind, tokens = self._find(turn)
        if not wanted:
            return
        if len(wanted) > room:
            wanted, tokens = wanted[:room], tokens * room // len(wanted)
        now = self._clock()
        fresh = [key for key in wanted if key not in self._planner.promoting]
        promotion = Promotion(
            promote_s=self._planner.promote_seconds(len(fresh)),
            # An estimate is no reason to leave pages where they are.
            recompute_s=prefill.seconds(behind, tokens) if prefill.measured else 0.0,
        )
        if not worth_promoting(promotion):
            self._counters.add("promotions_refused")
            # Nothing is learned from what is not done: what is known grows old instead.
            known = self._planner.ssd_bandwidth
            self._planner.ssd_bandwidth = max(known, min(1.1 * known, self._expected_bandwidth))
            return
        order = self._planner.plan_promote(fresh, NOW)
        if order is not None:
            self._promotes.append(order)
        coming = self._planner.promoting
        mine = [key for key in wanted if key in coming]
        orders = {coming[key] for key in mine}
        self._hurried += self._planner.hurry(orders, now)
        turn.awaits |= orders
        turn.wait_until = now + promotion.longest_wait_s
        self._unclaimed += len(set(mine) - turn.ssd_keys)
        turn.ssd_keys.update(mine)

    def promote_ahead(self, keys: Sequence[PageKey], due: float) -> bool:
        """Order a waiting job's pages up, for when it is expected back; False if there are none
        to order, or no slots."""
        index, planner = self._index, self._planner
        if due > self._clock():
            # Their slots are of no use to anybody until then: nothing is evicted for them.
            room = min(index.free_slots, index.num_slots // AHEAD_SHARE - planner.ahead)
        else:
            room = max(1, index.num_slots // 2) - self._unclaimed
        order = planner.plan_promote(keys[:room], due) if room > 0 else None
        if order is None:
            return False
        self._counters.add("pages_promoted_ahead", len(order.keys))
        self._promotes.append(order)
        return True

    def _find(self, turn: Turn) -> tuple[list[PageKey], int, int]:
        """Pages to come up for the turn, in order, the prompt tokens before them, and those that
        they make usable.

        What the prompt shares with VRAM or CPU memory is passed over, up to the first page
        that is nowhere. All of it counts as used.
        """
        size, limit = self._facts.block_size, turn.request.num_tokens - 1
        keys, hashes = turn.page_keys(), turn.request.block_hashes
        stop = min(len(keys), limit // size + 1)
        end = 0
        while end < stop and self._cached(hashes[end]):
            end += 1
        first, wanted = stop, list[PageKey]()
        while end < stop and self._somewhere(keys[end]):
            if not self._index.readable(keys[end]):
                first = min(first, end)
                wanted.append(keys[end])
            end += 1
        self._ssd.touch(keys[:end])
        self._index.touch(reversed(keys[:end]))  # so that what comes up does not evict them
        tokens = (end - first) * size if wanted else 0
        if tail := turn.find_tail(self._tails, end, size, limit, self._somewhere):
            self._ssd.touch([tail[0]])
            tokens += tail[1]
            if not self._index.readable(tail[0]):
                wanted.append(tail[0])
        return wanted, first * size, tokens

    def _somewhere(self, key: PageKey) -> bool:
        return self._index.readable(key) or key in self._ssd or key in self._planner.promoting

    def still_coming(self, turn: Turn) -> bool:
        """Whether vLLM shall ask again later: pages worth waiting for are under way."""
        if not turn.awaits:
            return False
        turn.awaits = {order for order in turn.awaits if self._planner.under_way(order)}
        if turn.awaits and self._clock() >= turn.wait_until:
            self._counters.add("promotions_overdue")
            turn.awaits.clear()
        return bool(turn.awaits)

    def claimed(self, turn: Turn) -> None:
        """The turn was admitted, or is over: what came up for it may go again."""
        self._unclaimed -= len(turn.ssd_keys)
        turn.ssd_keys.clear()
        turn.awaits.clear()

    # -- down ---------------------------------------------------------------------

    def demote(self, keys: Sequence[PageKey], after: OrderId | None) -> None:
        """Order a turn's pages down, once their save ``after`` has settled."""
        if after is not None:
            self._after_save[after] = keys
        else:
            self._demote(keys)

    def unsent_saves_dropped(self, saves: Iterable[OrderId]) -> None:
        """Of what was to go down behind these saves, what is in CPU memory by now goes. The rest
        does so once slots run short."""
        for order_id in saves:
            self._demote(self._after_save.pop(order_id, ()))

    def demote_ahead(self) -> None:
        """Keep the pages that would be evicted next on SSD as well.

        Only once half the slots are taken, and after so many were since the last look.
        """
        self._feed()
        index = self._index
        taken = index.taken
        roomy = index.free_slots > index.num_slots // 2
        if roomy or taken - self._looked_at < self._window // 8 or self._ahead >= taken:
            return
        room = min(MOST_DEMOTING, -(-self._window // 2)) - self._planner.demoting
        if room <= 0 or self._clock() < self._pause_until:
            return
        victims = [key for key in index.least_valuable(self._window) if key not in self._ssd]
        if len(victims) <= room:
            self._looked_at = taken
        self._ahead += min(len(victims), room)
        self._demote(victims[:room])

    def _demote(self, keys: Sequence[PageKey]) -> None:
        if self._clock() >= self._pause_until:
            self._backlog += keys
            self._feed()

    def _feed(self) -> None:
        """Order what is to go down, but not so much at a time that nothing can be evicted."""
        most = min(MOST_DEMOTING, -(-self._window // 2))
        while self._backlog and (room := most - self._planner.demoting) > 0:
            keys = [self._backlog.popleft() for _ in range(min(room, len(self._backlog)))]
            order = self._planner.plan_demote(keys, NOW)
            if order is not None:
                self._demotes.append(order)

    # -- reports ------------------------------------------------------------------

    def settled(self, done: Settled) -> None:
        """An order is over on every rank."""
        failed, good = len(done.failed), len(done.keys) - len(done.failed)
        if isinstance(done.order, PromoteOrder):
            self._counters.add("pages_promoted", good)
            self._counters.add("promotion_failures", 0 if done.abandoned else failed)
            self._lose(done)
        elif isinstance(done.order, DemoteOrder):
            self._counters.add("pages_demoted", good)
            if failed and not done.abandoned:
                self._counters.add("demotion_failures", failed)
                self._pause_until = self._clock() + self._pause_s
                self._backlog.clear()
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
                self._lose(done)
            elif good:
                self._pause_s = FIRST_PAUSE_S
        else:
            self._demote(self._after_save.pop(done.order.order_id, ()))

    def _lose(self, done: Settled) -> None:
        if self._facts.ranks > 1:  # what one rank lacks is of no use to the others
            self._lost += [done.keys[i] for i in done.failed]

    def heard(self, reports: Mapping[int, SsdReport]) -> None:
        """The ranks' stores spoke."""
        for rank, report in reports.items():
            self.stored_bytes[rank] = report.stored_bytes
            for name, amount in report.counters.items():
                self._counters.add(name, amount)
            if report.gone:
                self._counters.add("ssd_pages_reclaimed", len(report.gone))
                self._ssd.discard(report.gone)
                for key in report.gone:
                    self._verdicts.pop(key, None)
                if self._facts.ranks > 1:
                    self._lost += report.gone
            if report.proposal is not None:
                self._answer(rank, report.proposal)

    def _answer(self, rank: int, dying: Proposal) -> None:
        now = self._clock()
        segment, when = self._answered.get(rank, (-1, 0.0))
        if segment == dying.segment and now - when < REPEAT_S:
            return
        self._answered[rank] = (dying.segment, now)
        self._reclaims[rank] = Reclaim(dying.segment, self._survivors(rank, dying.keys))

    def _survivors(self, rank: int, dying: Sequence[PageKey]) -> tuple[PageKey, ...]:
        """Who survives; the same for every rank, whichever asks first."""
        fresh = [key for key in dying if key not in self._verdicts]
        kept = set(self._ssd.survivors(fresh, self._chance))
        ranks = range(self._facts.ranks)
        self._verdicts.update({key: (key in kept, set(ranks)) for key in fresh})
        survivors = []
        for key in dying:
            survives, waiting = self._verdicts[key]
            waiting.discard(rank)
            if not waiting:
                del self._verdicts[key]
            if survives:
                survivors.append(key)
        return tuple(survivors)

    def distrust(self, saves: Sequence[OrderId]) -> None:
        """Saves whose blocks were given up under way: their slots may hold anything."""
        self._distrusted += saves
        self._after_save.clear()  # of saves that were never sent, as well

    def recovered(self, ranks: Mapping[int, StoredPages]) -> None:
        """What the stores held when the engine started: every rank must have a page."""
        lists = [stored.keys for stored in ranks.values()]
        if len(lists) < self._facts.ranks:
            logger.warning("%d of %d ranks have an SSD tier", len(lists), self._facts.ranks)
            return
        everywhere = set(lists[0]).intersection(*lists[1:])
        self._ssd.add(key for key in lists[0] if key in everywhere)
        partial = set().union(*lists) - everywhere
        self._lost += sorted(partial)
        self._expected_bandwidth = min(stored.bandwidth for stored in ranks.values())
        self._planner.ssd_bandwidth = self._expected_bandwidth
        self.stored_bytes.update({rank: stored.stored_bytes for rank, stored in ranks.items()})
        if everywhere:
            logger.info("%d pages are on SSD from before", len(everywhere))

    def reset(self, fingerprint: bytes) -> None:
        """A new generation: what is on disk, and what was ordered, is invalid. Before the
        planner forgets its pages."""
        unsent: list[DemoteOrder | PromoteOrder] = [*self._demotes, *self._promotes]
        for order in unsent:
            self._planner.cancel(order)
        self._demotes.clear()
        self._promotes.clear()
        self._hurried.clear()
        self._backlog.clear()
        self._after_save.clear()
        self._lost.clear()
        self._reclaims.clear()
        self._answered.clear()
        self._verdicts.clear()
        self._fingerprint = fingerprint

    def gauges(self) -> dict[str, Any]:
        return {"ssd_pages": len(self._ssd), "ssd_bytes": sum(self.stored_bytes.values())}
