"""Current costs of each tier on this engine, on which every decision is based, and the prefill
timer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiered_kv.connectors.runtime.admission.active_jobs import ActiveJobs
from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.pins.pin_table import PinTable
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.pages.order_book import OrderBook
from tiered_kv.policies.base import Costs, JobKey
from tiered_kv.policies.pricing.estimators import (
    Memoryfulness,
    PrefillFit,
    QueueDelay,
    ShadowPrice,
    Survival,
)
from tiered_kv.policies.pricing.pin_ttl import held_up


class CostModel:
    """Measures the cost of keeping KV in each tier, as ``Costs``.

    Args:
        fit: estimates prefill times, seconds.
        jobs: the jobs whose forecast demand sets the price of VRAM; None if admission does not
            count jobs. The price then follows the measured demand.
    """

    def __init__(
        self,
        engine: EngineState,
        book: OrderBook,
        fit: PrefillFit,
        pins: PinTable,
        jobs: ActiveJobs | None,
    ) -> None:
        self.queue = QueueDelay()
        self.memoryfulness = Memoryfulness()
        self.survival = Survival(1.0 if book.index.num_slots else 0.0)
        self.price = ShadowPrice()
        self._engine = engine
        self._book = book
        self._fit = fit
        self._pins = pins
        self._jobs = jobs

    def on_admitted(self, turn: Turn) -> None:
        """Record how long an admitted turn was queued, and how much of its KV outside VRAM still
        existed. Ignores turns whose KV had stayed in VRAM, and turns that searched lower tiers."""
        unit, in_vram = self._engine.facts.hit_tokens, turn.vram_tokens
        # The last token is always computed, because its logits are needed.
        had = min(turn.pages.shared_tokens, turn.request.num_prompt_tokens - 1)
        # A turn that searched lower tiers also waited for their pages, and is no evidence about CPU
        # memory.
        if in_vram + unit >= had or turn.tiers.looked_at is not None:
            return
        self.queue.observe(self._engine.clock() - turn.arrived_at)
        if turn.gap.saved:
            self.survival.observe(turn.found_tokens - in_vram, had - in_vram)

    def measure_demand(self) -> None:
        """Measure the current demand for VRAM, on which the price of VRAM depends."""
        waiting = sum(
            self._engine.facts.mean_blocks(turn.request.num_tokens)
            for turn in self._engine.turns.by_id.values()
            if not (turn.source.admitted or turn.hold.new)  # admission makes space for new jobs
        )
        in_use = (
            self._engine.facts.usable_blocks - self._engine.pool.num_free() - self._pins.held_blocks
        )
        self.price.observe(in_use + math.ceil(waiting), self._engine.clock())

    def costs(self, context_tokens: int, job: JobKey | None = None) -> Costs:
        """Return the costs of each tier for the context of a turn that is ending.

        Args:
            job: the turn's job; None if it has none.
        """
        facts, book = self._engine.facts, self._book
        blocks = facts.blocks(context_tokens)
        pages = [len(group.needs(context_tokens)) for group in facts.groups]
        offloaded = book.index.num_slots > 0
        copy_s = sum(book.copy_seconds(count, group) for group, count in enumerate(pages))
        tiers_s = dict.fromkeys((store.tier for store in book.stores), copy_s)
        for store in book.stores:  # stores of one tier share its disk
            tiers_s[store.tier] += book.promote_seconds(store, pages[store.group])
        # An unknown prefill time must not rule out a copy.
        recompute_s = self._fit.seconds(0, context_tokens) or copy_s
        lost_by = held_up(
            copy_s,
            recompute_s,
            wait_s=self.queue.mean_s * self.memoryfulness.value,
            survival=self.survival.share,
            running=self._engine.turns.running,
        )
        pool, mine = facts.usable_blocks, min(blocks, self._pins.budget)
        if self._jobs is not None:
            demand = self._jobs.peak_with_pin(mine, job, enough=pool)
            price = self.price.of(demand, pool, lost_by)
        else:
            price = self.price.price(pool, self._pins.held_blocks + mine, own=blocks)
        return Costs(
            recompute_s=recompute_s,
            cpu_s=copy_s if offloaded else None,
            tiers_s=tiers_s,
            queue_s=self.queue.mean_s,
            memoryfulness=self.memoryfulness.value,
            vram_price=price,
            held_up=lost_by,
            cpu_stay_s=book.index.stay_s(),
            survival=self.survival.share,
        )


FEWEST_TOKENS = 128
"""Minimum length of a measured prefill, tokens. The time of shorter prefills depends mostly on the
step time."""


@dataclass(slots=True)
class _Prefill:
    turn: Turn
    began: float
    behind: int
    tokens: int
    measured: bool
    not_yet: int  # polls until its first step begins


class PrefillTimer:
    """Measures the time of prefills, from the allocation of blocks and the end of restores to the
    first token of the answer.

    The time includes the other requests of the batch, as it would in a recomputation. A preempted
    request is not measured, because it is unknown how much of it is recomputed.

    Args:
        ahead: True if a step is scheduled while the previous step runs, and starts when the next
            step is scheduled.

    Attributes:
        fit: fit of the measurements.
        running: unfinished prefills, including those that are not measured.
    """

    def __init__(self, *, ahead: bool) -> None:
        self.fit = PrefillFit()
        self.running: list[_Prefill] = []
        self._not_yet = 2 if ahead else 0

    def on_started(self, turn: Turn, now: float, *, whole: bool) -> None:
        """Start timing a prefill of the tokens that were not found in VRAM or CPU memory. Prefills
        of fewer than ``FEWEST_TOKENS`` tokens are not measured.

        Args:
            whole: False if part of these tokens was computed before, or other tokens are computed
                too.
        """
        first = turn.start.scheduled_at is None
        if first:
            turn.start.scheduled_at = now
        behind = turn.source.vram_tokens + turn.source.cpu_tokens
        tokens = turn.request.num_prompt_tokens - behind
        measured = whole and tokens >= FEWEST_TOKENS
        if measured or first:
            self.running.append(_Prefill(turn, now, behind, tokens, measured, self._not_yet))

    def poll(self, now: float) -> None:
        """Record the first token's time and, if measured, the duration of each prefill that has
        finished. Call once per step, when the step is scheduled."""
        still = []
        for prefill in self.running:
            request, start = prefill.turn.request, prefill.turn.start
            if prefill.not_yet:
                prefill.not_yet -= 1
                prefill.began = now
            if request.num_preemptions:
                prefill.measured = False
            if request.num_output_tokens > 0:
                if start.first_token_at is None:
                    start.first_token_at = now
                if prefill.measured:
                    self.fit.observe(prefill.behind, prefill.tokens, now - prefill.began)
            elif not request.finished:
                still.append(prefill)
        self.running = still
