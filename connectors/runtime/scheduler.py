"""The scheduler half: what each of vLLM's hooks asks of the parts that decide (``wiring``).

All of it runs on the scheduler's thread, between vLLM's hooks, without locks or I/O.
Hooks come in this order: ``arrived`` once; ``match`` in every step until admitted;
``allocated`` at admission (twice with an async restore); ``build`` in every step;
``completed`` after steps in which workers reported; ``finished`` once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tiered_kv.connectors.runtime.worker.speed_probe import PrefillWork
from tiered_kv.keys import PageKey
from tiered_kv.messages import Handshake, Orders, Reports
from tiered_kv.metrics import Counters
from tiered_kv.orders import RestoreMode
from tiered_kv.page_group import CONTEXT
from tiered_kv.policies.jobs.hints import TurnHints

from .base import BlockPool, Fingerprints, Request
from .build import Outside, wire
from .turn import Turn
from .watchdog import STUCK_S, Watchdog

logger = logging.getLogger(__name__)

TIME_EVERY = 8
"""Steps between two looks at how long steps take."""
LOOK_EVERY_S = 0.25
"""Between two looks at what is due between turns."""
STATS_EVERY = 16
"""Steps between two accounts of the counters while requests run."""


class SchedulerHalf:
    """vLLM's scheduler-side hooks. Owns the turns that live, and the parts.

    Args:
        given: the engine, the operator's settings, policies and clocks.
        fingerprints: keys' first part; owned from now on.
        work: of the model's prefills; None if that is not known.
    """

    def __init__(
        self, given: Outside, fingerprints: Fingerprints, work: PrefillWork | None
    ) -> None:
        self.facts = given.facts
        self.counters = Counters()
        self._given = given
        self._clock = given.clock
        self._fingerprints = fingerprints
        self._work = work
        self._tools = given.tools
        self._tools_read: Collection[Any] = given.tools.answers if given.tools is not None else ()
        self._look_at = 0.0
        self._turns: dict[str, Turn] = {}
        self._step = 0
        self._was_idle = True
        self._running = 0
        self.stats_due = True
        """A busy engine asks for stats in every step and is told in some of them."""
        self._gauges_told = False
        self._watchdog = Watchdog()
        self._ordering_failed = False

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's block pool."""
        given = replace(self._given, clock=lambda: self._clock())  # a test may put in its own
        parts = wire(given, pool, self.counters, self._turns, lambda: self._running)
        self._pool = pool
        self.index, self.planner, self.tails = parts.index, parts.planner, parts.tails
        self.restores, self.saves, self.tiers = parts.restores, parts.saves, parts.tiers
        self.pins, self.room, self.admission = parts.pins, parts.room, parts.admission
        self.queue, self.prices, self.prefills = parts.queue, parts.prices, parts.prefills
        self.gaps, self.exchange, self.accounts = parts.gaps, parts.exchange, parts.accounts

    def before_reset(self) -> None:
        """The engine is about to reset its prefix cache. Never raises."""
        try:
            self.reset()
        except Exception:
            self.counters.add("hook_errors")
            logger.exception("dropping pins and saves before a cache reset failed")

    def introduced(self, said: Mapping[int, Handshake]) -> None:
        """``set_xfer_handshake_metadata``: how fast the ranks are, what they have on SSD."""
        if copies := [one.speeds.copy for one in said.values() if one.speeds.copy]:
            self.planner.bandwidth = min(copies)
        flops = sum(one.speeds.flops for one in said.values())
        if self._work is not None and flops:
            self.prefills.fit.suppose(*self._work.estimate(flops))
        self.tiers.on_handshake(said)

    # -- a turn arrives -----------------------------------------------------------

    def arrived(self, request: Request, hints: TurnHints) -> None:
        """``on_new_request``."""
        if request.streams_input:  # what was said may change
            return
        self.counters.add("hints_ignored", hints.ignored)
        found, size = self.gaps.arrived(request, hints), self.facts.block_size
        if found.job is not None and found.job.turns == 1:
            found.job.first_blocks = -(-request.num_prompt_tokens // size)
        turn = self._turns[request.request_id] = Turn(
            request=request,
            hints=hints,
            job=found.job,
            number=found.job.turns if found.job else 1,
            fingerprint=self._fingerprint(request),
            arrived_at=self._clock(),
            context_before=found.context,
            shared=found.shared * size if request.reads_cache else 0,
            kept=found.kept,
            saved=found.saved,
        )
        if self.admission is not None and self.admission.arrived(turn) and turn.job is not None:
            turn.job.born = turn.arrived_at  # its room went to others, and so did its place
        if self._may_restore(turn):
            self.tiers.promote(turn, self.prefills.fit)

    def _fingerprint(self, request: Request) -> bytes | None:
        if self.index.num_slots == 0:
            return None
        return self._fingerprints.of(request.adapter, CONTEXT)

    def _may_restore(self, turn: Turn) -> bool:
        return turn.fingerprint is not None and turn.request.reads_cache

    def match(self, request_id: str, num_computed: int) -> tuple[int | None, bool]:
        """``get_num_new_matched_tokens``: what can be restored beyond ``num_computed``."""
        turn = self._turns.get(request_id)
        if turn is None:
            return 0, False
        if self.room.defer_new:
            return None, False
        if self.queue.holds_in_queue(turn):
            return None, False
        self.room.for_waiting(turn, num_computed, self._step)
        turn.hit = None
        if not turn.admitted:
            turn.vram_tokens = num_computed
        if not self._may_restore(turn):
            return 0, False
        if self.restores.comes_later(turn, num_computed):
            return None, False
        if self.tiers.still_coming(turn, self.prefills.fit):
            return None, False
        turn.hit = self.restores.find(turn, num_computed, self._running)
        if turn.hit is None:
            return 0, False
        return turn.hit.tokens, turn.hit.mode is RestoreMode.ASYNC

    def allocated(self, request_id: str, block_ids: Sequence[int], num_external: int) -> None:
        """``update_state_after_alloc``: the request has its blocks; order its restore."""
        turn = self._turns.get(request_id)
        if turn is None:
            return
        restored = self.exchange.restored.pop(request_id, None) is not None
        turn.loading = False  # whoever loaded into its blocks is done; ``order`` may begin anew
        fresh = not turn.admitted
        if fresh:
            turn.admitted = True
            turn.cpu_tokens = num_external
            self._running += 1
            self.prices.admitted(turn)
            turn.ssd_tokens = min(num_external, self._came_up(turn))
            self.queue.left(turn.request_id)
            self._began(turn)
        self.tiers.claimed(turn)
        if turn.job is not None and self.pins.release(turn.job.key):
            self.counters.add("pins_handed_over")
        if num_external > 0:
            self.restores.order(turn, block_ids, num_external)
        if turn.loading:
            return
        self.saves.watch(turn, self._step + 1)
        came = restored and turn.request.num_computed_tokens == turn.vram_tokens + turn.cpu_tokens
        if fresh or came:
            self.prefills.started(turn, self._clock())

    def _began(self, turn: Turn) -> None:
        """A turn has its first blocks; if those are its job's first, the job has begun."""
        if self.admission is None:
            return
        first = turn.new
        self.admission.began(turn)
        for request_id in turn.job.running if first and turn.job is not None else ():
            beside = self._turns.get(request_id)
            if beside is not None and beside.new:
                self.admission.joined(beside)
                self.queue.ranks_changed = True

    def tokens_from_ssd(self, request_id: str) -> int:
        """``get_external_cache_hit_sources``: those of its restore that came up from SSD."""
        turn = self._turns.get(request_id)
        return turn.ssd_tokens if turn is not None else 0

    def _came_up(self, turn: Turn) -> int:
        """Tokens of the restore about to be ordered whose pages were on SSD only."""
        keys = turn.hit.keys if turn.hit else ()
        return self.facts.block_size * sum(key in turn.ssd_keys for key in keys)

    def refuse_restore(self, request_id: str, block_ids: Sequence[int]) -> None:
        """``allocated`` failed although the engine counts on a restore."""
        turn = self._turns.get(request_id)
        bad = self.restores.refuse(request_id, turn.hit if turn else None, block_ids)
        self._pool.forget(bad)  # vLLM has hashed them
        if turn is not None:
            turn.forget_pages()

    def has_pending_block_frees(self) -> bool:
        """A running request lacks blocks: release a pin rather than preempt."""
        return self.room.for_running(self._step)

    # -- every step ---------------------------------------------------------------

    def build(self, scheduled: Mapping[str, int]) -> Orders:
        """``build_connector_meta``: this step's orders.

        Args:
            scheduled: tokens that each request computes in this step.
        """
        self._step += 1
        self.room.defer_new = False
        self.stats_due = not (self._running and self._step % STATS_EVERY)
        if scheduled or not self._turns:
            self._watchdog.worked()
        elif self._watchdog.barks(self._clock()):
            self._give_everything_up()
        if not scheduled:
            self._was_idle = True
        if not self._step % TIME_EVERY:
            now = self._clock()
            self.restores.time_steps(now, 0 if self._was_idle else TIME_EVERY)
            self._was_idle = False
            if now >= self._look_at:
                self._look_at = now + LOOK_EVERY_S
                self._look_at_demand()
                self.gaps.look_around()
        if self._tools_read:
            self.gaps.hear_tools()
        if self.pins and (late := self.pins.expire(self._clock())):
            self.counters.add("pins_expired", late)
        if restored := self.exchange.restored:
            # Of the step that was just scheduled: what is on its way is there in the next.
            self.room.for_restored(list(restored.values()), self._step - 1)
        if self.prefills.running:
            self.prefills.look(self._clock())
        self.saves.step(self._step, scheduled)
        return self.take_orders()

    def _give_everything_up(self) -> None:
        """Requests wait and nothing happens: it must not be for anything that we hold."""
        state = {
            "requests": len(self._turns),
            "new": sum(turn.new for turn in self._turns.values()),
            "loading": sum(turn.loading for turn in self._turns.values()),
            "awaiting pages": sum(bool(turn.awaits) for turn in self._turns.values()),
            "pinned blocks": self.pins.held_blocks,
            "free blocks": self._pool.num_free(),
            "orders in flight": self.planner.in_flight,
            "jobs begun": len(self.admission.jobs) if self.admission is not None else None,
        }
        logger.error("nothing is computed for %g s: no pin and no job is held any more", STUCK_S)
        logger.error("the state was: %s", state)
        self.counters.add("watchdog_barks")
        self.let_go()
        self.queue.let_all_in()
        for turn in self._turns.values():
            turn.awaits.clear()

    def _look_at_demand(self) -> None:
        waiting = (
            turn.request.num_tokens
            for turn in self._turns.values()
            if not (turn.admitted or turn.new)  # room is made for new jobs by holding them
        )
        self.prices.look(sum(waiting))

    def take_orders(self) -> Orders:
        """The orders not yet sent. Also what is sent when ``build`` itself fails."""
        return self.exchange.take()

    def completed(self, reports: Reports) -> None:
        """``update_connector_output``: workers reported."""
        self.exchange.heard(reports, self._step)

    # -- a turn ends ----------------------------------------------------------------

    def finished(self, request_id: str, block_ids: Sequence[int]) -> dict[str, Any] | None:
        """``request_finished_all_groups``; returns what the client is told."""
        turn = self._turns.pop(request_id, None)
        if turn is None:
            return None
        try:
            return self._turn_ended(turn, block_ids)
        except Exception:
            if turn.job is not None:  # what is not known to have ended would run for ever
                turn.job.running.discard(turn.request_id)
                if self.admission is not None:
                    self.admission.over(turn.job.key)
            raise

    def _turn_ended(self, turn: Turn, block_ids: Sequence[int]) -> dict[str, Any] | None:
        request = turn.request
        self.exchange.restored.pop(request.request_id, None)
        self.queue.left(request.request_id)
        self._running -= turn.admitted
        self.tiers.claimed(turn)
        has_kv = turn.admitted and not turn.loading
        pages, save = list[PageKey](), None
        if has_kv and turn.fingerprint is not None:
            last, pages = self.saves.finish(turn, block_ids)
            save = last.order_id if last else None
        if turn.hints.is_last_step:
            self._let_go_first(turn)
        if self.admission is not None:
            over, gone = turn.hints.is_last_step, not request.answered
            self.admission.ended(turn, over=over, gone=gone)
        wait, pinned = self.gaps.ended(turn, pages, save, has_kv=has_kv)
        if self.facts.ahead and request.num_in_flight_tokens > 0:
            own = self._pool.tables.get(turn.request_id, ())
            self.room.freed_late(sum(block.ref_cnt == 1 for block in own), self._step)
        return self.accounts.turn(turn, wait.decision, pinned)

    def scheduler_failed(self) -> None:
        """``ContinuumScheduler`` could not ask us: it goes on as vLLM's own."""
        self.counters.add("hook_errors")
        if not self._ordering_failed:
            self._ordering_failed = True
            logger.exception("ordering requests failed; those held are let in (logged once)")

    def _let_go_first(self, turn: Turn) -> None:
        """The job is over: its blocks are taken before those of jobs that go on, as vLLM reuses
        blocks without a hash first. What it may share with others, now or later, stays."""
        if turn.job is None or turn.job.running != {turn.request_id}:
            return
        blocks = self._pool.tables.get(turn.request_id, ())[turn.job.first_blocks :]
        self._pool.forget([block.block_id for block in blocks if block.ref_cnt == 1])

    # -- resets, life and death -------------------------------------------------------

    def let_go(self) -> None:
        """Give up every reference on VRAM blocks. Saves under way become invisible."""
        self.counters.add("pins_released", self.pins.release_all())
        self.tiers.invalidate(self.saves.drop_all())

    def reset(self) -> None:
        """Let go of every VRAM block, and start a new generation of pages.

        KV of running requests was made by what is being reset, so it is not saved.
        """
        self.counters.add("resets")
        self.let_go()
        self._fingerprints.next_generation()
        self.tiers.reset(lambda group: self._fingerprints.base(group).digest())
        self.planner.forget_all()
        self.tails.clear()
        self.gaps.reset()
        for turn in self._turns.values():
            turn.forget_pages()
            if turn.request.num_computed_tokens == 0:
                turn.cursor = 0
                turn.fingerprint = self._fingerprint(turn.request)

    def has_pending_push_work(self) -> bool:
        """Keep an otherwise idle engine stepping until copies under way are reported.

        An engine that has just started makes one step: vLLM exports gauges with steps only.
        """
        self.gaps.idle()
        return not self._step or self.exchange.under_way

    def take_stats(self) -> dict[str, int]:
        """Counters added since the last call, with the gauges; empty if nothing happened. The
        first time, the gauges at least."""
        totals = {
            "pages_evicted": self.index.evictions,
            "pages_not_saved": self.planner.unsaved,
            "trace_dropped": self.accounts.dropped,
            "jobs_held": self.admission.refused if self.admission is not None else 0,
            "turns_held": self.admission.delayed if self.admission is not None else 0,
        }
        if self._tools is not None:
            totals |= {
                "answers_unread": self._tools.dropped,
                "tool_read_errors": self._tools.errors,
            }
        for name, total in totals.items():
            self.counters.add(name, total - self.counters.totals[name])
        fresh = self.counters.take()
        if fresh or not self._gauges_told:
            self._gauges_told = True
            fresh |= {
                "cpu_pages": len(self.index),
                "cpu_slots": self.index.num_slots,
                **self.tiers.gauges(),
                "pinned_blocks": self.pins.held_blocks,
                "orders_in_flight": self.planner.in_flight,
                "jobs": len(self.gaps.jobs),
                "jobs_begun": len(self.admission.jobs) if self.admission is not None else 0,
                "room_percent": round(
                    100 * (self.admission.allowance.share if self.admission is not None else 1.0)
                ),
            }
        return fresh

    def close(self) -> None:
        """Save what was learned, stop the threads. Idempotent."""
        self.gaps.close()
        self._fingerprints.close()
        self.accounts.close()
        self.tiers.close()
