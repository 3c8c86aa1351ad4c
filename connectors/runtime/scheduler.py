"""The scheduler half: passes the engine's events and queries on to the components (``build``).

All code runs on the scheduler's thread, inside the engine's hooks, without locks or I/O. The order
of calls is: ``on_arrived`` once; ``match`` in every step until the request is admitted;
``on_allocated`` at its admission (twice with an async restore); ``build_orders`` in every step;
``on_reports`` after steps in which workers reported; ``on_finished`` once. If requests wait and
nothing is computed for a long time, a watchdog releases all pins and admits all jobs that are held
back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tiered_kv.connectors.runtime.between_turns.cost_model import PrefillTimer
from tiered_kv.connectors.runtime.between_turns.open_gaps import OpenGaps
from tiered_kv.connectors.runtime.observe.observation import Observation
from tiered_kv.connectors.runtime.snapshots.snapshots import build_snapshots
from tiered_kv.messages import Handshake, Orders, Reports
from tiered_kv.page_group import CONTEXT
from tiered_kv.policies.base import job_scope
from tiered_kv.policies.jobs.hints import TurnHints

from .base import BlockPool, KeptState, Request
from .build import build_admission, build_engine, build_gaps, build_pages
from .dependencies import Dependencies
from .hint_actions import HintActions
from .hook_guard import HookErrors
from .kv_events import make_events
from .scheduler_stats import Stats
from .turn import Turn

STUCK_S = 30.0
"""Time without any computation after which the watchdog fires, seconds. Waits that the connector
requests are shorter or end by themselves: a promotion is awaited only while it is faster than
prefilling, and a new job is admitted when nothing else runs."""

STUCK_STEPS = 8
"""Number of steps without any computation that the watchdog requires in addition."""

AT_REST_S = 1.0
"""A stuck engine keeps running steps. An engine that runs no step for this many seconds was paused
or idle, and the watchdog starts to count again."""


class Watchdog:
    """Detects an engine whose steps compute nothing although requests wait. Used on one thread.

    Attributes:
        barked: True once the watchdog has fired, which happens at most once per engine.
    """

    def __init__(self) -> None:
        self.barked = False
        self._since: float | None = None
        self._last = -math.inf
        self._steps = 0

    def worked(self) -> None:
        """Reset the count, because a step computed something, or nothing was left to compute."""
        self._since = None
        self._steps = 0

    def barks(self, now: float) -> bool:
        """Count a step that computed nothing although requests wait. Returns True, once, if such
        steps have gone on for too long."""
        if self._since is None or now - self._last >= AT_REST_S:
            self._since, self._steps = now, 0
        self._last = now
        self._steps += 1
        if self.barked or now - self._since < STUCK_S or self._steps < STUCK_STEPS:
            return False
        self.barked = True
        return True


logger = logging.getLogger(__name__)

TIME_EVERY = 8
"""Steps between two measurements of the step time."""
POLL_EVERY_S = 0.25
"""Seconds between two polls for due work between turns."""
STATS_EVERY = 32
"""Number of steps between two reports of the counters while requests run."""
_NO_REPORTS = Reports()


class SchedulerHalf:
    """The connector's half in the engine's scheduler. Owns the live turns and the components.

    Args:
        deps: external dependencies; closed by ``close``.
        pool: the engine's blocks.

    Attributes:
        deps: dependencies as passed in.
        pool: the engine's blocks; in observe mode, a simulated pool on top of them.
        turns: live requests.
        pages: components that keep pages.
        admission: components that divide VRAM among requests and pins.
        gaps: components that work between turns.
        snapshots: takes and restores snapshots of jobs, and forks jobs.
        kv_hints: carries out KV hints.
        events: KV events of the tiers outside VRAM; None if no KV events are published.
        observation: records the tokens that would have been restored for turns; None unless in
            observe mode.
        errors: errors of hooks.
        step: number of steps built so far.
        stats: counters and gauges.
        stats_due: True if stats are due. A busy engine receives them in some steps only.

    Raises:
        ConfigError: the trace cannot be written; ``deps`` is not closed.
    """

    def __init__(self, deps: Dependencies, pool: BlockPool) -> None:
        engine = build_engine(deps, pool)
        self.facts, self.pool = engine.facts, engine.pool
        self.counters, self.turns = engine.counters, engine.turns
        self.errors = HookErrors(engine.counters)
        gaps = OpenGaps()
        self.pages = build_pages(deps, engine)
        prefills = PrefillTimer(ahead=self.facts.ahead)
        self.admission = build_admission(deps, engine, self.pages, gaps, prefills.fit)
        self.gaps = build_gaps(deps, engine, self.pages, self.admission, gaps, prefills)
        self.snapshots = build_snapshots(deps, engine, self.pages, self.gaps)
        self.kv_hints = HintActions(
            deps, engine, self.pages, self.admission, self.gaps, self.errors
        )
        self.events = make_events(deps, engine, self.pages)
        self.observation: Observation | None = None
        if deps.config.observes:
            self.observation = Observation(engine, self.pages, self.admission, prefills.fit)
        self.step = 0
        self.stats_due = True
        self.deps = deps
        self._clock = deps.clock
        self._answers = deps.tools.answers
        self.stats = Stats(deps, self.counters, self.pages, self.admission, self.gaps)
        self._look_at = 0.0
        self._was_idle = True
        self._watchdog = Watchdog()
        self._watchdog.barked = deps.config.observes  # then no request waits for the connector

    def before_reset(self) -> None:
        """Prepare for a reset of the engine's prefix cache. Never raises."""
        try:
            self.reset()
        except Exception:
            self.errors.add("a cache reset", "old pins and saves may remain")

    def on_handshake(self, said: Mapping[int, Handshake]) -> None:
        """Record each rank's measured speed and resident pages."""
        flops = sum(one.speeds.flops for one in said.values())
        if self.deps.prefill_work is not None and flops:
            self.gaps.prefills.fit.suppose(*self.deps.prefill_work.estimate(flops))
        self.pages.dispatch.on_handshake(said)

    def take_over_queue(self, *, in_job_order: bool) -> None:
        """Let the engine's scheduler query ``admission.queue`` for requests that are held back and,
        with ``in_job_order``, admit requests in the order of their jobs."""
        self.admission.queue.parks = True
        self.admission.pressure.in_job_order = in_job_order

    # -- a turn arrives -----------------------------------------------------------

    def on_arrived(self, request: Request, hints: TurnHints) -> None:
        """Register a request that has arrived, and carry out its KV hints."""
        if self.observation is not None:
            self.pages.dispatch.on_idle()  # no step was built while the engine was idle
        arrived_at, job = self._clock(), None
        try:
            if not request.streams_input:  # a streamed prompt may change
                job = self._start_turn(request, hints, arrived_at).job
        finally:  # the wait is bounded even if the above fails
            self.admission.fairness.on_arrived(request, job.key if job else None, arrived_at)

    def _start_turn(self, request: Request, hints: TurnHints, arrived_at: float) -> Turn:
        self.counters.add("hints_ignored", hints.ignored)
        self.counters.add("turns_unnamed", hints.job_id is None)
        self.counters.add("ids_carried", hints.who.carried)
        found = self.gaps.manager.on_arrived(request, hints)
        shared = found.gap.shared_blocks * self.facts.hash_tokens * request.reads_cache
        before = self.pages.order.context(found.job.key) if shared and found.job else ()
        turn = Turn(
            request=request,
            hints=hints,
            job=found.job,
            number=found.job.turns if found.job else 1,
            arrived_at=arrived_at,
            pages=self.pages.names.of(request, shared, before),
            gap=found.gap,
        )
        self.turns.add(turn)
        if self.admission.gate.on_arrived(turn) and turn.job is not None:
            self.gaps.manager.jobs.make_youngest(turn.job, arrived_at)
        if hints.kv_hints:
            scope = job_scope(request.cache_salt)
            self.kv_hints.carry_out(scope, hints.kv_hints, request.request_id)
        return turn

    def match(self, request_id: str, num_computed: int) -> tuple[int | None, bool]:
        """Find how much of a waiting request's prompt can be restored.

        Args:
            num_computed: tokens of its prompt that are in VRAM.

        Returns:
            The number of restorable tokens beyond ``num_computed``, and True if their restore is
            async. (None, False) makes the engine ask again in the next step.
        """
        turn = self.turns.by_id.get(request_id)
        if self.observation is not None:
            if turn is not None and not turn.source.admitted:
                self.observation.look(turn, num_computed, self.step)
                turn.source.vram_tokens = num_computed
            return 0, False
        restores, promotions, admission = self.pages.restores, self.pages.promotions, self.admission
        if admission.fairness.must_yield(request_id, self.step):
            return None, False
        if turn is None:
            return 0, False
        patient = admission.fairness.may_wait_for_tiers(request_id)
        later = self.pages.dispatch.retries(turn)
        later = later or (patient and promotions.waits_for_answer(turn))
        later = later or admission.pressure.defers_new(self.step)
        if later or admission.queue.holds_in_queue(turn, self.step):
            return None, False
        admission.pressure.for_waiting(turn, num_computed, self.step)
        restores.withdraw(turn)
        if not turn.source.admitted:
            turn.source.vram_tokens = num_computed
        if not turn.may_restore:
            return 0, False
        fits = partial(admission.pressure.fits, turn, num_computed, self.step)
        fit = self.gaps.prefills.fit
        later = patient and restores.comes_later(turn, num_computed)
        if later or promotions.still_coming(turn, num_computed, fit, fits):
            if patient:
                return None, False
            promotions.stop_all_waits([turn])
        below = promotions.in_pieces(turn)
        restores.find(turn, num_computed, self.turns.running, below)
        if admission.pressure.comes_behind(restores.holding, turn, num_computed, self.step):
            return None, False
        return restores.answer(turn)

    def on_allocated(self, request_id: str, num_external: int) -> None:
        """Order the restore of a request that has been allocated blocks. If this raises and
        ``num_external`` is not 0, call ``refuse_restore``.

        Args:
            num_external: tokens that the engine expects to be restored; 0 for the second call,
                after an async restore.
        """
        self.admission.fairness.on_allocated(request_id)
        turn = self.turns.by_id.get(request_id)
        if turn is None:
            return
        pages = self.pages
        restored = pages.dispatch.restored.pop(request_id, None) is not None
        pages.restores.loaded(turn)  # any load into its blocks is done; ``order`` starts a new one
        pages.saves.resume(turn)
        fresh = not turn.source.admitted
        if fresh:
            self._on_admitted(turn, num_external)
        pages.promotions.claimed(turn)
        if turn.job is not None:
            self.admission.pins.release(turn.job.key)
        if num_external > 0:
            pages.dispatch.restore(turn, num_external)
        if fresh:
            self.admission.boundaries.watch(turn)
        if turn.loading:
            return
        pages.saves.watch(turn, self.step + 1)
        found = turn.source.vram_tokens + turn.source.cpu_tokens
        whole = fresh or (restored and turn.request.num_computed_tokens == found)
        self.gaps.prefills.on_started(turn, self._clock(), whole=whole)

    def _on_admitted(self, turn: Turn, num_external: int) -> None:
        """Record that a turn was admitted. If the turn is its job's first, the job has started."""
        self.turns.running += 1
        turn.source.admitted, turn.source.admitted_at = True, self._clock()
        turn.source.cpu_tokens = num_external
        self.gaps.manager.on_admitted(turn)
        if self.events is not None:
            self.events.on_admitted(turn)
        below = self.pages.promotions.tokens_from_below(turn)
        turn.source.ssd_tokens = min(num_external, below.own + below.shared)
        turn.source.remote_tokens = min(turn.source.ssd_tokens, below.shared)
        self.admission.queue.on_left(turn.request_id)
        first = turn.hold.new
        self.admission.gate.on_started(turn)
        if self.observation is not None:
            self.observation.on_admitted(turn)
        for request_id in turn.job.running if first and turn.job is not None else ():
            beside = self.turns.by_id.get(request_id)
            if beside is not None and beside.hold.new:
                self.admission.gate.on_joined(beside)
                self.admission.queue.ranks_changed = True

    def tokens_from_ssd(self, request_id: str) -> int:
        """Return the number of tokens of a request's restore that came from lower tiers."""
        turn = self.turns.by_id.get(request_id)
        return turn.source.ssd_tokens if turn is not None else 0

    def refuse_restore(self, request_id: str) -> None:
        """Fail a restore that the engine expects, because ``on_allocated`` failed."""
        turn = self.turns.by_id.get(request_id)
        self.pool.forget(self.pages.restores.refuse(request_id, turn))  # vLLM has hashed the blocks
        if turn is not None:
            turn.forget_pages()
            self.pages.restores.withdraw(turn)

    def release_for_running(self) -> bool:
        """Release blocks of a pin or of prompt boundaries, because a running request lacks blocks,
        unless blocks are about to become free. Returns False if a request must be preempted
        instead, as always in observe mode, where pins hold no blocks."""
        return self.observation is None and self.admission.pressure.for_running(self.step)

    # -- every step ---------------------------------------------------------------

    def build_orders(
        self, scheduled: Mapping[str, int], states: Sequence[KeptState] = ()
    ) -> Orders:
        """Build the orders of a step that was scheduled.

        Args:
            scheduled: tokens that the step computes for each request.
            states: recurrent states that exist once the step has run; their blocks may be reused
                after the step.
        """
        self.step += 1
        pages, admission, gaps = self.pages, self.admission, self.gaps
        pages.dispatch.begin_step(self.step)
        pages.promotions.begin_step()
        if pages.book.behind:
            self.on_reports(_NO_REPORTS)
        self.stats_due = not (self.turns.running and self.step % STATS_EVERY)
        if scheduled or not self.turns.by_id:
            self._watchdog.worked()
        elif self._watchdog.barks(self._clock()):
            self._give_everything_up()
        if not scheduled:
            self._was_idle = True
        if not self.step % TIME_EVERY:
            now = self._clock()
            self.deps.step_timer.look(now, 0 if self._was_idle else TIME_EVERY)
            self._was_idle = False
            if now >= self._look_at:
                self._look_at = now + POLL_EVERY_S
                gaps.costs.measure_demand()
                gaps.manager.poll()
                if self.kv_hints.retained:
                    self.kv_hints.poll()
        if self._answers:
            gaps.manager.apply_tool_calls()
        if admission.pins:
            admission.pins.expire(self._clock())
        if restored := pages.dispatch.restored:
            # The step that was just scheduled counts, because pages in flight during this step are
            # in place by the next step.
            admission.pressure.for_restored([*restored.values()], self.step - 1, idle=not scheduled)
        if gaps.prefills.running:
            gaps.prefills.poll(self._clock())
        for one in states:
            if (turn := self.turns.by_id.get(one.request_id)) is not None:
                admission.boundaries.on_state(one.request_id, one.group, one.block, one.tokens)
                pages.saves.save_state(turn, one.group, one.block, one.tokens)
        admission.boundaries.step(scheduled)
        pages.saves.step(self.step, scheduled)
        self.snapshots.advance()
        if self.kv_hints.works:
            self.kv_hints.advance()
        return pages.dispatch.take()

    def _give_everything_up(self) -> None:
        """Release every pin, admit every held-back job and end every wait for pages, because the
        engine makes no progress, and the connector must not be the cause."""
        logger.error(
            "requests are waiting, but the engine has computed nothing for %g s: all pins are "
            "released, and all held-back jobs are admitted",
            STUCK_S,
        )
        logger.error("state at that time: %s", self.stats.of_stuck(self.turns, self.pool))
        self.counters.add("watchdog_barks")
        self.release_all()
        self.admission.queue.let_all_in()
        self.pages.pieces.end_all()
        self.pages.promotions.stop_all_waits(self.turns.by_id.values())

    def take_orders(self) -> Orders:
        """Return the orders that are not sent yet. Also used if ``build_orders`` fails."""
        return self.pages.dispatch.take()

    def on_reports(self, reports: Reports) -> None:
        """Handle the workers' reports."""
        self.pages.dispatch.on_reports(reports)
        self.snapshots.on_reports()

    # -- a turn ends ----------------------------------------------------------------

    def on_finished(self, request_id: str) -> dict[str, Any] | None:
        """Finish a request. Returns the connector's report for the client; None if there is
        none."""
        self.admission.fairness.on_ended(request_id)
        turn = self.turns.pop(request_id)
        if turn is None:
            return None
        try:
            self._release(turn)
            return self._end_turn(turn)
        except Exception:
            if turn.job is not None:
                self.gaps.manager.jobs.turn_lost(turn.job, turn.request_id)
                self.admission.gate.on_over(turn.job.key)
            raise
        finally:
            self.admission.boundaries.release(request_id)

    def _release(self, turn: Turn) -> None:
        """Release the turn's queue position, pages and restore. An error in one component does not
        prevent the other releases."""
        try:
            self.pages.dispatch.restored.pop(turn.request_id, None)
            self.admission.queue.on_left(turn.request_id)
        finally:
            try:
                self.pages.promotions.claimed(turn)
            finally:
                self.pages.pieces.end(turn)

    def _end_turn(self, turn: Turn) -> dict[str, Any] | None:
        self.pages.saves.on_ended(turn)
        if turn.hints.is_last_step:
            self._release_first(turn)
        self.admission.gate.on_ended(turn)
        answer = self.gaps.manager.on_ended(turn)
        self.snapshots.on_ended(turn)
        self.admission.pressure.on_ended(turn, self.step)
        return answer

    def on_scheduler_failed(self) -> None:
        """Count a failure of the job order in the engine's scheduler, which continues without
        it."""
        self.errors.add("ordering requests", "held-back requests are admitted")

    def _release_first(self, turn: Turn) -> None:
        """Remove the hashes of a finished job's blocks, so that these blocks are reused before the
        blocks of unfinished jobs. Blocks that other jobs may share keep their hash."""
        if turn.job is None or turn.job.running != {turn.request_id}:
            return
        blocks = self.pool.tables[CONTEXT].get(turn.request_id, ())[turn.job.first_blocks :]
        self.pool.forget([block.block_id for block in blocks if block.ref_cnt == 1])

    # -- resets and shutdown ----------------------------------------------------------

    def release_all(self) -> None:
        """Release every reference to VRAM blocks. Saves in flight are dropped, so lookups do not
        find their pages later."""
        self.admission.pins.release_all()
        self.admission.boundaries.release_all()
        self.snapshots.release_vram()
        self.pages.tiers.drop_saves(self.pages.saves.drop_all())

    def before_weights_change(self) -> None:
        """Prepare for a call that may change the weights; a reset follows. Never raises."""
        self.counters.add("weight_updates")
        self.deps.fingerprints.forget_weights()

    def reset(self) -> None:
        """Release every reference to VRAM blocks, and start a new generation of pages.

        The KV of running requests was computed before the reset, so it is not saved.
        """
        pages, fingerprints = self.pages, self.deps.fingerprints
        self.counters.add("resets")
        self.snapshots.on_reset()
        self.release_all()
        fingerprints.next_generation()
        pages.pieces.end_all()
        for store, tier in pages.tiers.items():
            tier.reset(fingerprints.base(store.group).digest())
        pages.book.forget_all()
        pages.settlements.on_reset()
        pages.tails.clear()
        self.kv_hints.reset()
        self.gaps.manager.reset()
        for turn in self.turns.by_id.values():
            turn.forget_pages()
            pages.restores.withdraw(turn)
            if turn.request.num_computed_tokens == 0:
                pages.saves.start_over(turn)
                turn.rename_pages(pages.names.fingerprints(turn.request))

    def has_pending_push_work(self) -> bool:
        """Order promotions in advance, continue unfinished hints, and return True while an
        otherwise idle engine must keep stepping, because copies have not been reported or
        operations need steps. Always False in observe mode."""
        self.gaps.manager.on_idle()
        hints = self.kv_hints
        if hints.works:
            hints.advance()
        needs_steps = self.pages.dispatch.on_idle() or (bool(hints.works) and hints.needs_steps)
        if self.events is not None and self.events.pending:
            return True
        just_started = not self.step  # gauges are only exported with steps
        return self.observation is None and (
            just_started or self.snapshots.under_way or needs_steps
        )

    def stop_events(self) -> None:
        """Report no further KV events, because the engine cannot publish them."""
        if self.events is not None:
            self.events.stop()
            self.events = None
        self.errors.add("take_events", "no further KV events are published")

    @property
    def awaits_demotions(self) -> bool:
        """True if an idle engine steps only so that demotions are reported."""
        return (
            self.events is not None
            and not self.events.pending
            and not self.snapshots.under_way
            and not self.kv_hints.works
            and self.pages.dispatch.demotes_only
        )

    @property
    def orders_under_way(self) -> bool:
        """True if a step would send orders, or could receive reports of earlier orders."""
        return self.pages.dispatch.under_way

    def close(self) -> None:
        """Save learned state and stop the threads. Idempotent."""
        try:
            self.snapshots.close()
            self.gaps.manager.close_all()
        finally:
            self.deps.close()
            self.kv_hints.close()
            self.gaps.log.close()
            for tier in self.pages.tiers.values():
                tier.close()
