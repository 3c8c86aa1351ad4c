"""Reports finished turns to the counters, the trace and the client.

The trace has one record per turn. The record is written once the next turn has arrived, or is no
longer expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from tiered_kv.connectors.runtime.steps.step_trace import PreemptionLog, StepTrace
from tiered_kv.connectors.runtime.turn import LiveTurns, Turn
from tiered_kv.json_fields import cut
from tiered_kv.keys import PageKey
from tiered_kv.metrics import GAP_CLASSES, Counters, decision_event
from tiered_kv.policies.base import JobKey
from tiered_kv.policies.jobs.kv_hints import results_json
from tiered_kv.trace.trace_writer import TraceWriter
from tiered_kv.trace.turn_record import (
    JOB_ROOM,
    MOST_HINTS,
    GapStory,
    PageMoves,
    PinEnd,
    PinStory,
    PricedDecision,
    StoryEnd,
    TurnRecord,
    TurnTimes,
    TurnTokens,
    WouldHave,
)

from .open_gaps import MOST_OPEN, OpenGap, OpenGaps, Retention


@dataclass(slots=True)
class _Story:
    """A finished turn whose record is incomplete.

    Attributes:
        begun: the part of the record that is known at the turn's end.
        gap: the gap and its decision, which may be revised.
        pin: the turn's pin, once it was released.
        ahead: number of pages promoted for the job in the meantime.
        evicted: number of pages of the job evicted in the meantime, by tier.
    """

    begun: TurnRecord
    gap: OpenGap
    pin: PinStory | None = None
    ahead: int = 0
    evicted: dict[str, int] = field(default_factory=dict)


class TurnTrace:
    """Writes the trace of turns. Owns the trace's writer.

    Args:
        writer: writes the records; None without a trace.
        replica: index of this engine among data-parallel engines.
        clock: the scheduler's clock, monotonic seconds.
        wall: seconds since the epoch.
        waits_for: returns the job between turns for which a page is kept; None if unknown.

    Attributes:
        preemptions: number of preemptions of each live request. Written by ``StepTrace``.
    """

    def __init__(
        self,
        writer: TraceWriter | None,
        replica: int,
        clock: Callable[[], float],
        wall: Callable[[], float],
        waits_for: Callable[[PageKey], Hashable | None],
    ) -> None:
        self.preemptions = PreemptionLog()
        self._writer = writer
        self._replica = replica
        self._clock = clock
        self._wall = wall
        self._waits_for = waits_for
        self._open: dict[Hashable, _Story] = {}  # by job
        self._hints: dict[Hashable, list[str]] = {}  # by job whose record is not written yet
        self._closed = False

    @property
    def dropped(self) -> int:
        """Number of records dropped so far."""
        return self._writer.dropped if self._writer is not None else 0

    def ended(self, turn: Turn, gap: OpenGap, tokens: TurnTokens, *, waits: bool) -> None:
        """Start the record of a finished turn.

        Args:
            waits: True if the job is between turns and expected back. Otherwise the record is
                complete, and is written immediately.
        """
        if self._writer is None:
            return
        story = _Story(self._begun(turn, tokens), gap)
        job = gap.end.job
        if waits and job is not None:
            self._open[job] = story
        else:
            end = StoryEnd.OVER if gap.end.is_last_step else StoryEnd.NO_GAP
            self._write(story, GapStory(end))

    def _begun(self, turn: Turn, tokens: TurnTokens) -> TurnRecord:
        now, request, job, who = self._clock(), turn.request, turn.job, turn.hints.who
        name = job.key.name if job is not None else None
        return TurnRecord(
            job=name,
            session=who.session if who.session != name else None,
            agent=who.agent,
            parent=who.parent,
            client=_digest(job.key.salt) if job is not None and job.key.salt else "",
            replica=self._replica,
            turn=turn.number,
            request=cut(request.request_id, JOB_ROOM),
            arrived=self._wall() - (now - turn.arrived_at),
            finish=request.outcome,
            times=_times(turn, now),
            preempted=self.preemptions.take(turn),
            tokens=tokens,
            would_have=WouldHave(
                turn.observed.vram_tokens, turn.observed.cpu_tokens, turn.observed.ssd_tokens
            ),
            pages=PageMoves(
                turn.promoted.pages,
                turn.promoted.nbytes,
                turn.restore.came_up,
                superseded=turn.gap.superseded,
            ),
        )

    def pin_ended(self, job: JobKey, why: PinEnd) -> None:
        """Record that a job's pin was released."""
        story = self._open.get(job)
        if story is not None and story.pin is None:
            story.pin = PinStory(story.gap.pinned, self._clock() - story.gap.since, why)

    def hinted(self, job: JobKey, hint: str) -> None:
        """Record a hint that was carried out for a job's KV: its intent and outcome."""
        if self._writer is None:
            return
        self._hints[job] = [*self._hints.pop(job, ())[1 - MOST_HINTS :], hint]
        if len(self._hints) > MOST_OPEN:
            del self._hints[next(iter(self._hints))]

    def brought_up(self, job: JobKey, pages: int) -> None:
        """Record the number of pages that are being promoted for a job between turns."""
        story = self._open.get(job)
        if story is not None:
            story.ahead += pages

    def evicted(self, tier: str, keys: Sequence[PageKey]) -> None:
        """Count evictions from a tier in the records of the jobs that the pages belong to. O(1) per
        page."""
        for key in keys:
            job = self._waits_for(key)
            story = self._open.get(job.job if isinstance(job, Retention) else job)
            if story is not None:
                story.evicted[tier] = story.evicted.get(tier, 0) + 1

    def over(self, job: Hashable, gap_s: float, end: StoryEnd, *, in_vram: bool = False) -> None:
        """Complete the record of a job's last turn, because the next turn has arrived, or is no
        longer expected.

        Args:
            gap_s: time since that turn's end, seconds.
            in_vram: True if the pin still exists.
        """
        story = self._open.pop(job, None)
        if story is None:
            return
        if in_vram and story.gap.pinned:
            story.pin = PinStory(story.gap.pinned, gap_s, PinEnd.RETURNED)
        costs, pin = story.gap.costs, story.pin or PinStory()
        saved_s = costs.benefit_s if in_vram else 0.0
        self._write(story, GapStory(end, gap_s, in_vram, saved_s, costs.vram_price * pin.held_s))

    def _write(self, story: _Story, gap: GapStory) -> None:
        assert self._writer is not None, "a story without a trace"
        begun, end = story.begun, story.gap.end
        if story.gap.learned is not None:  # the end before the client's revision
            end = story.gap.learned[0]
        moves = replace(
            begun.pages,
            ahead=story.ahead,
            demoted=story.gap.sent_down,
            evicted=story.evicted,
        )
        self._writer.write(
            replace(
                begun,
                tool=end.tool.path if end.tool is not None else (),
                hints=tuple(self._hints.pop(end.job, ())),
                decision=_decision(story.gap),
                pin=story.pin or PinStory(),
                pages=moves,
                gap=gap,
            )
        )

    def cut_off(self, turn: Turn, tokens: TurnTokens) -> None:
        """Write the partial record of a turn that is still running as the engine closes."""
        if self._writer is not None and not self._closed:
            self._writer.write(replace(self._begun(turn, tokens), gap=GapStory(StoryEnd.CLOSED)))

    def close(self) -> None:
        """Write incomplete and queued records, and stop the writer. Idempotent."""
        self._closed, now = True, self._clock()
        for job, story in list(self._open.items()):
            self.over(job, now - story.gap.since, StoryEnd.CLOSED)
        if self._writer is not None:
            self._writer.close()


