"""Restores: the pages of a prompt that can come back from CPU memory, and the orders for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tiered_kv.connectors.runtime.base import EngineFacts
from tiered_kv.connectors.runtime.step_timer import StepTimer
from tiered_kv.connectors.runtime.turn import Hit, Turn
from tiered_kv.metrics import Counters
from tiered_kv.orders import FailLoad, LoadOrder, OrderId, RestoreMode
from tiered_kv.pages.order_book import OrderBook, Settled
from tiered_kv.pages.partial_blocks import TailIndex
from tiered_kv.policies.cache.restore_mode import RestoreCost, RestorePolicy, begins_later

logger = logging.getLogger(__name__)


class Restores:
    """Finds readable pages and orders their way back to VRAM. Owns the unsent orders.

    Args:
        timer: measures steps.

    Attributes:
        policy: chooses how a restore is made; may be replaced between two of them.
    """

    def __init__(
        self,
        facts: EngineFacts,
        planner: OrderBook,
        tails: TailIndex,
        policy: RestorePolicy,
        timer: StepTimer,
        counters: Counters,
    ) -> None:
        self.policy = policy
        self._timer = timer
        self._facts = facts
        self._planner = planner
        self._index = planner.index
        self._tails = tails
        self._counters = counters
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
        turn.restore.loading = False

    def find(self, turn: Turn, num_computed: int, others: int) -> Hit | None:
        """Offer the longest run of readable pages after the VRAM prefix, with a partial tail.

        At least the last token is left to compute: its logits are wanted.

        Args:
            num_computed: tokens of the VRAM prefix, a multiple of the block size.
            others: requests running beside this one.
        """
        size, limit = self._facts.block_size, turn.request.num_tokens - 1
        keys = turn.page_keys()
        first = num_computed // size
        end = self._index.resident_prefix(keys, first, min(len(keys), limit // size))
        found = list(keys[first:end])
        tokens = end * size
        if end < len(keys) and limit // size == end and self._index.readable(keys[end]):
            found.append(keys[end])  # a full page of which all but the last token counts
            tokens = limit
        elif tail := turn.find_tail(self._tails, end, size, limit, self._index.readable):
            found.append(tail[0])
            tokens += tail[1]
        usable = self.policy.usable(tokens)
        if usable < tokens:
            tokens = usable
            del found[max(0, -(-tokens // size) - first) :]
        if tokens <= num_computed:
            turn.restore.hit = None
        else:
            mode = self._mode(len(found), others)
            turn.restore.hit = Hit(first, tuple(found), tokens - num_computed, mode)
        return turn.restore.hit

    def _mode(self, pages: int, others: int) -> RestoreMode:
        if not self._facts.sync_restores:
            return RestoreMode.ASYNC
        copy_s = self._planner.copy_seconds(pages)
        return self.policy.choose(RestoreCost(copy_s, self._timer.step_s, others))

    def order(self, turn: Turn, block_ids: Sequence[int], tokens: int) -> None:
        """Order the restore that the engine now counts on.

        Raises:
            RuntimeError: none was offered; follow with ``refuse``.
        """
        hit = turn.restore.hit
        if hit is None:
            raise RuntimeError("the engine expects a restore that was not offered")
        keys = hit.keys[: -(-tokens // self._facts.block_size)]
        where = block_ids[hit.first : hit.first + len(keys)]
        order = self._planner.plan_load(turn.request_id, keys, where, hit.mode)
        self.unsent.append(order)
        self._pages += len(keys)
        if hit.mode is RestoreMode.SYNC:
            self._from_there[order.order_id] = tuple(block_ids[hit.first :])
        turn.restore.hit = None
        turn.restore.loading = hit.mode is RestoreMode.ASYNC
        self._counters.add("restores_async" if turn.restore.loading else "restores_sync")

    def refuse(self, request_id: str, hit: Hit | None, block_ids: Sequence[int]) -> tuple[int, ...]:
        """Order a restore that must fail, in place of one that the engine counts on: the workers
        report its blocks as bad, and the tokens are recomputed.

        Returns:
            The blocks that will hold nothing.
        """
        mode, first = (hit.mode, hit.first) if hit else (RestoreMode.SYNC, 0)
        bad = tuple(block_ids[first:])
        self.refused.append(FailLoad(request_id, bad, mode))
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
