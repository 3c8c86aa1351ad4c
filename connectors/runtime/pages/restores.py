"""Restores: finds the pages of a prompt that can be restored to VRAM, and orders their restore."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from operator import attrgetter

from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.lower_tiers.all_tiers import Below
from tiered_kv.connectors.runtime.step_timer import StepTimer
from tiered_kv.connectors.runtime.turn import GroupPages, Hit, PlacedRun, Turn
from tiered_kv.formatting import count
from tiered_kv.keys import PageKey
from tiered_kv.orders import FailLoad, LoadOrder, OrderId, Outbox, RestoreMode
from tiered_kv.page_group import CONTEXT
from tiered_kv.pages.base import PageState
from tiered_kv.pages.order_book import OrderBook, Settled
from tiered_kv.policies.cache.restore_mode import FasterRestore, RestoreCost

from .hits import Found, HitFinder, Run, There, run_of
from .saves import Saves

logger = logging.getLogger(__name__)

_ID = attrgetter("block_id")
WHOLE_PAGES = 2048
"""Maximum number of pages that are restored in one order. A longer restore is async, in pieces."""
PAGES_A_STEP = 1024
"""Number of restored pages for which the engine allocates or hashes blocks in a step, after which
no further restore starts in this step. Allocating and hashing take time, and the copies take longer
than a step anyway."""


class Restores:
    """Finds readable pages and orders their restore to VRAM. Owns the unsent orders.

    Args:
        timer: measures steps.

    Attributes:
        policy: chooses the restore mode; may be replaced between restores.
        holding: turns that have blocks for an async restore and have not resumed.
        unsent: restores not sent yet.
        refused: restores that must fail, not sent yet.
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
        self._pages = 0  # pages allocated or hashed in this step
        self.refused = Outbox[FailLoad]()
        self._from_there: dict[OrderId, tuple[int, ...]] = {}
        self.holding: set[Turn] = set()
        self._unlucky: set[Turn] = set()  # their restore failed in part; they have no new blocks

    def begin_step(self) -> None:
        """Start a step. Restores ordered from now on belong to it."""
        self._pages = 0

    def comes_later(self, turn: Turn, num_computed: int) -> bool:
        """Return True if a restore for the turn should be postponed, because a page that it would
        read is being compressed, or because this step has reached its limit ``PAGES_A_STEP``."""
        keys, first = turn.page_keys(), num_computed // self._facts.block_size
        if first >= len(keys):
            return False
        if self._index.cold.being_compressed and self._awaits_compression(turn, num_computed):
            return True
        return self._pages >= PAGES_A_STEP and self._index.readable(keys[first])

    def _awaits_compression(self, turn: Turn, num_computed: int) -> bool:
        """Return True if compression is moving a page that the turn could otherwise restore."""
        state, limit = self._index.state, turn.request.num_tokens - 1

        def there(key: PageKey) -> bool:
            return state(key) not in (PageState.MISSING, PageState.BEING_WRITTEN)

        found = self._finder.find(turn, num_computed, limit, there, run_of(there))
        return found is not None and PageState.BEING_COMPRESSED in map(state, found.keys)

    def withdraw(self, turn: Turn) -> None:
        """Withdraw the hit that was offered for the turn."""
        turn.restore.hit = None

    def loaded(self, turn: Turn) -> None:
        """Finish the turn's restore, because nothing loads into the turn's blocks any more."""
        if turn in self.holding:  # the engine hashes its blocks now
            self._pages += turn.source.cpu_tokens // self._facts.block_size
            self.holding.remove(turn)
        self._unlucky.discard(turn)
        turn.restore.loading, turn.restore.broken = 0, False
        turn.restore.promised = turn.restore.failed = False

    def retries(self, turn: Turn) -> bool:
        """Return True once if the engine retries a turn whose async restore failed entirely.

        vLLM has freed the turn's blocks, but still places the turn before requests that hold
        blocks. Those requests are not scheduled while the pool has no space for the turn. If vLLM
        is asked to retry later, it queues the turn with the other waiting requests. A second
        restore would need twice the space, because vLLM keeps reserving the blocks that the first
        restore lacked. So the turn is prefilled.
        """
        restore = turn.restore
        if not restore.promised:
            return False
        restore.promised, restore.failed = False, True
        self.holding.discard(turn)
        return True

    def on_failed(self, turn: Turn) -> None:
        """Record that part of a live turn's async restore failed."""
        self._unlucky.add(turn)

    def on_ended(self, turn: Turn) -> None:
        """Forget a finished turn."""
        self.holding.discard(turn)
        self._unlucky.discard(turn)

    def answer(self, turn: Turn) -> tuple[int | None, bool]:
        """Return the number of tokens offered to the turn, and True if their restore is async. If
        the number is None, the engine asks again in the next step.

        An async restore must wait for turns whose own restore failed. vLLM reserves all blocks that
        these turns lack, and lets no other async restore use them. These turns may also be behind
        ``turn`` in vLLM's queue, which vLLM stops scanning once blocks are short.
        """
        hit = turn.restore.hit
        if hit is None:
            return 0, False
        if hit.mode is RestoreMode.ASYNC and self._unlucky and self._unlucky != {turn}:
            self.withdraw(turn)
            return None, False
        return hit.tokens, hit.mode is RestoreMode.ASYNC

    def on_part_loaded(self, turn: Turn) -> bool:
        """Record that an order of the turn's restore finished. Returns True if it was the last
        order."""
        if not turn.restore.loading:
            return False
        turn.restore.loading -= 1
        return not turn.restore.loading

    def find(
        self, turn: Turn, num_computed: int, others: int, below: Below | None = None
    ) -> Hit | None:
        """Find the longest restorable prefix beyond the prefix in VRAM.

        At least the last token is left for the engine to compute, because its logits are needed.

        Args:
            num_computed: tokens of the VRAM prefix, whole blocks.
            others: number of other running requests.
            below: pages that may be promoted in pieces, in addition to the readable pages.
        """
        index, limit = self._index, turn.request.num_tokens - 1
        there: There = index.readable
        run: Run = index.readable_prefix
        if below is not None:
            there, run = below.somewhere, below.somewhere.run
        found = self._finder.find(turn, num_computed, limit, there, run)
        if found is not None and (usable := self.policy.usable(found.tokens)) < found.tokens:
            found = self._finder.find(turn, num_computed, usable, there, run)
        turn.restore.hit = None
        if found is not None:
            tokens = found.tokens - num_computed
            if below is not None and index.unreadable(found.keys):
                turn.restore.hit = Hit(found.parts, tokens, RestoreMode.ASYNC, below.until)
            else:
                turn.restore.hit = Hit(found.parts, tokens, self._mode(found, others))
        return turn.restore.hit

    def _mode(self, found: Found, others: int) -> RestoreMode:
        cold = self._index.cold  # compressed pages are decoded on separate threads
        compressed = cold.compressed and not cold.readable.isdisjoint(found.keys)
        long = sum(len(part.keys) for part in found.parts) > WHOLE_PAGES
        if not self._facts.sync_restores or compressed or long:
            return RestoreMode.ASYNC
        copy_s = sum(self._book.copy_seconds(len(part.keys), part.group) for part in found.parts)
        return self.policy.choose(RestoreCost(copy_s, self._timer.step_s, others))

    def order(self, turn: Turn, tokens: int) -> Sequence[PlacedRun]:
        """Order the restore that the engine expects.

        Returns:
            The runs of pages that have to be ordered in pieces (``add_piece``), because the restore
            is long or CPU memory lacks pages; empty if the whole restore was ordered.

        Raises:
            KeyError, RuntimeError: the restore was not offered, or one of its pages has been
                evicted; call ``refuse`` then.
        """
        hit = turn.restore.hit
        if hit is None:
            raise RuntimeError("the engine expects a restore that was not offered")
        if tokens != hit.tokens and self._facts.narrow:
            raise RuntimeError(
                f"the engine expects {tokens} restored tokens, but {hit.tokens} were offered"
            )
        runs = [self._placed(turn, part, hit, tokens) for part in hit.parts]
        pages = sum(len(run.keys) for run in runs)
        self._pages += pages
        lacks = hit.pieces_until is not None and bool(self._index.unreadable(hit.keys))
        in_pieces = lacks or (hit.mode is RestoreMode.ASYNC and pages > WHOLE_PAGES)
        if in_pieces:
            turn.restore.loading = 1  # until the last piece is ordered
        else:
            self._order_whole(turn, hit, runs)
        turn.restore.promised = turn.restore.loading > 0
        if turn.restore.promised:
            self.holding.add(turn)
        turn.restore.hit = None
        self._counters.add("restores_async" if turn.restore.loading else "restores_sync")
        return runs if in_pieces else ()

    def _order_whole(self, turn: Turn, hit: Hit, runs: Sequence[PlacedRun]) -> None:
        if len(runs) > 1 and self._index.unreadable(hit.keys):
            # Checked before any order is created.
            raise RuntimeError("a page of the offered restore has been evicted")
        for part, run in zip(hit.parts, runs, strict=True):
            where = list(map(_ID, run.blocks))
            order = self._plan(turn, run.keys, where, hit.mode, part.group)
            if hit.mode is RestoreMode.SYNC:
                table = self._pool.tables[part.group][turn.request_id]
                behind = tuple(map(_ID, table[part.first :]))
                self._from_there[order.order_id] = behind
            else:
                turn.restore.loading += 1

    def _placed(self, turn: Turn, part: GroupPages, hit: Hit, tokens: int) -> PlacedRun:
        """Return the pages of a part that the first ``tokens`` tokens of the hit need, and the
        blocks to which they are copied."""
        size = self._facts.groups[part.group].block_size
        keys = part.keys if tokens == hit.tokens else part.keys[: -(-tokens // size)]
        table = self._pool.tables[part.group][turn.request_id]
        blocks = table[part.first : part.first + len(keys)]
        return PlacedRun(part.group, part.first, keys, blocks)

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
        self.unsent.append(order)
        return order

    def add_piece(
        self, turn: Turn, group: int, keys: Sequence[PageKey], blocks: Sequence[int], *, more: bool
    ) -> OrderId:
        """Order readable pages of a turn that is restored in pieces. Raises KeyError if a page is
        not readable.

        Args:
            more: False if this is the last piece.
        """
        order = self._plan(turn, keys, blocks, RestoreMode.ASYNC, group, more)
        turn.restore.loading += more
        return order.order_id

    def break_off(self, turn: Turn, blocks: Sequence[int]) -> bool:
        """End a restore in pieces. The tokens of its remaining blocks are prefilled.

        Returns:
            True if none of its orders is in flight.
        """
        self.refused.append(FailLoad(turn.request_id, tuple(blocks), RestoreMode.ASYNC))
        turn.restore.loading -= 1
        turn.restore.broken = True
        self.on_failed(turn)
        return not turn.restore.loading

    def refuse(self, request_id: str, turn: Turn | None) -> tuple[int, ...]:
        """Order a restore that must fail, in place of a restore that the engine expects. The
        workers report its blocks as bad, and the engine recomputes the tokens.

        Returns:
            The blocks whose content is invalid.
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
        """Count a restore that has finished on every rank.

        Returns:
            For a sync restore, the blocks of its request from the restore's first block on. The
            engine hashed them before the restore.
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
            failed = count(len(done.failed), "page")
            logger.warning("%s could not be restored, and must be recomputed", failed)
        return self._from_there.pop(done.order.order_id, ())

    def forget_bad_blocks(
        self,
        bad: set[int],
        restored: Sequence[int],
        turns: Iterable[Turn],
        saves: Saves,
        step: int,
    ) -> None:
        """Remove the blocks of a failed sync restore from the prefix cache.

        The engine hashes the blocks of a restore before the restore runs. After a failure, it
        rewinds the requests that use a bad block, so that they recompute the block, but leaves the
        block's hash in place. If such a request is aborted or preempted first, the next lookup
        would hit invalid KV. So the hashes of bad blocks, and of the blocks computed after them,
        are removed as soon as the failure is known.

        The workers have refused the saves that were ordered since the failure. These saves are
        offered again, except for requests that hold a bad block: their pages are neither saved nor
        restored.

        Args:
            bad: blocks whose content is invalid.
            restored: blocks of the restore's request, first to last. The request may have finished.
            turns: live requests.
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
        """Remove the first bad block among ``ids``, and all blocks after it, from the prefix cache.
        Returns False if no block is bad."""
        first = next((i for i, block in enumerate(ids) if block in bad), len(ids))
        self._pool.forget(ids[first:])
        return first < len(ids)
