"""Promotions: pages come up from the tiers below CPU memory for turns, and ahead of them.

They come up when the engine asks for the request that wants them, so in the order in which turns
are let in, each from the fastest tier that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from typing import NamedTuple

from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.lower_tiers.all_tiers import Below, Tiers
from tiered_kv.connectors.runtime.lower_tiers.lower_tier import NOW
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.keys import PageKey
from tiered_kv.page_group import KvKind
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.policies.pricing.estimators import PrefillFit
from tiered_kv.tiers import StoreId

from .hits import HitFinder, run_of
from .lookups import LOOKUPS, Lookups

UNKNOWN_WAIT_S = 10.0
"""Longest wait if the time to compute the tokens is unknown."""
LOOK_EVERY_S = 0.1
"""Seconds between two searches for pages that a waiting turn lacks, while none of them arrives."""
TURNS_SHARE = 2
"""One slot in this many may be reserved for turns that have arrived: the others are for saves."""
AHEAD_SHARE = 4
"""One slot in this many may be reserved for promotions that are not due yet."""


@dataclass(frozen=True, slots=True)
class PromotionCost:
    """Costs of a promotion that is about to be ordered.

    Attributes:
        promote_s: seconds until its pages are in CPU memory, queue included.
        recompute_s: seconds to compute their tokens instead; 0 if unknown.
    """

    promote_s: float
    recompute_s: float

    @property
    def worth_it(self) -> bool:
        """True unless computing is faster."""
        return not 0 < self.recompute_s < self.promote_s

    @property
    def longest_wait_s(self) -> float:
        """Seconds after which the turn computes its tokens instead, from when VRAM has room for it:
        before that it waits anyway.

        It is the time that computing takes. So whatever the disk does, the turn needs at most
        twice that (the ski-rental bound of 2).
        """
        return self.recompute_s or UNKNOWN_WAIT_S

    def waits_for_slots(self, *, mine: int, others: int, left_s: float | None) -> bool:
        """True if a turn waits for slots rather than promote only a part of its pages. A turn with
        promoted pages never does: two would wait for each other.

        Args:
            mine: pages that were promoted for the turn, or are being promoted.
            others: the same for other turns: their slots are given back.
            left_s: seconds that are left of its longest wait; None if that has not begun.
        """
        return others > 0 and not mine and (left_s is None or self.promote_s <= left_s)


class TokensBelow(NamedTuple):
    """Tokens of a prompt whose KV came up from below CPU memory.

    Attributes:
        own: from tiers of this engine.
        shared: from tiers that engines share.
    """

    own: int
    shared: int


class Promotions:
    """Pages on their way up, and the turns that wait for them. Without tiers nothing comes up.

    Args:
        tiers: the tiers, fastest first.
    """

    def __init__(
        self,
        engine: EngineState,
        tiers: Tiers,
        book: OrderBook,
        finder: HitFinder,
    ) -> None:
        self._tiers = tiers
        self._lookups = Lookups(tiers, engine.facts, finder, engine.clock)
        self._facts = engine.facts
        self._book = book
        self._index = book.index
        self._finder = finder
        self._counters = engine.counters
        self._pool = engine.pool
        self._clock = engine.clock
        self._unclaimed = 0

    def _promote(self, turn: Turn, fit: PrefillFit, *, fits: bool) -> None:
        """Order the pages up that the turn's prompt wants and only a lower tier has.

        Args:
            fit: time that computing their tokens takes instead.
            fits: True if VRAM has room for the turn.
        """
        state, now = turn.tiers, self._clock()
        state.behind, state.in_pieces = 0, False
        if self._lookups.ask(turn, self.in_vram, fit):
            return
        if not any(len(tier.pages.index) for tier in self._tiers.values()):
            return
        state.looked_at, state.room_seen = now, fits
        wanted, behind, tokens = self._find(turn)
        if not wanted:
            return
        promotion, fresh = self._worth_it(wanted, behind, tokens, fit, last=fits)
        if promotion is None:
            self._counters.add("promotions_refused", fits)
            return
        if state.longest_wait_s is None:
            state.longest_wait_s = promotion.longest_wait_s
        room = self._room_for_turns()
        if len(wanted) > room:
            mine, others = len(state.keys), self._of_others(turn)
            if promotion.waits_for_slots(mine=mine, others=others, left_s=state.left_s(now)):
                state.behind = others
                return
            state.in_pieces = True
            del wanted[max(0, room) :]
            kept = set(wanted)
            fresh = {store: [key for key in keys if key in kept] for store, keys in fresh.items()}
        for store, keys in fresh.items():
            self._tiers[store].promote(keys, NOW, turn)
        book, coming = self._book, self._book.promoting
        claimed = [key for key in wanted if key in coming]
        orders = {coming[key] for key in claimed}
        for order in self._book.expedite(orders, now):
            self._tiers[order.store].expedite(order.order_id)
        state.awaits |= orders
        self._unclaimed += len(set(claimed) - state.keys.keys())
        state.keys.update((key, book.store_of(coming[key])) for key in claimed)

    def promote_ahead(self, keys: Sequence[PageKey], due: float) -> int:
        """Order a waiting job's pages up, for when it is expected back; their number, 0 if there
        are none to order, or no slots."""
        index, book = self._index, self._book
        if due > self._clock():
            # No turn can use their slots until then, so nothing is evicted for them.
            room = min(index.free_slots, index.num_slots // AHEAD_SHARE - book.ahead())
        else:
            room = self._room_for_turns()
        if room <= 0:
            return 0
        ordered = 0
        for store, fresh in self._tiers.by_tier(keys[:room]).items():
            order = self._tiers[store].promote(fresh, due)
            ordered += len(order.keys) if order is not None else 0
        self._counters.add("pages_promoted_ahead", ordered)
        return ordered

    def _room_for_turns(self) -> int:
        """Pages that may be promoted for turns that have arrived."""
        return max(1, self._index.num_slots // TURNS_SHARE) - self._unclaimed

    def _worth_it(
        self, wanted: list[PageKey], behind: int, tokens: int, fit: PrefillFit, *, last: bool
    ) -> tuple[PromotionCost | None, dict[StoreId, list[PageKey]]]:
        """The promotion that is worth its time, and the pages to order for it, by tier.

        ``wanted`` is cut before the first page of a tier that is too slow, until what is left is
        worth it.

        Args:
            last: True if what is not ordered now is computed.
        """
        coming = self._book.promoting
        while wanted:
            fresh = self._tiers.by_tier(key for key in wanted if key not in coming)
            involved = set(fresh) | {self._book.store_of(coming[k]) for k in wanted if k in coming}
            # The tiers work side by side.
            seconds = {
                store: self._tiers[store].promote_seconds(len(fresh.get(store, ())))
                for store in involved
            }
            promotion = PromotionCost(
                promote_s=max(seconds.values(), default=0.0),
                # An estimate is no reason to leave pages where they are.
                recompute_s=fit.seconds(behind, tokens) if fit.measured else 0.0,
            )
            if promotion.worth_it:
                return promotion, fresh
            slowest = max(seconds, key=seconds.__getitem__)
            if last:
                self._tiers[slowest].refused()
            # A page is of no use without all before it. Without fresh ones, all are on their way.
            kept = wanted.index(fresh[slowest][0]) if slowest in fresh else 0
            tokens = tokens * kept // len(wanted)
            del wanted[kept:]
        return None, {}

    def _find(self, turn: Turn) -> tuple[list[PageKey], int, int]:
        """Pages to come up for the turn, in order, the prompt tokens before them, and the tokens
        that they make usable.

        What the prompt shares with VRAM or CPU memory is passed over. All of it counts as used.
        """
        index, limit = self._index, turn.request.num_tokens - 1
        start, somewhere = self.in_vram(turn, limit), self._tiers.somewhere()
        found = self._finder.find(turn, start, limit, somewhere, run_of(somewhere))
        keys = turn.page_keys()
        used = list(keys[: start // self._facts.block_size])
        used += found.keys if found is not None else ()
        self._touch(used)
        index.touch(reversed(used))  # so that what comes up does not evict them
        wanted = [*filterfalse(index.readable, found.keys)] if found is not None else []
        if found is None or not wanted:
            return [], 0, 0
        here = self._finder.find(turn, start, limit, index.readable, index.readable_prefix)
        behind = here.tokens if here is not None else start
        return wanted, behind, found.tokens - behind

    def in_vram(self, turn: Turn, limit: int, known: int = 0) -> int:
        """Tokens of the prompt that VRAM holds, as far as they may be used.

        Args:
            known: tokens that it is known to hold.
        """
        hashes, strides = turn.request.block_hashes, turn.pages.strides
        cached, end = self._pool.cached, limit
        for at, group in enumerate(self._facts.groups):
            if group.reach.kind is KvKind.FULL:
                stride, block = strides[at], known // group.block_size
                stop = min(end // group.block_size + 1, len(hashes) // stride)
                while block < stop and cached(hashes[(block + 1) * stride - 1], at) is not None:
                    block += 1
                end = min(end, block * group.block_size)
        if not self._facts.narrow:
            return end
        unit = self._facts.hit_tokens
        end = end // unit * unit
        while end and not self._ends_in_vram(turn, end):
            end -= unit
        return end

    def _ends_in_vram(self, turn: Turn, tokens: int) -> bool:
        """True if VRAM holds the pages of groups that need not all of the prompt."""
        hashes = turn.request.block_hashes
        return all(
            (block + 1) * turn.pages.strides[at] <= len(hashes)
            and self._pool.cached(hashes[(block + 1) * turn.pages.strides[at] - 1], at) is not None
            for at, group in enumerate(self._facts.groups)
            if group.reach.kind is not KvKind.FULL
            for block in group.needs(tokens)
        )

    def _touch(self, keys: Sequence[PageKey]) -> None:
        for tier in self._tiers.values():
            tier.pages.index.touch(keys)

    def waits_for_answer(self, turn: Turn) -> bool:
        """True if a turn has begun to wait for a store's answer, which is not there and not late.
        Quickly told, as it is asked for in each step."""
        state = turn.tiers
        if not state.asking or state.waits_since is None or self._clock() >= state.answers_until:
            return False
        return any(map(self._book.under_way, state.awaits))

    def still_coming(self, turn: Turn, fit: PrefillFit, fits: Callable[[], bool]) -> bool:
        """Promote for a turn that the engine considers for admission; True if the turn waits, so
        that the engine shall ask again later. For the arguments see ``bring_up``."""
        waits = self.bring_up(turn, fit, fits)
        if waits and turn.tiers.waits_since is None:
            turn.tiers.waits_since = self._clock()
        return waits

    def bring_up(self, turn: Turn, fit: PrefillFit, fits: Callable[[], bool]) -> bool:
        """Promote what a turn's prompt needs. True if pages worth waiting for, slots for them, or
        answers, are on their way.

        Never True while VRAM lacks room for the turn: others would overtake it. So its pages come
        up while it waits for that.

        Args:
            fits: tells whether VRAM has room for it.
        """
        if not self._tiers:  # first, since this is asked for every waiting request
            return False
        state, now, has_room = turn.tiers, self._clock(), fits()
        awaited = bool(state.awaits)
        self._look_at_awaited(turn, now)
        if not state.awaits:
            state.asking = False
            left_s = state.left_s(now)
            if left_s is not None and left_s <= 0:
                state.behind, state.in_pieces = 0, False
            elif awaited or self._worth_a_look(turn, now, fits=has_room):
                self._promote(turn, fit, fits=has_room)
        if has_room and state.wait_until is None and state.longest_wait_s is not None:
            state.wait_until = now + state.longest_wait_s
        return has_room and bool(state.awaits or state.behind)

    def in_pieces(self, turn: Turn) -> Below | None:
        """The pages that may come up in pieces beside those that came up for a turn; None if none
        may, or need to."""
        state = turn.tiers
        if not state.in_pieces or state.longest_wait_s is None:
            return None
        until = state.wait_until
        if until is None:
            until = self._clock() + state.longest_wait_s
        return Below(self._tiers.somewhere(), until)

    def within_reach(self, turn: Turn) -> Below | None:
        """The pages that a turn would have if it waited for what comes up for it; None if that is
        not worth it, or there is nothing."""
        if turn.tiers.longest_wait_s is None:
            return None
        return Below(self._tiers.somewhere(), self._clock() + turn.tiers.longest_wait_s)

    def tokens_from_below(self, turn: Turn) -> TokensBelow:
        """Tokens of a turn's hit that came up for it from a tier, or are to come up in pieces."""
        hit, came_up, there = turn.restore.hit, turn.tiers.keys, self._index.readable
        if hit is None or not self._tiers:
            return TokensBelow(0, 0)
        from_tiers = [key for key in hit.keys if key in came_up or not there(key)]
        shared = sum(self._is_shared(came_up.get(key), key) for key in from_tiers)
        size = self._facts.block_size
        return TokensBelow((len(from_tiers) - shared) * size, shared * size)

    def _is_shared(self, store: StoreId | None, key: PageKey) -> bool:
        """True if a page came up from a tier that engines share.

        Args:
            store: where it came from; None if it is to come up in pieces.
        """
        if store is None:
            having = (one for one, tier in self._tiers.items() if tier.has(key))
            store = next(having, None)
        return store is not None and self._tiers[store].spec.shared

    def _worth_a_look(self, turn: Turn, now: float, *, fits: bool) -> bool:
        """True if pages may be looked for: at first, now and then, once VRAM has room, and once
        others gave slots back."""
        state = turn.tiers
        if state.looked_at is None or now - state.looked_at >= LOOK_EVERY_S:
            return True
        return (fits and not state.room_seen) or self._of_others(turn) < state.behind

    def _hold(self, turn: Turn) -> None:
        """Keep what has come up for a turn from being evicted until it is claimed."""
        held = turn.tiers.held
        for key in filter(self._index.readable, turn.tiers.keys):
            if key not in held:
                held[key] = self._index.acquire(key)

    def _of_others(self, turn: Turn) -> int:
        """Pages that came up, or are coming, for other turns."""
        return self._unclaimed - len(turn.tiers.keys)

    def _look_at_awaited(self, turn: Turn, now: float) -> None:
        state = turn.tiers
        if not state.awaits:
            return
        under_way = {order for order in state.awaits if self._book.under_way(order)}
        if len(under_way) < len(state.awaits):
            state.awaits = under_way
            self._hold(turn)
        until = state.answers_until if state.asking else state.wait_until
        if state.awaits and until is not None and now >= until:
            self._counters.add("lookups_overdue" if state.asking else "promotions_overdue")
            self._tiers.give_up(state.awaits)
            state.awaits.clear()
            if state.asking:  # it has waited enough: a store that was late is not asked again
                state.lookups, state.ends_asked = LOOKUPS, True

    def stop_all_waits(self, turns: Iterable[Turn]) -> None:
        """Have turns wait for nothing any more."""
        for turn in turns:
            turn.tiers.awaits.clear()
            turn.tiers.behind, turn.tiers.in_pieces = 0, False
            turn.tiers.wait_until = self._clock()

    def claimed(self, turn: Turn) -> None:
        """Let go of what came up for the turn: it was admitted, or is over."""
        held = turn.tiers.held
        if turn.tiers.waits_since is not None:
            turn.tiers.waited_s += self._clock() - turn.tiers.waits_since
            turn.tiers.waits_since = None
        self._index.release_all([*held], [*held.values()])
        held.clear()
        self._unclaimed -= len(turn.tiers.keys)
        turn.tiers.keys.clear()
        turn.tiers.awaits.clear()
        turn.tiers.asking, turn.tiers.behind, turn.tiers.in_pieces = False, 0, False
        turn.tiers.longest_wait_s = turn.tiers.wait_until = turn.tiers.looked_at = None
