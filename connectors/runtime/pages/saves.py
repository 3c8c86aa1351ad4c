"""Saves: blocks are copied to CPU memory as they fill, each once.

A calendar holds who must be looked at when (``policies.cache.saving``). Short blocks are saved a
few at a time, and the requests of a few steps are looked at together, so that orders are few.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tiered_kv.connectors.runtime.base import BlockPool, EngineFacts
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.keys import PageKey
from tiered_kv.metrics import Counters
from tiered_kv.orders import OrderId, SaveOrder
from tiered_kv.pages.order_book import OrderBook, Settled
from tiered_kv.pages.partial_blocks import TailIndex
from tiered_kv.policies.cache.saving import SaveStride, is_tail_worth_a_slot


class Saves:
    """Orders saves, and holds a reference on every block until its copy is done.

    Args:
        pool: the engine's block pool.

    Attributes:
        over: how many saves have ended so far.
    """

    def __init__(
        self,
        facts: EngineFacts,
        planner: OrderBook,
        tails: TailIndex,
        counters: Counters,
        pool: BlockPool,
    ) -> None:
        self._facts = facts
        self._planner = planner
        self._tails = tails
        self._counters = counters
        self._pool = pool
        self._stride = SaveStride.of(facts.block_size)
        self._calendar: defaultdict[int, list[Turn]] = defaultdict(list)
        self.unsent: list[SaveOrder] = []
        self.over = 0
        self._last_of_turn: dict[OrderId, list[PageKey]] = {}

    def take(self) -> tuple[SaveOrder, ...]:
        """Hand over the orders not yet sent."""
        orders, self.unsent = tuple(self.unsent), []
        return orders

    def watch(self, turn: Turn, step: int) -> None:
        """Look for newly filled blocks of this turn in that step, and not before."""
        if turn.pages.fingerprint is not None:
            turn.save.due = step
            self._calendar[step].append(turn)

    def resume(self, turn: Turn) -> None:
        """Go on saving the turn: nobody else loads into its blocks any more."""
        turn.save.suspended = False

    def start_over(self, turn: Turn) -> None:
        """Offer all of the turn's blocks again."""
        turn.save.cursor = 0

    def step(self, step: int, scheduled: Mapping[str, int]) -> None:
        """Order saves of the blocks that are full once this step has run.

        Args:
            scheduled: tokens that each request computes in this step.
        """
        if step not in self._calendar:
            return
        due = self._calendar.pop(step)
        filled: dict[PageKey, int] = {}
        for turn in due:
            if turn.save.due != step or turn.pages.fingerprint is None:
                continue
            request = turn.request
            if request.waits_for_kv:
                turn.save.suspended = True  # until the engine admits it again
                continue
            tokens = request.num_computed_tokens + scheduled.get(request.request_id, 0)
            filled.update(self._newly_filled(turn, tokens))
            known = request.num_tokens
            look = self._stride.next_look(
                step, saved=turn.save.cursor, computed=tokens, known=known
            )
            self.watch(turn, look)
        self._order(filled)

    def finish(
        self, turn: Turn, block_ids: Sequence[int]
    ) -> tuple[SaveOrder | None, list[PageKey]]:
        """Save the blocks that a turn filled last, and its partial tail, at its end.

        All its pages then count as just used, the end of the context as the least
        valuable: a prefix without its end is a hit, an end without its prefix is none.

        Returns:
            The last save of the turn, if there is one, and all its pages, first to last.
        """
        turn.save.due = None
        request, size = turn.request, self._facts.block_size
        computed = min(
            request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1
        )
        pages = dict(self._newly_filled(turn, computed))
        block, length = divmod(computed, size)
        place = None
        worth_it = is_tail_worth_a_slot(block, of_job=turn.job is not None)
        if length and worth_it and block == turn.save.cursor and block < len(block_ids):
            place = turn.tail_place(block, size)
        self._remember_prompt_end(turn)
        used = list(reversed(turn.page_keys()[: turn.save.cursor]))
        if place is not None:
            tail = self._tails.add(*place, request.all_token_ids[block * size : computed])
            pages[tail.key] = block_ids[block]
            used.insert(0, tail.key)
            index, book = self._planner.index, self._planner
            stored = sum(len(tier.index) for tier in book.stores.values())
            if len(self._tails) > 2 * (index.num_slots + stored):
                self._tails.prune(lambda key: index.known(key) or book.stored(key))
        order = self._order(pages)
        if order is None:
            self._planner.index.touch(used)
        else:  # its pages can be touched once they are there
            self._last_of_turn[order.order_id] = used
        return order, used[::-1]

    def _remember_prompt_end(self, turn: Turn) -> None:
        """Keep the block in which the prompt ended as a partial tail: the answer has filled it.

        A prompt that ends there again, or goes on otherwise (answers are tokenised anew), can use
        its first part.
        """
        size = self._facts.block_size
        block, length = divmod(turn.request.num_prompt_tokens, size)
        if length and block < turn.save.cursor and (place := turn.tail_place(block, size)):
            tokens = turn.request.all_token_ids[block * size : (block + 1) * size]
            self._tails.add(*place, tokens, key=turn.page_keys()[block])

    def on_settled(self, done: Settled) -> None:
        """Give up the blocks of a save that is over on every rank."""
        assert isinstance(done.order, SaveOrder)
        self.over += 1
        self._planner.index.touch(self._last_of_turn.pop(done.order.order_id, ()))
        failed = len(done.failed)
        self._counters.add("save_failures", failed)
        if done.abandoned:
            return
        good = len(done.keys) - failed
        self._counters.add("pages_saved", good)
        page_bytes = self._facts.groups[done.order.group].page_bytes
        unused = self._facts.slot_bytes - page_bytes
        self._counters.add("bytes_saved", good * page_bytes * self._facts.ranks)
        self._counters.add("slot_bytes_unused", good * unused * self._facts.ranks)
        self._give_up(done.order.blocks)

    def free_some(self) -> bool:
        """True if blocks are free once the saves under way are over: nobody else has them."""
        blocks = self._pool.blocks
        return any(
            blocks[block].ref_cnt == 1
            for order in self._planner.saves_under_way()
            for block in order.blocks
        )

    def drop_unsent(self) -> list[OrderId]:
        """Forget the saves that were not sent yet, and give up their blocks; returns them."""
        dropped, self.unsent = self.unsent, []
        for order in dropped:
            self._planner.cancel(order)
            self._give_up(order.blocks)
            self._last_of_turn.pop(order.order_id, None)
        return [order.order_id for order in dropped]

    def drop_all(self) -> list[OrderId]:
        """Forget every save, sent or not, and give up its blocks at once; returns those sent,
        whose copies may go on while others write into the blocks."""
        self.drop_unsent()
        self._last_of_turn.clear()
        abandoned = self._planner.abandon_saves()
        for order in abandoned:
            self._give_up(order.blocks)
        return [order.order_id for order in abandoned]

    def _newly_filled(self, turn: Turn, tokens: int) -> Iterable[tuple[PageKey, int]]:
        """Blocks filled since the last look, with their keys.

        Args:
            tokens: tokens whose KV is there, drafts and placeholders perhaps included;
                blocks whose tokens are not final yet have no hash, and wait.
        """
        keys = turn.page_keys()
        blocks = self._pool.tables.get(turn.request_id, ())
        full = min(tokens // self._facts.block_size, len(keys), len(blocks))
        start = turn.save.cursor
        if full <= start:
            return ()
        turn.save.cursor = full
        return zip(keys[start:full], [b.block_id for b in blocks[start:full]], strict=True)

    def _order(self, pages: Mapping[PageKey, int]) -> SaveOrder | None:
        order = self._planner.plan_save(pages) if pages else None
        if order is not None:
            self._pool.hold([self._pool.blocks[block] for block in order.blocks])
            self.unsent.append(order)
        return order

    def _give_up(self, block_ids: Sequence[int]) -> None:
        blocks = self._pool.blocks
        self._pool.release([blocks[block] for block in reversed(block_ids)])
