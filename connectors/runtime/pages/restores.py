"""Restores: the pages of a prompt that can come back from CPU memory, and the orders for them."""

from __future__ import annotations

import logging

from tiered_kv.connectors.runtime.base import BlockPool, EngineFacts
from tiered_kv.connectors.runtime.step_timer import StepTimer
from tiered_kv.connectors.runtime.turn import Hit, Turn
from tiered_kv.metrics import Counters
from tiered_kv.orders import FailLoad, LoadOrder, OrderId, RestoreMode
from tiered_kv.page_group import CONTEXT
from tiered_kv.pages.order_book import OrderBook, Settled
from tiered_kv.policies.cache.restore_mode import RestoreCost, RestorePolicy, begins_later

from .hits import Found, HitFinder

logger = logging.getLogger(__name__)


class Restores:
    """Finds readable pages and orders their way back to VRAM. Owns the unsent orders.

    Args:
        timer: measures steps.
        pool: the engine's block pool.

    Attributes:
        policy: chooses how a restore is made; may be replaced between two of them.
    """

    def __init__(
        self,
        facts: EngineFacts,
        planner: OrderBook,
        finder: HitFinder,
        policy: RestorePolicy,
        timer: StepTimer,
        counters: Counters,
        pool: BlockPool,
    ) -> None:
        self.policy = policy
        self._timer = timer
        self._facts = facts
        self._planner = planner
        self._index = planner.index
        self._finder = finder
        self._counters = counters
        self._pool = pool
        self.unsent: list[LoadOrder] = []
        self._pages = 0  # of those
        self.refused: list[FailLoad] = []  # not sent yet
        self._from_there: dict[OrderId, tuple[int, ...]] = {}

    def take(self) -> tuple[LoadOrder, ...]:
        """Hand over the orders not yet sent."""
        orders, self.unsent = tuple(self.unsent), []
        self._pages = 0
        return orders

    def take_refused(self) -> tuple[FailLoad, ...]:
        """Hand over the restores that must fail and were not sent yet."""
        refused, self.refused = tuple(self.refused), []
        return refused

    def comes_later(self, turn: Turn, num_computed: int) -> bool:
        """True if a restore for the turn is left to the next step."""
        if not begins_later(self._pages):
            return False
        keys, first = turn.page_keys(), num_computed // self._facts.block_size
        return first < len(keys) and self._index.readable(keys[first])

    def withdraw(self, turn: Turn) -> None:
        """Take back what was offered for the turn."""
        turn.restore.hit = None

    def loaded(self, turn: Turn) -> None:
        """End the turn's restore: whoever loaded into its blocks is done."""
        turn.restore.loading = 0
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
        return True

    def on_part_loaded(self, turn: Turn) -> bool:
        """Take in that an order of the turn's restore is over; True if that was the last one."""
        if not turn.restore.loading:
            return False
        turn.restore.loading -= 1
        return not turn.restore.loading

    def find(self, turn: Turn, num_computed: int, others: int) -> Hit | None:
        """Offer the longest prefix beyond that in VRAM whose pages are readable.

        At least the last token is left to compute: its logits are wanted.

        Args:
            num_computed: tokens of the VRAM prefix, whole blocks.
            others: requests running beside this one.
        """
        index, limit = self._index, turn.request.num_tokens - 1
        found = self._finder.find(turn, num_computed, limit, index.readable, index.resident_prefix)
        if found is not None and (usable := self.policy.usable(found.tokens)) < found.tokens:
            found = self._finder.find(
                turn, num_computed, usable, index.readable, index.resident_prefix
            )
        if found is None:
            turn.restore.hit = None
        else:
            mode = self._mode(found, others)
            turn.restore.hit = Hit(found.parts, found.tokens - num_computed, mode)
        return turn.restore.hit

    def _mode(self, found: Found, others: int) -> RestoreMode:
        if not self._facts.sync_restores:
            return RestoreMode.ASYNC
        copy_s = sum(self._planner.copy_seconds(len(part.keys), part.group) for part in found.parts)
        return self.policy.choose(RestoreCost(copy_s, self._timer.step_s, others))

    def order(self, turn: Turn, tokens: int) -> None:
        """Order the restore that the engine now counts on.

        Raises:
            RuntimeError: none was offered, or not this one; follow with ``refuse``.
        """
        hit = turn.restore.hit
        if hit is None:
            raise RuntimeError("the engine expects a restore that was not offered")
        if tokens != hit.tokens and self._facts.narrow:
            raise RuntimeError(f"the engine expects {tokens} of {hit.tokens} tokens offered")
        if len(hit.parts) > 1 and not all(map(self._index.readable, hit.keys)):
            raise RuntimeError("a page that was offered is gone")  # before anything is ordered
        for part in hit.parts:
            size = self._facts.groups[part.group].block_size
            keys = part.keys if tokens == hit.tokens else part.keys[: -(-tokens // size)]
            table = self._pool.tables[part.group][turn.request_id]
            where = [block.block_id for block in table[part.first : part.first + len(keys)]]
            order = self._planner.plan_load(turn.request_id, keys, where, hit.mode, part.group)
            self.unsent.append(order)
            self._pages += len(keys)
            if hit.mode is RestoreMode.SYNC:
                behind = tuple(block.block_id for block in table[part.first :])
                self._from_there[order.order_id] = behind
            else:
                turn.restore.loading += 1
        turn.restore.promised = turn.restore.loading > 0
        turn.restore.hit = None
        self._counters.add("restores_async" if turn.restore.loading else "restores_sync")

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
        return bad

    def on_settled(self, done: Settled) -> tuple[int, ...]:
        """Take in a restore that is over on every rank.

        Returns:
            The blocks of its request that the engine hashed before it was made, and those behind.
        """
        assert isinstance(done.order, LoadOrder)
        good = len(done.keys) - len(done.failed)
        self._counters.add("pages_restored", good)
        page_bytes = self._facts.groups[done.order.group].page_bytes
        self._counters.add("bytes_restored", good * page_bytes * self._facts.ranks)
        self._counters.add("restore_failures", len(done.failed))
        if done.failed:
            logger.warning("%d pages could not be restored and are recomputed", len(done.failed))
        return self._from_there.pop(done.order.order_id, ())
