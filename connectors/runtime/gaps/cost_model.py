"""What each tier costs this engine now: the measured figures behind every decision."""

from __future__ import annotations

import math
from collections.abc import Callable

from tiered_kv.connectors.runtime.base import BlockPool, EngineFacts
from tiered_kv.connectors.runtime.pins.pin_table import PinTable
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.page_group import CONTEXT
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.policies.base import Costs, JobKey
from tiered_kv.policies.pricing.estimators import (
    SHORTEST_S,
    Memoryfulness,
    PrefillFit,
    QueueDelay,
    ShadowPrice,
    Survival,
)

STAY_EVERY_S = 5.0
"""Between two looks at how fast slots are taken."""


class Prices:
    """Measures what waiting in each tier costs, and says it as ``Costs``.

    Args:
        fit: seconds of prefills.
        pool: vLLM's block pool.
        demand: blocks that jobs are heading for if so many more are pinned for one of them, those
            that began after it left out; None if nobody counts them.
        running: requests that were given blocks and have not ended.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        facts: EngineFacts,
        planner: OrderBook,
        fit: PrefillFit,
        pins: PinTable,
        pool: BlockPool,
        demand: Callable[[int, JobKey | None], float] | None,
        running: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self.queue = QueueDelay()
        self.memoryfulness = Memoryfulness()
        self.survival = Survival(1.0 if planner.index.num_slots else 0.0)
        self.price = ShadowPrice()
        self._facts = facts
        self._planner = planner
        self._fit = fit
        self._pins = pins
        self._pool = pool
        self._demand = demand
        self._running = running
        self._clock = clock
        self._taken_at = -math.inf
        self._taken = 0
        self._taken_per_s = 0.0

    def admitted(self, turn: Turn) -> None:
        """A turn got its blocks. If its KV had left VRAM, it may have waited for that."""
        size = self._facts.block_size
        # The last token is computed always: its logits are wanted.
        had = min(turn.shared, turn.request.num_prompt_tokens - 1)
        # With pages from below it waited for these, and they say nothing of CPU memory.
        if turn.vram_tokens + size >= had or turn.promotions:
            return
        self.queue.observe(self._clock() - turn.arrived_at)
        if turn.saved:
            self.survival.observe(turn.cpu_tokens, had - turn.vram_tokens)

    def look(self, waiting_tokens: int) -> None:
        """See how much VRAM is wanted: by what runs, and by ``waiting_tokens`` of requests that
        are not admitted yet."""
        in_use = self._facts.num_blocks - 1 - self._pool.num_free()
        waiting = -(-waiting_tokens // self._facts.block_size)
        self.price.observe(in_use - self._pins.held_blocks + waiting, self._clock())

    def costs(self, context_tokens: int, job: JobKey | None = None) -> Costs:
        """For a context of so many tokens, of a job's turn that is ending."""
        facts, planner = self._facts, self._planner
        blocks = -(-context_tokens // facts.block_size)
        offloaded = planner.index.num_slots > 0
        copy_s = planner.copy_seconds(blocks)
        # Unknown, it is no reason to do without a copy.
        recompute_s = self._fit.seconds(0, context_tokens) or copy_s
        held_up = self._held_up(copy_s, recompute_s)
        return Costs(
            recompute_s=recompute_s,
            cpu_s=copy_s if offloaded else None,
            tiers_s={
                store.tier: copy_s + planner.promote_seconds(store, blocks)
                for store in planner.stores
                if store.group == CONTEXT
            },
            queue_s=self.queue.mean_s,
            memoryfulness=self.memoryfulness.value,
            vram_price=self._price(blocks, job, held_up),
            held_up=held_up,
            cpu_stay_s=self.cpu_stay_s(),
            survival=self.survival.share,
        )

    def _held_up(self, copy_s: float, recompute_s: float) -> float:
        """Requests that lose B without a pin, the job's own included: what is computed again holds
        up every other request of the batch as well; waiting and copies hold up none."""
        copied = self.survival.share if copy_s <= recompute_s else 0.0
        alone_s = self.queue.mean_s * self.memoryfulness.value + copied * copy_s
        computed_s = (1 - copied) * recompute_s
        running = max(1, self._running())
        return (alone_s + running * computed_s) / max(alone_s + computed_s, SHORTEST_S)

    def _price(self, blocks: int, job: JobKey | None, held_up: float) -> float:
        """λ for a turn's blocks, of which a pin saves B for ``held_up`` requests."""
        pool = self._facts.num_blocks - 1
        mine = min(blocks, self._pins.budget)
        if self._demand is None:
            return self.price.price(pool, self._pins.held_blocks + mine, own=blocks)
        return self.price.of(self._demand(mine, job), pool) / held_up

    def cpu_stay_s(self) -> float:
        """How long a page stays in CPU memory at the present rate before it is evicted;
        infinite while slots are free."""
        index, now = self._planner.index, self._clock()
        if now - self._taken_at >= STAY_EVERY_S:
            rate = (index.taken - self._taken) / (now - self._taken_at)  # 0 the first time
            self._taken_per_s += 0.5 * (rate - self._taken_per_s)
            self._taken, self._taken_at = index.taken, now
        if index.free_slots or not self._taken_per_s:
            return math.inf
        return index.num_slots / self._taken_per_s