def held_s(turn: Turn, now: float) -> float:
    """Return the time that a turn was held back as the first of a new job, seconds; 0 if it was not
    held back."""
    if not turn.hold.refused:
        return 0.0
    until = turn.hold.let_in_at
    if until is None:  # another turn of its job was admitted first, or all jobs were
        until = turn.source.admitted_at if turn.source.admitted else now
    return until - turn.arrived_at


def _times(turn: Turn, now: float) -> TurnTimes:
    arrived, source, start = turn.arrived_at, turn.source, turn.start
    first_token = start.first_token_at
    if first_token is None and turn.request.num_output_tokens > 0:
        first_token = now  # no step was made between the first token and the end
    return TurnTimes(
        held_s=held_s(turn, now),
        pages_s=turn.tiers.waited_s,
        admitted_s=source.admitted_at - arrived if source.admitted else None,
        scheduled_s=start.scheduled_at - arrived if start.scheduled_at is not None else None,
        first_token_s=first_token - arrived if first_token is not None else None,
        end_s=now - arrived,
    )


def _decision(gap: OpenGap) -> PricedDecision:
    costs, made = gap.costs, gap.decision
    forecast = made.forecast
    return PricedDecision(
        tier=made.tier.value,
        gap_class=made.gap_class.value if made.gap_class is not None else "",
        ttl_s=made.ttl_s,
        back_s=made.back_s,
        q50_s=_finite(forecast.quantile(0.5)) if forecast is not None else None,
        q90_s=_finite(forecast.quantile(0.9)) if forecast is not None else None,
        benefit_s=costs.benefit_s,
        restore_s=costs.restore_s,
        recompute_s=costs.recompute_s,
        cpu_s=costs.cpu_s,
        tiers_s={str(name): seconds for name, seconds in costs.tiers_s.items()},
        cpu_stay_s=_finite(costs.cpu_stay_s),
        survival=costs.survival,
        queue_s=costs.queue_s,
        memoryfulness=costs.memoryfulness,
        vram_price=costs.vram_price,
    )


