"""The tiers below CPU memory, taken as one: promotions for turns, demotions, orders and reports.

Pages come up when the request that wants them arrives, each from the fastest tier that has it.
Each page that goes down goes to every tier.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.keys import PageKey
from tiered_kv.kv_reach import KvKind
from tiered_kv.messages import Handshake, TierOrders, TierReport
from tiered_kv.metrics import Counters
from tiered_kv.orders import DemoteOrder, OrderId, PromoteOrder, SaveOrder
from tiered_kv.pages.order_book import OrderBook, Settled
from tiered_kv.policies.cache.lookup import LOOKUPS, answer_wait_s, pages_asked
from tiered_kv.policies.cache.promotion import (
    TRIES,
    Promotion,
    pages_without,
    room_ahead,
    room_for_turns,
    slowest_store,
    worth_promoting,
)
from tiered_kv.policies.pricing.estimators import PrefillFit
from tiered_kv.tiers import Knowledge, StoreId

from .hits import HitFinder, run_of
from .lower_tier import NOW, LowerTier

logger = logging.getLogger(__name__)


class LowerTiers:
    """Promotions for turns, and the way of orders and reports to each tier. None is a tier too
    few: without tiers nothing comes up and nothing goes down.

    Args:
        tiers: the tiers, fastest first.
        cached: True if VRAM holds a group's block of a block hash.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        tiers: Sequence[LowerTier],
        facts: EngineFacts,
        book: OrderBook,
        finder: HitFinder,
        counters: Counters,
        cached: Callable[[bytes, int], bool],
        clock: Callable[[], float],
    ) -> None:
        self._tiers = {tier.store: tier for tier in tiers}
        self._asked = [tier for tier in tiers if tier.spec.knowledge is Knowledge.ASKED]
        self._facts = facts
        self._book = book
        self._index = book.index
        self._finder = finder
        self._counters = counters
        self._cached = cached
        self._clock = clock
        self._unclaimed = 0
        self._after_save: dict[OrderId, Sequence[PageKey]] = {}

    @property
    def unsent(self) -> bool:
        """True if there is something to send."""
        return any(tier.unsent for tier in self._tiers.values())

    def take(self) -> dict[StoreId, TierOrders]:
        """Hand over the unsent orders, by tier."""
        return {name: tier.take() for name, tier in self._tiers.items() if tier.unsent}

    # -- up -----------------------------------------------------------------------

    def promote(self, turn: Turn, prefill: PrefillFit) -> None:
        """Order the pages up that the turn's prompt wants and only a lower tier has.

        Args:
            prefill: time that computing their tokens takes instead.
        """
        if not self._tiers:  # first, since this is called for every request that arrives
            return
        room = room_for_turns(self._index.num_slots, self._unclaimed)
        if turn.tiers.promotions == TRIES or room <= 0:
            return
        if self._asked and self._ask(turn, prefill):
            return
        if not any(len(tier.pages.index) for tier in self._tiers.values()):
            return
        turn.tiers.promotions += 1
        wanted, behind, tokens = self._find(turn)
        if not wanted:
            return
        if len(wanted) > room:
            wanted, tokens = wanted[:room], tokens * room // len(wanted)
        now = self._clock()
        promotion, fresh = self._worth_it(wanted, behind, tokens, prefill)
        if promotion is None:
            self._counters.add("promotions_refused")
            return
        for name, keys in fresh.items():
            self._tiers[name].promote(keys, NOW)
        coming = self._book.promoting
        mine = [key for key in wanted if key in coming]
        orders = {coming[key] for key in mine}
        for order in self._book.expedite(orders, now):
            self._tiers[order.store].expedite(order.order_id)
        turn.tiers.awaits |= orders
        turn.tiers.wait_until = now + promotion.longest_wait_s
        self._unclaimed += len(set(mine) - turn.tiers.keys)
        turn.tiers.keys.update(mine)

    def promote_ahead(self, keys: Sequence[PageKey], due: float) -> bool:
        """Order a waiting job's pages up, for when it is expected back; False if there are none
        to order, or no slots."""
        index, book = self._index, self._book
        if due > self._clock():
            room = room_ahead(index.num_slots, index.free_slots, book.ahead())
        else:
            room = room_for_turns(index.num_slots, self._unclaimed)
        if room <= 0:
            return False
        ordered = 0
        for name, fresh in self._by_tier(keys[:room]).items():
            order = self._tiers[name].promote(fresh, due)
            ordered += len(order.keys) if order is not None else 0
        self._counters.add("pages_promoted_ahead", ordered)
        return ordered > 0

    def _by_tier(self, keys: Iterable[PageKey]) -> dict[StoreId, list[PageKey]]:
        """Pages by the fastest tier that has them and answers, fastest first."""
        usable = [(name, tier) for name, tier in self._tiers.items() if tier.answers]
        split: dict[StoreId, list[PageKey]] = {name: [] for name, _ in usable}
        for key in keys:
            for name, tier in usable:
                if tier.has(key):
                    split[name].append(key)
                    break
        return {name: found for name, found in split.items() if found}

    def _worth_it(
        self, wanted: list[PageKey], behind: int, tokens: int, prefill: PrefillFit
    ) -> tuple[Promotion | None, dict[StoreId, list[PageKey]]]:
        """The promotion that is worth its time, and the pages to order for it, by tier.

        ``wanted`` is cut before the first page of a tier that is too slow, until what is left is
        worth it.
        """
        coming = self._book.promoting
        while wanted:
            fresh = self._by_tier(key for key in wanted if key not in coming)
            involved = set(fresh) | {self._book.store_of(coming[k]) for k in wanted if k in coming}
            # The tiers work side by side.
            seconds = {
                name: self._tiers[name].promote_seconds(len(fresh.get(name, ())))
                for name in involved
            }
            promotion = Promotion(
                promote_s=max(seconds.values(), default=0.0),
                # An estimate is no reason to leave pages where they are.
                recompute_s=prefill.seconds(behind, tokens) if prefill.measured else 0.0,
            )
            if worth_promoting(promotion):
                return promotion, fresh
            slowest = slowest_store(seconds)
            self._tiers[slowest].refused()
            kept = pages_without(slowest, wanted, fresh)
            tokens = tokens * kept // len(wanted)
            del wanted[kept:]
        return None, {}

    def _find(self, turn: Turn) -> tuple[list[PageKey], int, int]:
        """Pages to come up for the turn, in order, the prompt tokens before them, and the tokens
        that they make usable.

        What the prompt shares with VRAM or CPU memory is passed over. All of it counts as used.
        """
        index, limit = self._index, turn.request.num_tokens - 1
        start, somewhere = self._in_vram(turn, limit), self._somewhere()
        found = self._finder.find(turn, start, limit, somewhere, run_of(somewhere))
        keys = turn.page_keys()
        used = list(keys[: start // self._facts.block_size])
        used += found.keys if found is not None else ()
        self._touch(used)
        index.touch(reversed(used))  # so that what comes up does not evict them
        wanted = [key for key in found.keys if not index.readable(key)] if found is not None else []
        if found is None or not wanted:
            return [], 0, 0
        here = self._finder.find(turn, start, limit, index.readable, index.resident_prefix)
        behind = here.tokens if here is not None else start
        return wanted, behind, found.tokens - behind

    def _in_vram(self, turn: Turn, limit: int) -> int:
        """Tokens of the prompt that VRAM holds, as far as they may be used."""
        hashes, strides = turn.request.block_hashes, turn.pages.strides
        cached, end = self._cached, limit
        for at, group in enumerate(self._facts.groups):
            if group.reach.kind is KvKind.FULL:
                stride, block = strides[at], 0
                stop = min(end // group.block_size, len(hashes) // stride)
                while block < stop and cached(hashes[(block + 1) * stride - 1], at):
                    block += 1
                end = min(end, block * group.block_size)
        unit = self._facts.hit_tokens
        end = end // unit * unit
        while self._facts.narrow and end and not self._ends_in_vram(turn, end):
            end -= unit
        return end

    def _ends_in_vram(self, turn: Turn, tokens: int) -> bool:
        """True if VRAM holds the pages of groups that need not all of the prompt."""
        hashes = turn.request.block_hashes
        return all(
            (block + 1) * turn.pages.strides[at] <= len(hashes)
            and self._cached(hashes[(block + 1) * turn.pages.strides[at] - 1], at)
            for at, group in enumerate(self._facts.groups)
            if group.reach.kind is not KvKind.FULL
            for block in group.needs(tokens)
        )

    def _touch(self, keys: Sequence[PageKey]) -> None:
        for tier in self._tiers.values():
            tier.pages.index.touch(keys)

    def _somewhere(self) -> Callable[[PageKey], bool]:
        """A test whether a page is in CPU memory, on its way there, or in a tier that answers."""
        readable, coming = self._index.readable, self._book.promoting
        indices = [tier.pages.index for tier in self._tiers.values() if tier.answers]
        silent = {name for name, tier in self._tiers.items() if not tier.answers}

        def on_its_way(key: PageKey) -> bool:
            return key in coming and self._book.store_of(coming[key]) not in silent

        def somewhere(key: PageKey) -> bool:
            return readable(key) or any(key in pages for pages in indices) or on_its_way(key)

        return somewhere

    def _ask(self, turn: Turn, prefill: PrefillFit) -> bool:
        """Ask the stores that must be asked for the pages that are nowhere, the first ones first.
        True if the turn waits for an answer."""
        if turn.tiers.lookups == LOOKUPS:
            return False
        keys = turn.page_keys()
        size, limit = self._facts.block_size, turn.request.num_tokens - 1
        stop = min(len(keys), limit // size + 1)
        end, somewhere = self._in_vram(turn, limit) // size, self._somewhere()
        while end < stop and somewhere(keys[end]):
            end += 1
        unknown = keys[end : end + pages_asked(turn.tiers.lookups, stop - end)]
        if not unknown:
            return False
        compute_s = prefill.seconds(end * size, len(unknown) * size)
        wait_s = answer_wait_s(compute_s if prefill.measured else None)
        asked = {tier: tier.ask(unknown, wait_s) for tier in self._asked if tier.answers}
        orders = {order for order in asked.values() if order is not None}
        if not orders:
            return False
        turn.tiers.lookups += 1
        turn.tiers.asking = True
        turn.tiers.awaits |= orders
        turn.tiers.wait_until = self._clock() + wait_s
        return True

    def still_coming(self, turn: Turn, prefill: PrefillFit) -> bool:
        """Promote for the turn, and tell whether the engine shall ask again later: pages worth
        waiting for, or answers, are under way."""
        if not turn.tiers.awaits:
            self.promote(turn, prefill)
        self._look_at_awaited(turn)
        if turn.tiers.asking and not turn.tiers.awaits:
            turn.tiers.asking = False
            self.promote(turn, prefill)
            self._look_at_awaited(turn)
        return bool(turn.tiers.awaits)

    def _look_at_awaited(self, turn: Turn) -> None:
        if not turn.tiers.awaits:
            return
        turn.tiers.awaits = {order for order in turn.tiers.awaits if self._book.under_way(order)}
        if turn.tiers.awaits and self._clock() >= turn.tiers.wait_until:
            self._counters.add("lookups_overdue" if turn.tiers.asking else "promotions_overdue")
            for order in turn.tiers.awaits:
                self._tiers[self._book.store_of(order)].give_up(order)
            turn.tiers.awaits.clear()

    def stop_waiting(self, turn: Turn) -> None:
        """Have the turn wait for nothing any more."""
        turn.tiers.awaits.clear()

    def claimed(self, turn: Turn) -> None:
        """Let go of what came up for the turn: it was admitted, or is over."""
        self._unclaimed -= len(turn.tiers.keys)
        turn.tiers.keys.clear()
        turn.tiers.awaits.clear()
        turn.tiers.asking = False

    # -- down ---------------------------------------------------------------------

    def demote(self, keys: Sequence[PageKey], after: OrderId | None) -> None:
        """Order a turn's pages down, once their save ``after`` has settled."""
        if after is not None:
            self._after_save[after] = keys
        else:
            self._demote(keys)

    def unsent_saves_dropped(self, saves: Iterable[OrderId]) -> None:
        """Demote what was to go down behind these saves and is in CPU memory by now. The rest
        goes down once slots run short."""
        for order_id in saves:
            self._demote(self._after_save.pop(order_id, ()))

    def demote_ahead(self) -> None:
        """Keep the pages that would be evicted next in the tiers as well."""
        for tier in self._tiers.values():
            tier.demote_ahead()

    def _demote(self, keys: Sequence[PageKey]) -> None:
        for tier in self._tiers.values():
            tier.demote(keys)

    # -- reports ------------------------------------------------------------------

    def on_settled(self, done: Settled) -> None:
        """Take in an order that is over on every rank."""
        order = done.order
        if isinstance(order, SaveOrder):
            self._demote(self._after_save.pop(order.order_id, ()))
        elif isinstance(order, (DemoteOrder, PromoteOrder)):
            self._tiers[order.store].on_settled(done)

    def on_reports(self, reports: Mapping[StoreId, Mapping[int, TierReport]]) -> None:
        """Take in the news of the ranks' stores."""
        for name, ranks in reports.items():
            if name in self._tiers:
                self._tiers[name].on_reports(ranks)

    def invalidate(self, saves: Sequence[OrderId]) -> None:
        """Have the slots of these saves not flushed: their blocks were given up under way."""
        for tier in self._tiers.values():
            tier.invalidate(saves)
        self._after_save.clear()  # of saves that were never sent, as well

    def on_handshake(self, ranks: Mapping[int, Handshake]) -> None:
        """Take in the content of the stores at start."""
        for name, tier in self._tiers.items():
            found = {rank: one.stored[name] for rank, one in ranks.items() if name in one.stored}
            tier.on_handshake(found)

    def reset(self, fingerprint: Callable[[int], bytes]) -> None:
        """Begin a new generation of pages. Before the order book forgets them.

        Args:
            fingerprint: gives the digest of a group's pages.
        """
        self._after_save.clear()
        for tier in self._tiers.values():
            tier.reset(fingerprint(tier.store.group))

    def close(self) -> None:
        """Log the totals of each tier."""
        for tier in self._tiers.values():
            tier.close()

    def gauges(self) -> dict[str, Any]:
        """Gauges of all tiers together; none without tiers."""
        if not self._tiers:
            return {}
        tiers = self._tiers.values()
        return {
            "ssd_pages": sum(len(tier.pages.index) for tier in tiers),
            "ssd_bytes": sum(sum(tier.stored_bytes.values()) for tier in tiers),
        }
