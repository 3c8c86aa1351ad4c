"""Trace of steps: preemptions and, if enabled, the engine's load at each step and the number of
prompt tokens in the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from tiered_kv.connectors.runtime.base import Request, ScheduledStep
from tiered_kv.connectors.runtime.engine_state import EngineState
from tiered_kv.connectors.runtime.hook_guard import HookErrors
from tiered_kv.connectors.runtime.parts import AdmissionGroup, Pages
from tiered_kv.connectors.runtime.turn import LiveTurns, Turn
from tiered_kv.orders import OrderKind
from tiered_kv.trace.steps.step_record import StepRecord
from tiered_kv.trace.trace_writer import TraceWriter
from tiered_kv.trace.turn_record import FIRST_PREEMPTIONS, Preemptions


class PrefillsUnderWay:
    """Requests that prefill, or that recompute everything after a preemption.

    The time that tracking takes per step grows with the number of these requests, not with the
    number of requests that decode.

    Args:
        turns: live requests.
    """

    def __init__(self, turns: LiveTurns) -> None:
        self._turns = turns
        self._until: dict[str, tuple[Request, int]] = {}

    def tokens(self, step: ScheduledStep) -> int:
        """Return the number of prompt tokens in a step. Must be called before the engine adds the
        step's tokens to the computed tokens of its requests."""
        until = self._until
        for request_id in step.preempted:
            until.pop(request_id, None)
        for request_id in step.begun:
            turn = self._turns.by_id.get(request_id)
            if turn is not None:
                until[request_id] = turn.request, turn.request.num_tokens
        count = 0
        for request_id, (request, length) in list(until.items()):
            tokens = step.tokens.get(request_id, 0)
            left = length - request.num_computed_tokens
            count += max(0, min(tokens, left))
            if tokens >= left or request.finished:
                del until[request_id]
        return count


MOST_PREEMPTED = 65_536
"""Maximum number of requests that are tracked. If there are more, the request preempted first is
forgotten. Requests are otherwise forgotten when they finish."""


@dataclass(slots=True)
class _Preempted:
    """Preemptions of a request.

    Attributes:
        count: number of preemptions.
        at, back: times of the first preemptions, and of the steps in which it resumed; seconds.
        found: number of tokens that were computed already, each time it resumed.
        away: True until it resumes.
    """

    count: int = 0
    at: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    away: bool = False


class PreemptionLog:
    """Preemptions by request. Used on one thread. Written by ``step_trace``."""

    def __init__(self) -> None:
        self._of: dict[str, _Preempted] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._of

    def preempted(self, request_id: str, now: float) -> None:
        """Record that a request lost its blocks."""
        one = self._of.get(request_id)
        if one is None:
            if len(self._of) >= MOST_PREEMPTED:
                del self._of[next(iter(self._of))]
            one = self._of[request_id] = _Preempted()
        one.count += 1
        one.away = True
        if one.count <= FIRST_PREEMPTIONS:
            one.at.append(now)

    def goes_on(self, request_id: str, found: int, now: float) -> None:
        """Record that a request resumes.

        Args:
            found: number of tokens that the request need not recompute.
        """
        one = self._of.get(request_id)
        if one is None or not one.away:
            return
        one.away = False
        if one.count <= FIRST_PREEMPTIONS:
            one.back.append(now)
            one.found.append(found)

    def take(self, turn: Turn) -> Preemptions:
        """Remove and return the preemptions of a finished request, with times relative to its
        arrival."""
        one = self._of.pop(turn.request_id, None)
        if one is None:
            return Preemptions()
        return Preemptions(
            one.count,
            tuple(at - turn.arrived_at for at in one.at),
            tuple(back - turn.arrived_at for back in one.back),
            tuple(one.found),
        )


AT_ONCE, LATEST_S = 64, 1.0
"""Number of step records passed to the writer together, and the longest time that a record is kept,
seconds. Waking the writer for each record would cost the scheduler more than the record."""


class StepTrace:
    """Records every step for the trace. Owns the writer of step records.

    The time taken grows with the requests that start or prefill in a step, not with pages, blocks,
    jobs or other requests.

    Args:
        writer: writer of step records; None to record only preemptions.
        preemptions: records the preemptions of the live requests.
        wall: seconds since the epoch.
    """

    def __init__(
        self,
        engine: EngineState,
        pages: Pages,
        admission: AdmissionGroup,
        writer: TraceWriter | None,
        preemptions: PreemptionLog,
        wall: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._pages = pages
        self._admission = admission
        self._writer = writer
        self._preemptions = preemptions
        self._wall = wall
        self._errors = HookErrors(engine.counters)
        self._prefills = PrefillsUnderWay(engine.turns)
        self._kept: list[StepRecord] = []
        self._handed_over_at = -math.inf
        self._steps = 0

    @property
    def dropped(self) -> int:
        """Number of step records dropped so far."""
        return self._writer.dropped if self._writer is not None else 0

    def step(self, scheduled: Callable[[], ScheduledStep]) -> None:
        """Record a scheduled step. Never raises."""
        try:
            step = scheduled()
            self._note_preemptions(step)
            if self._writer is not None:
                self._keep(self._record(step), idle=not step.tokens)
        except Exception:
            self._errors.add("tracing a step", "the trace lacks it")

    def _note_preemptions(self, step: ScheduledStep) -> None:
        log, turns, now = self._preemptions, self._engine.turns.by_id, self._engine.clock
        for request_id in step.preempted:
            log.preempted(request_id, now())
        for request_id in step.begun:
            if request_id in log and (turn := turns.get(request_id)) is not None:
                log.goes_on(request_id, turn.request.num_computed_tokens, now())

    def _keep(self, record: StepRecord, *, idle: bool) -> None:
        self._kept.append(record)
        if idle or len(self._kept) == AT_ONCE or record.at - self._handed_over_at >= LATEST_S:
            self._handed_over_at = record.at
            self._hand_over()

    def _hand_over(self) -> None:
        kept, self._kept = self._kept, []
        if self._writer is not None:
            for record in kept:
                self._writer.write(record)

    def _record(self, step: ScheduledStep) -> StepRecord:
        engine, book, turns = self._engine, self._pages.book, self._engine.turns
        self._steps += 1
        prefill, held = self._prefills.tokens(step), len(self._admission.gate.held)
        return StepRecord(
            step=self._steps,
            at=self._wall(),
            replica=engine.facts.replica,
            running=turns.running,
            waiting=max(0, len(turns) - turns.running - held),
            held=held,
            scheduled=len(step.tokens),
            prefill=prefill,
            decode=step.total - prefill,
            free=engine.pool.num_free(),
            cached=engine.pool.num_cached(),
            pinned=self._admission.pins.held_blocks,
            nbytes=self._bytes(),
            orders={k.trace_name: n for k in OrderKind if (n := book.number(k))},
        )

    def _bytes(self) -> dict[str, int]:
        index, facts = self._pages.index, self._engine.facts
        slot_bytes = facts.slot_bytes * facts.ranks
        used = (index.num_slots - index.free_slots) * slot_bytes
        below = {str(tier): one.stored_bytes for tier, one in self._pages.tiers.totals().items()}
        return {"cpu": used, **below}

    def close(self) -> None:
        """Write queued records, and stop the writer. Idempotent."""
        self._hand_over()
        if self._writer is not None:
            self._writer.close()
