"""Saves: blocks are copied to CPU memory as they fill, each block once.

A calendar records which requests to check in which step, because checking every running request in
every step would cost more than the saves. Short blocks are saved a few at a time, and the requests
of several steps are checked together, so that there are few orders. At the end of a turn, its last
blocks are saved; in groups that keep only a part of the context, the pages at its last boundary
are saved too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, filterfalse, islice
from operator import attrgetter, itemgetter

from tiered_kv.connectors.runtime.base import EngineFacts, Request
from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.keys import PageKey, tail_key
from tiered_kv.orders import OrderId, Outbox, SaveOrder
from tiered_kv.page_group import CONTEXT, KvKind
from tiered_kv.pages.base import PageState
from tiered_kv.pages.order_book import OrderBook, Settled
from tiered_kv.pages.partial_blocks import TailIndex

STRIDE_TOKENS = 256
"""A decoding request is checked once it may have filled blocks of this many tokens, in a step that
is a multiple of ``TOGETHER``."""
TOGETHER = 16
"""Interval of the steps in which decoding requests are checked. Blocks filled since the last check
are saved when the request finishes, and lost when it is preempted. These blocks contain at most 272
tokens, or are a single longer block."""
TOUCHED_A_STEP = 2048
"""Maximum number of pages that are counted as just used in a step. Further pages wait for the next
step."""
ENDS_TOGETHER = 64
"""Number of pages at which a save order is full. Before that, the last pages of further turns that
end in the same step join the order."""
LOOKED_AT = 4096
"""Maximum number of blocks of a turn whose saves are ordered in one step. A prefix that VRAM has
and CPU memory has lost may be longer. Of blocks that CPU memory has, four times as many are
checked."""
_ID = attrgetter("block_id")


@dataclass(frozen=True, slots=True)
class SaveStride:
    """Interval, in tokens, at which the blocks of a decoding request are saved together.

    Attributes:
        block_size: tokens of a block.
        tokens: tokens of the blocks that are saved together; at least one block.
    """

    block_size: int
    tokens: int

    @classmethod
    def of(cls, block_size: int) -> SaveStride:
        """Return the stride for blocks of that size."""
        return cls(block_size, max(block_size, STRIDE_TOKENS // block_size * block_size))

    def next_look(self, step: int, *, saved: int, computed: int, known: int) -> int:
        """Return the step at which a turn is checked again.

        A prefill may fill many blocks in the next step. A decoding request computes one token per
        step, so the earliest step in which its next blocks are full is known.

        Args:
            step: current step.
            saved: number of blocks saved so far.
            computed: number of tokens computed once the step has run.
            known: number of tokens of the prompt and of the answer so far.
        """
        look = step + 1
        if computed >= known:
            look += max(0, saved * self.block_size + self.tokens - computed - 1)
            look += -look % TOGETHER
        return look


def worth_a_slot(
    pages: Mapping[PageKey, int], lacking: Collection[PageKey], free: int
) -> Mapping[PageKey, int]:
    """Select the pages to save: all pages that no lower tier has, then other pages while slots are
    free. A page that is also in a lower tier never displaces a page that only CPU memory has.

    Args:
        pages: pages that CPU memory lacks, each with its block.
        lacking: the pages among them that no lower tier has.
        free: number of free slots in CPU memory.
    """
    if len(lacking) == len(pages):
        return pages
    others = filterfalse({*lacking}.__contains__, pages)
    wanted = [*lacking, *islice(others, max(0, free - len(lacking)))]
    return {key: pages[key] for key in wanted}


def kept_tokens(request: Request) -> int:
    """Return the number of tokens of a request whose KV exists, whether or not a step is in
    flight."""
    computed = request.num_computed_tokens - request.num_in_flight_tokens
    return min(computed, request.num_tokens - 1)


def state_tokens(request: Request, facts: EngineFacts) -> int | None:
    """Return the number of tokens that the recurrent state of a finished request covers, once the
    steps in flight are done.

    A step in flight advances the state in place. If it computes the last token, the state covers
    all tokens. The state is useless if the client received a shorter text. With speculation the
    state after the accepted tokens may be in another block.

    Returns:
        The number of tokens; None if the state is unusable.
    """
    if request.text_cut or facts.speculates:
        return None
    computed, under_way = request.num_computed_tokens, request.num_in_flight_tokens
    if under_way == 0:
        return computed if computed < request.num_tokens else None
    return computed if under_way == 1 and computed == request.num_tokens else None


def last_boundary(request: Request, facts: EngineFacts) -> int:
    """Return the number of tokens up to which the engine finds the prompt if it is sent again; 0 if
    it finds no part of the prompt. The number is ``hit_tokens`` less if a drafter's KV depends on
    the following token."""
    unit = facts.hit_tokens
    resent = (request.num_prompt_tokens - 1) // unit * unit
    return max(0, resent - unit) if facts.draft_tokens else resent


def prompt_boundaries(request: Request, facts: EngineFacts) -> list[int]:
    """Return the prompt lengths, in tokens, at which the KV of every group is saved in prefill.

    These are where the engine finds the prompt again, where other prompts diverge and, without
    recurrent states, the prompt's end, in descending order.

    Empty unless some group keeps only a part of the context, because otherwise every block is a
    boundary.
    """
    if not facts.narrow:
        return []
    prompt, unit = request.num_prompt_tokens, facts.hit_tokens
    shared = min(request.shared_tokens, prompt) // unit * unit
    found = {last_boundary(request, facts), shared}
    if not facts.has_states:
        found.add(prompt)
    return sorted((tokens for tokens in found if tokens > 0), reverse=True)


class Saves:
    """Orders saves, and holds a reference on every block until its copy is done.

    Attributes:
        over: number of saves that have finished.
        on_filled: called with a turn, a page group and whole blocks of the turn whose pages are
            about to be saved, unless a tier has them; None if nothing observes saves.
    """

    def __init__(
        self,
        engine: EngineState,
        book: OrderBook,
        tails: TailIndex,
    ) -> None:
        self._facts = engine.facts
        self._book = book
        self._tails = tails
        self._counters = engine.counters
        self._pool = engine.pool
        self._stride = SaveStride.of(engine.facts.block_size)
        ranks, slot_bytes = engine.facts.ranks, engine.facts.slot_bytes
        sizes = [group.page_bytes for group in engine.facts.groups]
        # Used and unused bytes of a slot, by group, over all ranks.
        self._bytes = [(ranks * size, ranks * (slot_bytes - size)) for size in sizes]
        self._calendar: defaultdict[int, dict[Turn, None]] = defaultdict(dict)
        self.unsent = Outbox[SaveOrder]()
        self.over = 0
        self.on_filled: Callable[[Turn, int, range], None] | None = None
        self._latest: OrderId | None = None
        self._ends: dict[int, SaveOrder] = {}  # orders for the last pages of ended turns
        # Pages of finished turns that count as just used: now, or once the save has settled.
        self._used: list[PageKey] = []
        self._used_by: dict[OrderId, deque[PageKey]] = {}
        self._touches_left = TOUCHED_A_STEP

    def watch(self, turn: Turn, step: int) -> None:
        """Check the turn for newly filled blocks in step ``step``, and not before."""
        if not turn.pages.fingerprints:
            return
        if not turn.save.cursors:
            self.start_over(turn)
        self._unwatch(turn)
        turn.save.due = step
        self._calendar[step][turn] = None

    def _unwatch(self, turn: Turn) -> None:
        """Remove the turn from the calendar. Otherwise the calendar keeps the turn until the step
        in which it was to be checked."""
        due, turn.save.due = turn.save.due, None
        if due is not None and due in self._calendar:
            self._calendar[due].pop(turn, None)
            if not self._calendar[due]:
                del self._calendar[due]

    def resume(self, turn: Turn) -> None:
        """Resume saving the turn's blocks, because nothing loads into them any more."""
        turn.save.suspended = False

    def start_over(self, turn: Turn) -> None:
        """Restart the turn's saves: all of its blocks are checked again for pages to save, from the
        first block on."""
        turn.save.cursors = [0] * len(self._facts.groups)
        turn.save.boundaries = prompt_boundaries(turn.request, self._facts)

    def step(self, step: int, scheduled: Mapping[str, int]) -> None:
        """Order saves of the blocks that are full once this step has run.

        Args:
            scheduled: tokens that the step computes for each request.
        """
        self._touches_left = TOUCHED_A_STEP
        if self._used:
            self._touch()
        if step not in self._calendar:
            return
        due = self._calendar.pop(step)
        filled = self._nothing()
        for turn in due:
            if turn.save.due != step or not turn.pages.fingerprints:
                continue
            request = turn.request
            if request.waits_for_kv:
                turn.save.suspended = True  # until the engine admits it again
                continue
            tokens = request.num_computed_tokens + scheduled.get(request.request_id, 0)
            final = tokens - self._facts.draft_tokens
            behind = self._add_filled(turn, final, filled, LOOKED_AT)
            while turn.save.boundaries and turn.save.boundaries[-1] <= tokens:
                self._add_boundary(turn, turn.save.boundaries.pop(), filled)
            known = request.num_tokens
            look = self._stride.next_look(
                step, saved=turn.save.cursors[CONTEXT], computed=tokens, known=known
            )
            self.watch(turn, step + 1 if behind else look)
        self._order(filled)

    def save_state(self, turn: Turn, group: int, block: int, tokens: int) -> None:
        """Save a recurrent state that the engine keeps after ``tokens`` tokens, once this step has
        run, if the prompt has a boundary there. The engine may keep many other states, each of
        which would take a slot."""
        if not turn.pages.fingerprints or tokens not in prompt_boundaries(
            turn.request, self._facts
        ):
            return
        key = turn.state_key(group, tokens)
        if key is not None:
            filled = self._nothing()
            filled[group][key] = block
            turn.save.bounded[key] = None
            self._report_whole(turn, group, tokens)
            self._order(filled)

    def on_ended(self, turn: Turn) -> None:
        """Save the last blocks of a finished turn, and the pages at its end that fill no whole
        block. Record the pages of its context, and the last save, in ``turn.save``."""
        if not turn.has_kv or not turn.pages.fingerprints:
            return
        self._unwatch(turn)
        if not turn.save.cursors:
            self.start_over(turn)
        computed = kept_tokens(turn.request)
        end: int | None = computed
        if self._facts.has_states:
            end = state_tokens(turn.request, self._facts)
        filled = self._nothing()
        self._add_filled(turn, max(computed, end or 0), filled)
        self._remember_prompt_end(turn)
        if end is not None:
            self._add_end(turn, end, filled)
        self._order(filled, ends=True)
        turn.save.pages = self._context(turn)
        # Without pages to save now, the pages of the last step may still be in flight.
        if self._latest is not None and self._book.under_way(self._latest):
            turn.save.last = self._latest

    def count_used(self, context: Sequence[PageKey], save: OrderId | None) -> None:
        """Count the pages of a context as just used. Pages at its end count as less recently used,
        because a prefix without the end is a hit, but an end without the prefix is not.

        At most as many pages as CPU memory has slots are remembered, and the oldest are dropped
        first, because any number of turns may end while a copy hangs.

        Args:
            save: order after which all pages are in CPU memory; None if they already are.
        """
        if save is not None and self._book.under_way(save):
            used = self._used_by.setdefault(save, deque(maxlen=self._book.index.num_slots))
            used.extend(reversed(context))
        else:
            self._touch(reversed(context))

    def _touch(self, pages: Iterable[PageKey] = ()) -> None:
        """Count the given pages and earlier waiting pages as just used, up to the limit per
        step."""
        used, index = self._used, self._book.index
        used += pages
        del used[: max(0, len(used) - index.num_slots)]
        few = used[: self._touches_left]
        del used[: len(few)]
        self._touches_left -= len(few)
        index.touch(few)

    def _context(self, turn: Turn) -> list[PageKey]:
        """Return the turn's pages that have been checked for saving so far, in the order of the
        context, and then the pages at its boundaries."""
        cursors, groups = turn.save.cursors, self._facts.groups
        if len(groups) == 1:
            return [*turn.page_keys()[: cursors[0]], *turn.save.bounded]
        ends = [
            ((block + 1) * group.block_size, key)
            for at, group in enumerate(groups)
            for block, key in enumerate(turn.page_keys(at)[: cursors[at]])
        ]
        return [*(key for _, key in sorted(ends, key=itemgetter(0))), *turn.save.bounded]

    def _add_end(self, turn: Turn, end: int, filled: list[dict[PageKey, int]]) -> None:
        """Add the pages that a context of ``end`` tokens needs in addition to its whole blocks."""
        groups, size = self._facts.groups, self._facts.block_size
        whole = all(
            end // group.block_size == turn.save.cursors[at]
            for at, group in enumerate(groups)
            if group.reach.kind is KvKind.FULL
        )
        worth_a_slot = end >= size or turn.job is not None  # a few tokens without a job are not
        if end > 0 and whole and worth_a_slot:
            self._add_boundary(turn, end, filled)

    def _add_boundary(self, turn: Turn, tokens: int, filled: list[dict[PageKey, int]]) -> None:
        """Add the pages that a prefix of ``tokens`` needs in addition to whole blocks, if all these
        pages exist. The prefix is recorded as a boundary of the turn."""
        found = self._boundary(turn, tokens)
        for at, key, block in found:
            filled[at][key] = block
            turn.save.bounded[key] = None
        for at in {at for at, _, _ in found} if self.on_filled is not None else ():
            self._report_whole(turn, at, tokens)

    def _report_whole(self, turn: Turn, group: int, tokens: int) -> None:
        """Report the whole blocks that a prefix of ``tokens`` tokens needs."""
        if self.on_filled is not None:
            size = self._facts.groups[group].block_size
            first = self._facts.groups[group].needs(tokens).start
            self.on_filled(turn, group, range(first, tokens // size))

    def _boundary(self, turn: Turn, tokens: int) -> Sequence[tuple[int, PageKey, int]]:
        """Return the pages of a boundary, each with its group and block; empty if a page is
        missing."""
        request, unit = turn.request, self._facts.hash_tokens
        start = tokens // unit * unit
        tail: PageKey | None = None
        place = turn.tail_place(start)
        if place is not None:
            tail = tail_key(place[0], request.all_token_ids[start:tokens], place[1])
        found: list[tuple[int, PageKey, int]] = []
        for at, group in enumerate(self._facts.groups):
            if group.reach.kind is KvKind.STATE:
                if tokens < request.num_prompt_tokens:
                    continue  # the engine offers this state if it keeps it
                key = turn.state_key(at, tokens) if start == tokens else tail
                wanted = [(group.needs(tokens).start, key)]
            else:
                wanted = self._narrow_blocks(turn, at, tokens, tail)
            table = self._pool.tables[at].get(turn.request_id, ())
            for block, key in wanted:
                if key is None or block >= len(table) or table[block].is_null:
                    return ()
                in_group = turn.in_group(key, at) if key is tail else key
                found.append((at, in_group, table[block].block_id))
        if tail is not None and start < tokens:
            self._remember(place, request.all_token_ids[start:tokens])
        return found

    def _narrow_blocks(
        self, turn: Turn, at: int, tokens: int, tail: PageKey | None
    ) -> list[tuple[int, PageKey | None]]:
        """Return the blocks that a prefix needs and that no cursor covers, with their keys."""
        group, keys = self._facts.groups[at], turn.page_keys(at)
        needed, whole = group.needs(tokens), tokens // group.block_size
        blocks = list[tuple[int, PageKey | None]]()
        if group.reach.kind is not KvKind.FULL:
            blocks += [(i, keys[i] if i < len(keys) else None) for i in needed if i < whole]
        if needed.stop > whole:
            blocks.append((whole, tail))
        return blocks

    def _remember(self, place: tuple[bytes, object] | None, tokens: Sequence[int]) -> None:
        assert place is not None
        self._tails.add(*place, tokens)
        self._prune_tails()

    def _prune_tails(self) -> None:
        """Forget tails whose pages no tier has, once tails outnumber pages by two to one."""
        index, book = self._book.index, self._book
        stored = sum(len(tier.index) for tier in book.stores.values())
        if len(self._tails) > 2 * (index.num_slots + stored):
            self._tails.prune(
                lambda key: (
                    index.state(key) is not PageState.MISSING or not book.stored_nowhere([key])
                )
            )

    def _remember_prompt_end(self, turn: Turn) -> None:
        """Register the block in which the prompt ended as a partial tail. The answer has filled the
        block.

        A later prompt that ends at the same position, or continues differently because answers are
        tokenised again, can use the first part of the block.
        """
        size = self._facts.block_size
        block, length = divmod(turn.request.num_prompt_tokens, size)
        if self._facts.narrow or not length or block >= turn.save.cursors[CONTEXT]:
            return
        if (place := turn.tail_place(block * size)) is not None:
            tokens = turn.request.all_token_ids[block * size : (block + 1) * size]
            self._tails.add(*place, tokens, key=turn.page_keys()[block])
            self._prune_tails()

    def on_settled(self, done: Settled[SaveOrder]) -> None:
        """Release the blocks of a save that has finished on every rank."""
        self.over += 1
        if used := self._used_by.pop(done.order.order_id, None):
            self._touch(used)
        failed = len(done.failed)
        self._counters.add("save_failures", failed)
        if done.abandoned:
            return
        good = len(done.keys) - failed
        self._counters.add("pages_saved", good)
        own, unused = self._bytes[done.order.group]
        self._counters.add("bytes_saved", good * own)
        self._counters.add("save_seconds", done.seconds)
        self._counters.add("slot_bytes_unused", good * unused)
        self._give_up(done.order.blocks)

    def free_some(self) -> bool:
        """True if finishing the saves in flight will free blocks, because nothing else holds a
        reference on them."""
        blocks = self._pool.blocks
        return any(
            blocks[block].ref_cnt == 1
            for order in self._book.saves_under_way()
            for block in order.blocks
        )

    def drop_unsent(self) -> list[OrderId]:
        """Forget the unsent saves, and release their blocks. Returns the ids of the saves."""
        dropped = self.unsent.take()
        for order in dropped:
            self._book.cancel(order)
            self._give_up(order.blocks)
            self._used_by.pop(order.order_id, None)
        return [order.order_id for order in dropped]

    def drop_all(self) -> list[OrderId]:
        """Forget every save, and release its blocks immediately. Returns the ids of the sent saves,
        whose copies may still run while the blocks are overwritten."""
        self.drop_unsent()
        self._used_by.clear()
        abandoned = self._book.abandon_saves()
        for order in abandoned:
            self._give_up(order.blocks)
        return [order.order_id for order in abandoned]

    def _nothing(self) -> list[dict[PageKey, int]]:
        return [{} for _ in self._facts.groups]

    def _add_filled(
        self,
        turn: Turn,
        tokens: int,
        filled: list[dict[PageKey, int]],
        most: int | None = None,
    ) -> bool:
        """Add the blocks that were filled since the last check and that CPU memory lacks, with
        their keys.

        Returns True if more blocks are left.

        Args:
            tokens: tokens whose KV exists, possibly including drafts and placeholders. Blocks whose
                tokens are not final have no hash yet, and wait.
            most: maximum number of blocks of a group to add; None for all. The blocks before them
                that CPU memory has are not counted, but at most four times as many are checked.
        """
        behind = False
        for at, group in enumerate(self._facts.groups):
            if group.reach.kind is not KvKind.FULL:
                continue
            keys = turn.page_keys(at)
            blocks = self._pool.tables[at].get(turn.request_id, ())
            full = min(tokens // group.block_size, len(keys), len(blocks))
            start = turn.save.cursors[at]
            if full <= start:
                continue
            looked_at = full if most is None else min(full, start + 4 * most)
            start = self._book.index.readable_prefix(keys, start, looked_at)
            if most is not None:
                stop = looked_at if start == looked_at else min(full, start + most)
                full, behind = stop, behind or stop < full
            if self.on_filled is not None:
                # An answer may repeat pages of a previous engine, which KV events do not name yet.
                answer = turn.request.num_prompt_tokens // group.block_size
                first = min(start, max(answer, turn.save.cursors[at]))
                self.on_filled(turn, at, range(first, full))
            turn.save.cursors[at] = full
            part = keys[start:full]
            lacks = self._book.index.lacks(part)
            ids = map(_ID, compress(blocks[start:full], lacks))
            filled[at].update(zip(compress(part, lacks), ids, strict=True))
        return behind

    def _order(self, filled: Sequence[Mapping[PageKey, int]], *, ends: bool = False) -> None:
        """Order saves of pages, by group. ``ends`` is True for the last pages of a turn."""
        self.capture([self._worth_a_slot(pages) for pages in filled], ends=ends)

    def _worth_a_slot(self, pages: Mapping[PageKey, int]) -> Mapping[PageKey, int]:
        book, index = self._book, self._book.index
        if len(book.stored_nowhere(pages)) == len(pages):  # the usual case
            return pages
        missing = index.missing(pages)
        return worth_a_slot(missing, book.stored_nowhere(missing), index.free_slots)

    def capture(
        self, filled: Sequence[Mapping[PageKey, int]], *, ends: bool = False
    ) -> list[SaveOrder]:
        """Order saves of all given pages, by group, as long as slots are available, without
        ``worth_a_slot``.

        Args:
            ends: True for the last pages of a turn. Turns that end in one step share an order.
        """
        orders = list[SaveOrder]()
        for at, pages in enumerate(filled):
            if not pages:
                continue
            before = self._unsent_ends(at) if ends else None
            order = self._book.plan_save(pages, at, before)
            if order is None:
                continue
            fresh = order.blocks
            if before is not None:
                fresh = fresh[len(before.blocks) :]
                self.unsent.remove(before)
            self._pool.hold([self._pool.blocks[block] for block in fresh])
            if ends:
                self._ends[at] = order
            self.unsent.append(order)
            orders.append(order)
            self._latest = order.order_id
        return orders

    def _unsent_ends(self, group: int) -> SaveOrder | None:
        """Return the unsent order of turns that just ended, if another turn's last pages may join
        it; otherwise None."""
        order = self._ends.get(group)
        if order is None or len(order.keys) >= ENDS_TOGETHER or order not in self.unsent:
            return None
        return order

    def _give_up(self, block_ids: Sequence[int]) -> None:
        blocks = self._pool.blocks
        self._pool.release([blocks[block] for block in reversed(block_ids)])
