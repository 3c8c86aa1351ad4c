"""Restores: the pages of a prompt that can come back from CPU memory, and the orders for them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.lower_tiers.all_tiers import Below
from tiered_kv.connectors.runtime.step_timer import StepTimer
from tiered_kv.connectors.runtime.turn import GroupPages, Hit, PlacedPage, Turn
from tiered_kv.keys import PageKey
from tiered_kv.orders import FailLoad, LoadOrder, OrderId, Outbox, RestoreMode
from tiered_kv.page_group import CONTEXT
from tiered_kv.pages.base import PageState
from tiered_kv.pages.order_book import OrderBook, Settled
from tiered_kv.policies.cache.restore_mode import FasterRestore, RestoreCost

from .hits import Found, HitFinder, Run, There, run_of
from .saves import Saves

logger = logging.getLogger(__name__)

PAGES_A_STEP = 4096
"""Pages ordered in a step, after which no further restore begins in it: to order them, and for the
engine to find blocks for them, takes time, and to bring them takes longer than steps do."""


class Restores:
    """Finds readable pages and orders their way back to VRAM. Owns the unsent orders.

    Args:
        timer: measures steps.

    Attributes:
        policy: chooses how a restore is made; may be replaced between two of them.
        holding: turns that have blocks for an async restore and have not gone on since.
        unsent: restores not yet sent.
        refused: restores that must fail, not yet sent.
    """

    def __init__(
        self,
        engine: EngineState,
        book: OrderBook,
        finder: HitFinder,
        policy: FasterRestore,
        timer: StepTimer,
    ) -> None:
        self.policy = policy
        self._timer = timer
        self._facts = engine.facts
        self._book = book
        self._index = book.index
        self._finder = finder
        self._counters = engine.counters
        self._pool = engine.pool
        self.unsent = Outbox[LoadOrder]()
        self._pages = 0  # of those, if there are any
        self.refused = Outbox[FailLoad]()
        self._from_there: dict[OrderId, tuple[int, ...]] = {}
        self.holding: set[Turn] = set()
        self._unlucky: set[Turn] = set()  # some of whose restore did not come, without blocks since

    def comes_later(self, turn: Turn, num_computed: int) -> bool:
        """True if a restore for the turn is left to the next step."""
        keys, first = turn.page_keys(), num_computed // self._facts.block_size
        if first >= len(keys):
            return False
        if self._index.cold.being_compressed and self._awaits_compression(turn, num_computed):
            return True
        many = bool(self.unsent) and self._pages >= PAGES_A_STEP
        return many and self._index.readable(keys[first])

    def _awaits_compression(self, turn: Turn, num_computed: int) -> bool:
        """True if the turn could restore a page that is being compressed once that has ended."""
        state, limit = self._index.state, turn.request.num_tokens - 1

        def there(key: PageKey) -> bool:
            return state(key) not in (PageState.MISSING, PageState.BEING_WRITTEN)

        found = self._finder.find(turn, num_computed, limit, there, run_of(there))
        return found is not None and PageState.BEING_COMPRESSED in map(state, found.keys)

    def withdraw(self, turn: Turn) -> None:
        """Take back what was offered for the turn."""
        turn.restore.hit = None

    def loaded(self, turn: Turn) -> None:
        """End the turn's restore: whoever loaded into its blocks is done."""
        self.holding.discard(turn)
        self._unlucky.discard(turn)
        turn.restore.loading, turn.restore.broken = 0, False
        turn.restore.promised = turn.restore.failed = False

    def begins_anew(self, turn: Turn) -> bool:
        """True if the engine asks for a turn of whose async restore nothing came; once.

        vLLM has freed its blocks, and keeps it all the same before those that hold some, which get
        no turn if the pool has no room for it; told to ask later, it lets it wait with the others.
        Restored again it would need room twice: vLLM goes on reserving what it lacked the first
        time. So it is computed.
        """
        restore = turn.restore
        if not restore.promised:
            return False
        restore.promised, restore.failed = False, True
        self.holding.discard(turn)
        return True

    def on_failed(self, turn: Turn) -> None:
        """Take in that some of a live turn's async restore did not come."""
        self._unlucky.add(turn)

    def on_ended(self, turn: Turn) -> None:
        """Forget a turn that is over."""
        self.holding.discard(turn)
        self._unlucky.discard(turn)

    def answer(self, turn: Turn) -> tuple[int | None, bool]:
        """Tokens that the turn is offered, and True if they come async. None: ask again in the next
        step.

        An async restore comes behind turns whose own failed. vLLM keeps room for all that those
        lack, and lets no other such restore into it; and they may be behind this one in its queue,
        where it does not look once room lacks.
        """
        hit = turn.restore.hit
        if hit is None:
            return 0, False
        if hit.mode is RestoreMode.ASYNC and self._unlucky and self._unlucky != {turn}:
            self.withdraw(turn)
            return None, False
        return hit.tokens, hit.mode is RestoreMode.ASYNC

    def on_part_loaded(self, turn: Turn) -> bool:
        """Take in that an order of the turn's restore is over; True if that was the last one."""
        if not turn.restore.loading:
            return False
        turn.restore.loading -= 1
        return not turn.restore.loading

    def find(
        self, turn: Turn, num_computed: int, others: int, below: Below | None = None
    ) -> Hit | None:
        """Offer the longest prefix beyond that in VRAM whose pages are readable.

        At least the last token is left to compute: its logits are wanted.

        Args:
            num_computed: tokens of the VRAM prefix, whole blocks.
            others: requests running beside this one.
            below: pages that may come up in pieces beside the readable ones.
        """
        index, limit = self._index, turn.request.num_tokens - 1
        there: There = index.readable
        run: Run = index.readable_prefix
        if below is not None:
            there, run = below.somewhere, run_of(below.somewhere)
        found = self._finder.find(turn, num_computed, limit, there, run)
        if found is not None and (usable := self.policy.usable(found.tokens)) < found.tokens:
            found = self._finder.find(turn, num_computed, usable, there, run)
        turn.restore.hit = None
        if found is not None:
            tokens = found.tokens - num_computed
            if below is not None and not all(map(index.readable, found.keys)):
                turn.restore.hit = Hit(found.parts, tokens, RestoreMode.ASYNC, below.until)
            else:
                turn.restore.hit = Hit(found.parts, tokens, self._mode(found, others))
        return turn.restore.hit

    def _mode(self, found: Found, others: int) -> RestoreMode:
        cold = self._index.cold  # decoded on threads of their own
        compressed = cold.compressed and PageState.COMPRESSED in map(cold.state, found.keys)
        if not self._facts.sync_restores or compressed:
            return RestoreMode.ASYNC
        copy_s = sum(self._book.copy_seconds(len(part.keys), part.group) for part in found.parts)
        return self.policy.choose(RestoreCost(copy_s, self._timer.step_s, others))

    def order(self, turn: Turn, tokens: int) -> Sequence[PlacedPage]:
        """Order the restore that the engine now counts on.

        Returns:
            Pages that CPU memory lacks: they are to come in pieces (``add_piece``).

        Raises:
            RuntimeError: none was offered, or not this one; follow with ``refuse``.
        """
        hit = turn.restore.hit
        if hit is None:
            raise RuntimeError("the engine expects a restore that was not offered")
        if tokens != hit.tokens and self._facts.narrow:
            raise RuntimeError(f"the engine expects {tokens} of {hit.tokens} tokens offered")
        lacking: Sequence[PlacedPage] = ()
        if hit.pieces_until is not None:
            lacking = self._order_first_pieces(turn, hit, tokens)
        else:
            self._order_whole(turn, hit, tokens)
        turn.restore.promised = turn.restore.loading > 0
        if turn.restore.promised:
            self.holding.add(turn)
        turn.restore.hit = None
        self._counters.add("restores_async" if turn.restore.loading else "restores_sync")
        return lacking

    def _order_whole(self, turn: Turn, hit: Hit, tokens: int) -> None:
        if len(hit.parts) > 1 and not all(map(self._index.readable, hit.keys)):
            raise RuntimeError("a page that was offered is gone")  # before anything is ordered
        for part in hit.parts:
            keys, where = self._places(turn, part, hit, tokens)
            order = self._plan(turn, keys, where, hit.mode, part.group)
            if hit.mode is RestoreMode.SYNC:
                table = self._pool.tables[part.group][turn.request_id]
                behind = tuple(block.block_id for block in table[part.first :])
                self._from_there[order.order_id] = behind
            else:
                turn.restore.loading += 1

    def _order_first_pieces(self, turn: Turn, hit: Hit, tokens: int) -> Sequence[PlacedPage]:
        """Order what CPU memory has of a restore; give the pages that it lacks."""
        readable, lacking = self._index.readable, list[PlacedPage]()
        here = list[tuple[int, list[PageKey], list[int]]]()
        for part in hit.parts:
            keys, blocks = list[PageKey](), list[int]()
            for key, block in zip(*self._places(turn, part, hit, tokens), strict=True):
                if readable(key):
                    keys.append(key)
                    blocks.append(block)
                else:
                    lacking.append(PlacedPage(part.group, key, block))
            if keys:
                here.append((part.group, keys, blocks))
        if not lacking:
            self._order_whole(turn, hit, tokens)
            return ()
        turn.restore.loading = 1  # until the last piece is ordered
        for group, keys, blocks in here:
            self.add_piece(turn, group, keys, blocks, more=True)
        return lacking

    def _places(
        self, turn: Turn, part: GroupPages, hit: Hit, tokens: int
    ) -> tuple[Sequence[PageKey], Sequence[int]]:
        """Pages of a part, those that ``tokens`` of the hit need, and their blocks."""
        size = self._facts.groups[part.group].block_size
        keys = part.keys if tokens == hit.tokens else part.keys[: -(-tokens // size)]
        table = self._pool.tables[part.group][turn.request_id]
        return keys, [block.block_id for block in table[part.first : part.first + len(keys)]]

    def _plan(
        self,
        turn: Turn,
        keys: Sequence[PageKey],
        blocks: Sequence[int],
        mode: RestoreMode,
        group: int,
        more: bool = False,
    ) -> LoadOrder:
        promoted = self._index.promoted
        before = promoted.used
        order = self._book.plan_load(turn.request_id, keys, blocks, mode, group, more)
        turn.restore.came_up += promoted.used - before
        self._pages = len(order.blocks) + (self._pages if self.unsent else 0)
        self.unsent.append(order)
        return order

    def add_piece(
        self, turn: Turn, group: int, keys: Sequence[PageKey], blocks: Sequence[int], *, more: bool
    ) -> OrderId:
        """Order readable pages of a turn whose restore comes in pieces.

        Args:
            more: False if this is the last piece.
        """
        order = self._plan(turn, keys, blocks, RestoreMode.ASYNC, group, more)
        turn.restore.loading += more
        return order.order_id

    def break_off(self, turn: Turn, blocks: Sequence[int]) -> bool:
        """End a restore in pieces: what its last blocks were to hold is computed.

        Returns:
            True if nothing of it is under way.
        """
        self.refused.append(FailLoad(turn.request_id, tuple(blocks), RestoreMode.ASYNC))
        turn.restore.loading -= 1
        turn.restore.broken = True
        self.on_failed(turn)
        return not turn.restore.loading

    def refuse(self, request_id: str, turn: Turn | None) -> tuple[int, ...]:
        """Order a restore that must fail, in place of one that the engine counts on: the workers
        report its blocks as bad, and the tokens are recomputed.

        Returns:
            The blocks that will hold nothing.
        """
        hit = turn.restore.hit if turn is not None else None
        usual = RestoreMode.SYNC if self._facts.sync_restores else RestoreMode.ASYNC
        mode = hit.mode if hit is not None else usual
        first = min((part.first for part in hit.parts), default=0) if hit is not None else 0
        table = self._pool.tables[CONTEXT].get(request_id, ())
        bad = tuple(block.block_id for block in table[first:])
        self.refused.append(FailLoad(request_id, bad, mode))
        if turn is not None:
            turn.restore.promised = mode is RestoreMode.ASYNC
            if turn.restore.promised:
                self.on_failed(turn)
        return bad

    def on_settled(self, done: Settled[LoadOrder]) -> tuple[int, ...]:
        """Take in a restore that is over on every rank.

        Returns:
            The blocks of its request that the engine hashed before it was made, and those behind.
        """
        good = len(done.keys) - len(done.failed)
        page_bytes = self._facts.groups[done.order.group].page_bytes * self._facts.ranks
        self._counters.add("pages_restored", good)
        self._counters.add("bytes_restored", good * page_bytes)
        self._counters.add("restore_seconds", done.seconds)
        if done.order.cold:
            bad = sum(done.order.slots[i] < 0 for i in done.failed)
            cold = len(done.order.cold) - bad
            self._counters.add("pages_decompressed", cold)
            self._counters.add("bytes_decompressed", cold * page_bytes)
            self._counters.add("decompression_seconds", done.seconds)
        self._counters.add("restore_failures", len(done.failed))
        if done.failed:
            logger.warning("%d pages could not be restored and are recomputed", len(done.failed))
        return self._from_there.pop(done.order.order_id, ())

    def forget_bad_blocks(
        self,
        bad: set[int],
        restored: Sequence[int],
        turns: Iterable[Turn],
        saves: Saves,
        step: int,
    ) -> None:
        """Make the blocks of a failed sync restore unfindable.

        The engine hashes the blocks of a restore before it is made. It rewinds the requests that
        use a bad block, so that they recompute it, but leaves its hash in place. If they are
        aborted or preempted first, the next lookup would hit garbage. So the hashes of the bad
        blocks, and of those computed behind them, go as soon as they are known.

        The workers have refused the saves that were ordered since. They are offered again, but for
        requests that hold a bad block: nothing of these is saved or restored any more.

        Args:
            bad: blocks that hold nothing.
            restored: blocks of the restore's request, first to last. The request may be gone.
            turns: the live requests.
        """
        self._forget_from(bad, restored)
        for turn in turns:
            if not turn.source.admitted or turn.loading:
                continue
            ids = [block.block_id for block in self._pool.tables[CONTEXT].get(turn.request_id, ())]
            if self._forget_from(bad, ids):
                turn.forget_pages()
                self.withdraw(turn)
            else:
                saves.start_over(turn)
                saves.watch(turn, step + 1)

    def _forget_from(self, bad: set[int], ids: Sequence[int]) -> bool:
        """Make blocks from the first bad one on unfindable; False if there is none."""
        first = next((i for i, block in enumerate(ids) if block in bad), len(ids))
        self._pool.forget(ids[first:])
        return first < len(ids)
