"""Costs of each tier on this engine now: the measured figures behind every decision."""

from __future__ import annotations

import math
from collections.abc import Callable

from tiered_kv.connectors.runtime.admission.gate import Admission, NoAdmission
from tiered_kv.connectors.runtime.base import BlockPool, EngineFacts
from tiered_kv.connectors.runtime.pins.pin_table import PinTable
from tiered_kv.connectors.runtime.turn import LiveTurns, Turn
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.policies.base import Costs, JobKey
from tiered_kv.policies.pricing.estimators import (
    Memoryfulness,
    PrefillFit,
    QueueDelay,
    ShadowPrice,
    Survival,
)
from tiered_kv.policies.pricing.pin_value import held_up


class CostModel:
    """Measures what waiting in each tier costs, for ``Costs``.

    Args:
        fit: seconds of prefills.
        pool: the engine's block pool.
        gate: counts the blocks that jobs are heading for, if it is there.
        turns: the live requests.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        facts: EngineFacts,
        planner: OrderBook,
        fit: PrefillFit,
        pins: PinTable,
        pool: BlockPool,
        gate: Admission | NoAdmission,
        turns: LiveTurns,
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
        self._gate = gate
        self._turns = turns
        self._clock = clock

    def on_admitted(self, turn: Turn) -> None:
        """Learn from a turn that got its blocks. If its KV had left VRAM, it may have waited."""
        unit, source = self._facts.hit_tokens, turn.source
        # The last token is computed always: its logits are wanted.
        had = min(turn.pages.shared_tokens, turn.request.num_prompt_tokens - 1)
        # With pages from below it waited for these, and they say nothing of CPU memory.
        if source.vram_tokens + unit >= had or turn.tiers.looked_at is not None:
            return
        self.queue.observe(self._clock() - turn.arrived_at)
        if turn.gap.saved:
            self.survival.observe(source.cpu_tokens, had - source.vram_tokens)

    def measure_demand(self) -> None:
        """Measure how much VRAM is wanted."""
        waiting = sum(
            self._facts.mean_blocks(turn.request.num_tokens)
            for turn in self._turns.by_id.values()
            if not (turn.source.admitted or turn.hold.new)  # room is made for new jobs elsewhere
        )
        in_use = self._facts.usable_blocks - self._pool.num_free() - self._pins.held_blocks
        self.price.observe(in_use + math.ceil(waiting), self._clock())

    def costs(self, context_tokens: int, job: JobKey | None = None) -> Costs:
        """Costs of each tier for the context of a turn that is ending.

        Args:
            job: the turn's job, if it has one.
        """
        facts, planner = self._facts, self._planner
        blocks = facts.blocks(context_tokens)
        pages = [len(group.needs(context_tokens)) for group in facts.groups]
        offloaded = planner.index.num_slots > 0
        copy_s = sum(planner.copy_seconds(count, group) for group, count in enumerate(pages))
        tiers_s = dict.fromkeys((store.tier for store in planner.stores), copy_s)
        for store in planner.stores:  # those of a tier share its disk
            tiers_s[store.tier] += planner.promote_seconds(store, pages[store.group])
        # Unknown, it is no reason to do without a copy.
        recompute_s = self._fit.seconds(0, context_tokens) or copy_s
        lost_by = held_up(
            copy_s,
            recompute_s,
            wait_s=self.queue.mean_s * self.memoryfulness.value,
            survival=self.survival.share,
            running=self._turns.running,
        )
        return Costs(
            recompute_s=recompute_s,
            cpu_s=copy_s if offloaded else None,
            tiers_s=tiers_s,
            queue_s=self.queue.mean_s,
            memoryfulness=self.memoryfulness.value,
            vram_price=self._price(blocks, job, lost_by),
            held_up=lost_by,
            cpu_stay_s=planner.index.stay_s(),
            survival=self.survival.share,
        )

    def _price(self, blocks: int, job: JobKey | None, lost_by: float) -> float:
        """λ for a turn's blocks, of which a pin saves B for ``lost_by`` requests."""
        pool = self._facts.usable_blocks
        mine = min(blocks, self._pins.budget)
        demand = self._gate.demand_with_pin(mine, job)
        if demand is None:
            return self.price.price(pool, self._pins.held_blocks + mine, own=blocks)
        return self.price.of(demand, pool, lost_by)
