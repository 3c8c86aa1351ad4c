"""Promotions: pages are promoted from the tiers below CPU memory for turns that have arrived, and
in advance for turns that are expected.

Pages are promoted when the engine considers their request for admission, and therefore in the order
of admission. Each page is promoted from the fastest tier that has it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import filterfalse
from typing import NamedTuple

from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.lower_tiers.all_tiers import Below, Tiers
from tiered_kv.connectors.runtime.lower_tiers.lower_tier import NOW
from tiered_kv.connectors.runtime.turn import TiersState, Turn
from tiered_kv.keys import PageKey
from tiered_kv.page_group import KvKind
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.policies.pricing.estimators import PrefillFit

from .hits import HitFinder
from .lookups import LOOKUPS, Lookups

UNKNOWN_WAIT_S = 10.0
"""Longest wait if the time to prefill the tokens is unknown, seconds."""
LOOK_EVERY_S = 0.1
"""Seconds between two searches for missing pages of a waiting turn, while no page arrives."""
TURNS_SHARE = 2
"""One slot in ``TURNS_SHARE`` may be reserved for turns that have arrived. The other slots are for
saves."""
AHEAD_SHARE = 4
"""One slot in ``AHEAD_SHARE`` may be reserved for promotions that are not due yet."""
PAGES_A_STEP = 512
"""Maximum number of pages whose promotion is ordered in a step, for all turns together."""
TOKENS_A_STEP = 16_384
"""Maximum number of tokens in these pages. Reading their KV takes longer than a step: even with
70 KB per token, it is more than 1 GB."""
SEARCHED_A_STEP = 1024
"""Number of pages searched for in a step, after which further turns wait for their first search
until the next step."""
TOUCHED_A_STEP = 1024
"""Maximum number of pages that are marked as used in the lower tiers in a step."""


@dataclass(frozen=True, slots=True)
class PromotionCost:
    """Cost of a promotion before it is ordered.

    Attributes:
        promote_s: time until the pages are in CPU memory, including queueing, seconds.
        recompute_s: time to prefill the tokens of these pages instead, seconds; 0 if unknown.
    """

    promote_s: float
    recompute_s: float

    @property
    def worth_it(self) -> bool:
        """True unless prefilling the tokens is faster."""
        return not 0 < self.recompute_s < self.promote_s

    @property
    def longest_wait_s(self) -> float:
        """Longest wait for the pages before the turn prefills their tokens instead, seconds. Only
        time during which VRAM has space for the turn counts. Without space, the turn waits anyway.

        The longest wait equals the prefill time. So the turn takes at most twice the prefill time,
        however slow the disk is (the ski-rental bound of 2).
        """
        return self.recompute_s or UNKNOWN_WAIT_S

    def waits_for_slots(self, *, mine: int, others: int, left_s: float | None) -> bool:
        """True if a turn should wait for slots rather than promote only a part of its pages. A turn
        that already has promoted pages never waits, because two such turns could wait for each
        other.

        Args:
            mine: number of pages promoted, or being promoted, for the turn.
            others: number of pages promoted, or being promoted, for other turns. Their slots will
                be released.
            left_s: time left of the turn's longest wait, seconds; None if the wait has not started.
        """
        return others > 0 and not mine and (left_s is None or self.promote_s <= left_s)


class TokensBelow(NamedTuple):
    """Numbers of tokens of a prompt whose KV was promoted from below CPU memory.

    Attributes:
        own: from tiers of this engine.
        shared: from tiers shared between engines.
    """

    own: int
    shared: int


class Promotions:
    """Pages being promoted, and the turns that wait for them. Does nothing without lower tiers.

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
        self._unclaimed = 0  # pages promoted, being promoted or to be promoted for turns
        self._left = 0  # pages whose promotion may still be ordered in this step
        self._searched = 0  # pages searched for in this step
        self._used: list[PageKey] = []  # not yet marked as used in the lower tiers
        self._touches_left = 0  # pages that may still be marked so in this step
        self.begin_step()

    def begin_step(self) -> None:
        """Start a step."""
        self._left = max(1, min(PAGES_A_STEP, TOKENS_A_STEP // self._facts.block_size))
        self._touches_left = TOUCHED_A_STEP
        self._searched = 0
        if self._used:
            self._touch_some()

    def _promote(self, turn: Turn, num_computed: int, fit: PrefillFit, *, fits: bool) -> None:
        """Order the promotion of the pages that the turn's prompt needs and only a lower tier has.

        Args:
            num_computed: tokens of the prompt that VRAM is known to contain.
            fit: estimates the time to prefill the tokens of these pages instead.
            fits: True if VRAM has space for the turn.
        """
        state, now = turn.tiers, self._clock()
        state.behind, state.in_pieces = 0, False
        in_vram = partial(self.in_vram, turn, turn.request.num_tokens - 1, num_computed)
        pages = len(turn.page_keys()) - num_computed // self._facts.block_size
        if self._lookups.ask(turn, in_vram, fit):
            self._searched += pages
            return
        if not any(len(tier.pages.index) for tier in self._tiers.values()):
            return
        self._searched += pages
        first = state.looked_at is None
        state.looked_at, state.room_seen = now, fits
        wanted, behind, tokens = self._find(turn, in_vram(), first=first)
        if not wanted:
            return
        promotion = self._worth_it(wanted, behind, tokens, fit, last=fits)
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
        state.rest = wanted
        self._unclaimed += len(wanted)
        self._order_some(turn)

    def _order_some(self, turn: Turn) -> None:
        """Order the promotion of the turn's next pages, as far as the limit per step allows."""
        state, now = turn.tiers, self._clock()
        pages, state.rest = state.rest[: self._left], state.rest[self._left :]
        self._left -= len(pages)
        self._unclaimed -= len(pages)
        book, coming = self._book, self._book.promoting
        for store, keys in self._tiers.by_tier(filterfalse(coming.__contains__, pages)).items():
            self._tiers[store].promote(keys, NOW, turn)
        claimed = [*filter(coming.__contains__, pages)]
        orders = set(map(coming.__getitem__, claimed))
        stores = {order: book.store_of(order) for order in orders}
        for order in self._book.expedite(orders, now):
            self._tiers[order.store].expedite(order.order_id)
        state.awaits |= orders
        self._unclaimed += len(set(claimed) - state.keys.keys())
        state.keys.update((key, stores[coming[key]]) for key in claimed)
        state.coming.update(dict.fromkeys(filterfalse(state.held.__contains__, claimed)))

    def promote_ahead(self, keys: Sequence[PageKey], due: float) -> int:
        """Order the promotion of the pages of a job between turns, for the time when it is expected
        back. Returns the number of ordered pages; 0 if there are no pages to order, or no slots."""
        index, book = self._index, self._book
        if due > self._clock():
            # No turn can use these slots until then, so nothing is evicted for them.
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
        """Return the number of further pages that may be promoted for turns that have arrived."""
        return max(1, self._index.num_slots // TURNS_SHARE) - self._unclaimed

    def _worth_it(
        self, wanted: list[PageKey], behind: int, tokens: int, fit: PrefillFit, *, last: bool
    ) -> PromotionCost | None:
        """Return the cost of the promotion if it is worth its time, None otherwise.

        ``wanted`` is cut before the first page of a tier that is too slow, until the rest is worth
        promoting.

        Args:
            last: True if pages that are not ordered now will be prefilled.
        """
        coming = self._book.promoting
        while wanted:
            fresh = self._tiers.by_tier(filterfalse(coming.__contains__, wanted))
            under_way = {coming[key] for key in filter(coming.__contains__, wanted)}
            involved = fresh.keys() | map(self._book.store_of, under_way)
            # The tiers transfer concurrently.
            seconds = {
                store: self._tiers[store].promote_seconds(len(fresh.get(store, ())))
                for store in involved
            }
            promotion = PromotionCost(
                promote_s=max(seconds.values(), default=0.0),
                # A mere estimate is no reason to leave pages where they are.
                recompute_s=fit.seconds(behind, tokens) if fit.measured else 0.0,
            )
            if promotion.worth_it:
                return promotion
            slowest = max(seconds, key=seconds.__getitem__)
            if last:
                self._tiers[slowest].refused()
            # A page is useless without all pages before it. If no page is fresh, all pages are
            # being promoted already.
            kept = wanted.index(fresh[slowest][0]) if slowest in fresh else 0
            tokens = tokens * kept // len(wanted)
            del wanted[kept:]
        return None

    def _find(self, turn: Turn, start: int, *, first: bool) -> tuple[list[PageKey], int, int]:
        """Return the pages to promote for the turn, in order; the number of prompt tokens before
        them; and the number of tokens that these pages make usable.

        Pages in VRAM or CPU memory are skipped. All pages of the prefix count as used.

        Args:
            start: number of prompt tokens in VRAM.
            first: True if no pages of the turn have been searched for before.
        """
        index, limit, somewhere = self._index, turn.request.num_tokens - 1, self._tiers.somewhere()
        found = self._finder.find(turn, start, limit, somewhere, somewhere.run)
        used = list(turn.page_keys()[: start // self._facts.block_size])
        used += found.keys if found is not None else ()
        wanted = index.unreadable(found.keys) if found is not None else []
        if first:
            self._touch_some(used)
        if found is None or not wanted:
            return [], 0, 0
        if not turn.tiers.keys:
            index.touch(reversed(used))  # so that promoted pages do not evict them
        here = self._finder.find(turn, start, limit, index.readable, index.readable_prefix)
        behind = here.tokens if here is not None else start
        return wanted, behind, found.tokens - behind

    def in_vram(self, turn: Turn, limit: int, known: int) -> int:
        """Return the number of usable prompt tokens that VRAM contains, at most ``limit``.

        Args:
            known: number of tokens already known to be in VRAM.
        """
        hashes, strides = turn.request.block_hashes, turn.pages.strides
        end = limit
        for at, group in enumerate(self._facts.groups):
            if group.reach.kind is KvKind.FULL:
                stride, block = strides[at], known // group.block_size
                stop = min(end // group.block_size + 1, len(hashes) // stride)
                unknown = hashes[(block + 1) * stride - 1 : stop * stride : stride]
                block += self._pool.cached_prefix(unknown, at)
                end = min(end, block * group.block_size)
        if not self._facts.narrow:
            return end
        unit = self._facts.hit_tokens
        end = end // unit * unit
        while end and not self._ends_in_vram(turn, end):
            end -= unit
        return end

    def _ends_in_vram(self, turn: Turn, tokens: int) -> bool:
        """Return True if VRAM contains the pages that a context of ``tokens`` tokens needs in
        groups that keep only a part of the context."""
        hashes = turn.request.block_hashes
        return all(
            (block + 1) * turn.pages.strides[at] <= len(hashes)
            and self._pool.cached(hashes[(block + 1) * turn.pages.strides[at] - 1], at) is not None
            for at, group in enumerate(self._facts.groups)
            if group.reach.kind is not KvKind.FULL
            for block in group.needs(tokens)
        )

    def _touch_some(self, pages: Sequence[PageKey] = ()) -> None:
        """Mark earlier waiting pages and the given pages as used in the lower tiers, up to the
        limit per step. If too many wait, the oldest are dropped."""
        waiting = self._used
        waiting += pages
        del waiting[: max(0, len(waiting) - self._index.num_slots)]
        some = waiting[: self._touches_left]
        del waiting[: len(some)]
        self._touches_left -= len(some)
        for tier in self._tiers.values():
            tier.pages.index.touch(some)

    def waits_for_answer(self, turn: Turn) -> bool:
        """True if a turn is waiting for a store's reply that is outstanding and not late. Called in
        every step, so the test is cheap."""
        state = turn.tiers
        if not state.asking or state.waits_since is None or self._clock() >= state.answers_until:
            return False
        return any(map(self._book.under_way, state.awaits))

    def still_coming(
        self, turn: Turn, num_computed: int, fit: PrefillFit, fits: Callable[[], bool]
    ) -> bool:
        """Promote pages for a turn that the engine considers for admission. Returns True if the
        turn waits, perhaps for a step in which its pages may be searched for, and the engine must
        ask again later. Takes the arguments of ``bring_up``."""
        state, may_search = turn.tiers, self._searched < SEARCHED_A_STEP
        if self._tiers and state.looked_at is None and not may_search:
            waits = fits()
        else:
            waits = self.bring_up(turn, num_computed, fit, fits)
        if waits and state.waits_since is None:
            state.waits_since = self._clock()
        elif not waits:
            self._wait_over(state)
        return waits

    def _wait_over(self, state: TiersState) -> None:
        if state.waits_since is not None:
            state.waited_s += self._clock() - state.waits_since
            state.waits_since = None

    def bring_up(
        self, turn: Turn, num_computed: int, fit: PrefillFit, fits: Callable[[], bool]
    ) -> bool:
        """Promote the pages that a turn's prompt needs. Returns True if the turn should wait for
        pages, slots or replies.

        Always False while VRAM lacks space for the turn, because other requests would overtake it.
        Its pages are promoted while it waits for space.

        Args:
            num_computed: tokens of the prompt that VRAM is known to contain.
            fits: returns True if VRAM has space for the turn.
        """
        if not self._tiers:  # first, because this runs for every waiting request
            return False
        state, now, has_room = turn.tiers, self._clock(), fits()
        if not has_room and state.wait_until is not None:  # other requests took the space
            state.longest_wait_s, state.wait_until = max(0.0, state.wait_until - now), None
        awaited = bool(state.awaits or state.rest)
        self._look_at_awaited(turn, now)
        if state.rest and self._left:
            self._order_some(turn)
        if not state.awaits and not state.rest:
            state.asking = False
            left_s = state.left_s(now)
            if left_s is not None and left_s <= 0:
                state.behind, state.in_pieces = 0, False
            elif awaited or self._worth_a_look(turn, now, fits=has_room):
                self._promote(turn, num_computed, fit, fits=has_room)
        if has_room and state.wait_until is None and state.longest_wait_s is not None:
            state.wait_until = now + state.longest_wait_s
        return has_room and bool(state.awaits or state.rest or state.behind)

    def in_pieces(self, turn: Turn) -> Below | None:
        """Return the pages that may be promoted in pieces for a turn, in addition to pages already
        promoted; None if that is not allowed or not needed."""
        state = turn.tiers
        if not state.in_pieces or state.longest_wait_s is None:
            return None
        until = state.wait_until
        if until is None:
            until = self._clock() + state.longest_wait_s
        return Below(self._tiers.somewhere(), until)

    def within_reach(self, turn: Turn) -> Below | None:
        """Return the pages that a turn would have if it waited for its promotions; None if waiting
        is not worth it, or there is nothing to wait for."""
        if turn.tiers.longest_wait_s is None:
            return None
        return Below(self._tiers.somewhere(), self._clock() + turn.tiers.longest_wait_s)

    def tokens_from_below(self, turn: Turn) -> TokensBelow:
        """Return the numbers of tokens of a turn's hit that were promoted for it, or are to be
        promoted in pieces."""
        hit, came_up = turn.restore.hit, turn.tiers.keys
        if hit is None or not self._tiers:
            return TokensBelow(0, 0)
        pages = Counter(map(came_up.get, hit.keys))
        del pages[None]
        in_pieces = [*filterfalse(came_up.__contains__, self._index.unreadable(hit.keys))]
        for store, keys in self._tiers.by_tier(in_pieces).items():
            pages[store] += len(keys)
        shared = sum(n for store, n in pages.items() if store and self._tiers[store].spec.shared)
        size = self._facts.block_size
        return TokensBelow((pages.total() - shared) * size, shared * size)

    def _worth_a_look(self, turn: Turn, now: float, *, fits: bool) -> bool:
        """Return True if it is time to search for pages of the turn: on the first call, at
        intervals, once VRAM has space, and once other turns have released slots."""
        state = turn.tiers
        if state.looked_at is None or now - state.looked_at >= LOOK_EVERY_S:
            return True
        return (fits and not state.room_seen) or self._of_others(turn) < state.behind

    def _hold(self, turn: Turn) -> None:
        """Protect the pages promoted for a turn from eviction until the turn is admitted or
        finishes."""
        state = turn.tiers
        absent = {*self._index.unreadable(state.coming)}
        arrived = [*filterfalse(absent.__contains__, state.coming)]
        state.held.update(zip(arrived, self._index.acquire_all(arrived), strict=True))
        deque(map(state.coming.pop, arrived), maxlen=0)

    def _of_others(self, turn: Turn) -> int:
        """Return the number of pages promoted, or being promoted, for other turns."""
        return self._unclaimed - len(turn.tiers.keys) - len(turn.tiers.rest)

    def _look_at_awaited(self, turn: Turn, now: float) -> None:
        state = turn.tiers
        if not state.awaits and not state.rest:
            return
        under_way = {order for order in state.awaits if self._book.under_way(order)}
        if len(under_way) < len(state.awaits):
            state.awaits = under_way
            self._hold(turn)
        until = state.answers_until if state.asking else state.wait_until
        if (state.awaits or state.rest) and until is not None and now >= until:
            self._counters.add("lookups_overdue" if state.asking else "promotions_overdue")
            self._tiers.give_up(state.awaits)
            state.awaits.clear()
            self._drop_rest(turn)
            if state.asking:  # the turn has waited enough: do not query a late store again
                state.lookups, state.ends_asked = LOOKUPS, True

    def _drop_rest(self, turn: Turn) -> None:
        """Promote no further pages for the turn."""
        self._unclaimed -= len(turn.tiers.rest)
        turn.tiers.rest = ()

    def stop_all_waits(self, turns: Iterable[Turn]) -> None:
        """End the wait for pages of each turn."""
        for turn in turns:
            turn.tiers.awaits.clear()
            self._drop_rest(turn)
            turn.tiers.behind, turn.tiers.in_pieces = 0, False
            turn.tiers.wait_until = self._clock()

    def claimed(self, turn: Turn) -> None:
        """Release the pages promoted for the turn, because it was admitted or has finished."""
        if not self._tiers:
            return
        held = turn.tiers.held
        self._wait_over(turn.tiers)
        self._index.release_all([*held], [*held.values()], used=False)  # its restore uses them
        held.clear()
        turn.tiers.coming.clear()
        self._drop_rest(turn)
        self._unclaimed -= len(turn.tiers.keys)
        turn.tiers.keys.clear()
        turn.tiers.awaits.clear()
        turn.tiers.asking, turn.tiers.behind, turn.tiers.in_pieces = False, 0, False
        turn.tiers.longest_wait_s = turn.tiers.wait_until = turn.tiers.looked_at = None