def _finite(seconds: float) -> float | None:
    return seconds if seconds < math.inf else None


def _digest(salt: str) -> str:
    return xxhash.xxh3_64_hexdigest(salt.encode("utf-8", "surrogatepass"))[:8]


class TurnLog:
    """Reports finished turns, and the outcomes of decisions. Owns the trace.

    Args:
        turns: the live requests.

    Attributes:
        trace: trace of turns.
        steps: trace of steps; None without a trace.
    """

    def __init__(
        self,
        counters: Counters,
        trace: TurnTrace,
        gaps: OpenGaps,
        turns: LiveTurns,
        clock: Callable[[], float],
        steps: StepTrace | None = None,
    ) -> None:
        self.trace = trace
        self.steps = steps
        self._counters = counters
        self._gaps = gaps
        self._turns = turns
        self._clock = clock

    @property
    def dropped(self) -> int:
        """Number of turn and step records dropped so far."""
        return self.trace.dropped + (self.steps.dropped if self.steps is not None else 0)

    def turn(self, turn: Turn, gap: OpenGap) -> dict[str, Any] | None:
        """Report a finished turn. Returns the report that is added to the client's response; None
        unless the client named a job or sent KV hints."""
        tokens = _tokens(turn)
        came_up = tokens.cpu + tokens.ssd  # pages from lower tiers pass through CPU memory
        remote = min(turn.source.remote_tokens, tokens.ssd)
        came_from = {
            "vram": tokens.vram,
            "cpu": came_up,
            "recomputed": tokens.recomputed,
            "ssd": tokens.ssd - remote,
            "remote": remote,
        }
        self._counters.add("turns")
        for name, count in came_from.items():
            self._counters.add(f"prompt_tokens_{name}", count)
        if turn.hold.refused:
            self._counters.observe("hold_seconds", held_s(turn, self._clock()))
        self.trace.ended(turn, gap, tokens, waits=self._gaps.holds(gap))
        results = (*turn.hints.kv_answered, *turn.hint_results)
        if turn.hints.job_id is None and not results:
            return None
        explained: dict[str, Any] = {f"{name}_tokens": n for name, n in came_from.items()}
        if results:
            explained["hints"] = results_json(results, turn.hints.kv_hints)
        return {"tiered_kv": {"prompt_tokens": tokens.prompt, **explained}}

    def pin_ended(self, job: JobKey, why: PinEnd) -> None:
        """Report that a job's pin was released."""
        self._counters.add(f"pins_ended_{why.value}")
        self.trace.pin_ended(job, why)

    def decided(self, gap: OpenGap) -> None:
        """Report the final decision for a turn's KV. Call once per gap."""
        made = gap.decision
        gap_class = made.gap_class.value if made.gap_class is not None else GAP_CLASSES[-1]
        self._counters.add(decision_event(made.tier.value, gap_class))

    def returned(self, gap: OpenGap, gap_s: float) -> None:
        """Report the length of a gap that ended with a turn, relative to its forecast."""
        forecast = gap.decision.forecast
        if forecast is None or gap.end.aborted:  # after an abort, the next turn is a client's retry
            return
        for name, part in (("gap_over_median", 0.5), ("gap_over_p90", 0.9)):
            if 0 < (predicted := forecast.quantile(part)) < math.inf:
                self._counters.observe(name, gap_s / predicted)

    def close(self) -> None:
        """Write partial records of unfinished turns, and stop the trace. Idempotent."""
        for turn in self._turns.by_id.values():
            self.trace.cut_off(turn, _tokens(turn))
        self.trace.close()
        if self.steps is not None:
            self.steps.close()


def _tokens(turn: Turn) -> TurnTokens:
    source, request = turn.source, turn.request
    prompt, output = request.num_prompt_tokens, request.num_output_tokens
    new = max(0, prompt - turn.gap.context_tokens)
    if not source.admitted:
        return TurnTokens(prompt=prompt, new=new, output=output)
    vram = min(source.vram_tokens, prompt)
    cpu = min(source.cpu_tokens, prompt - vram)
    ssd = min(source.ssd_tokens, cpu)
    return TurnTokens(
        prompt=prompt,
        vram=vram,
        cpu=cpu - ssd,
        ssd=ssd,
        recomputed=prompt - vram - cpu,
        # The last token is always computed, because its logits are needed.
        lost=max(0, min(turn.pages.shared_tokens, prompt - 1) - vram - cpu),
        new=new,
        output=output,
    )
