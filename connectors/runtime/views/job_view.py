"""Jobs as operators see them: the state of each job, where its KV is kept, and why."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from tiered_kv.connectors.runtime.between_turns.open_gaps import OpenGap
from tiered_kv.connectors.runtime.job_table import Job
from tiered_kv.connectors.runtime.scheduler import SchedulerHalf
from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.policies.base import Decision, Tier
from tiered_kv.status import JobDecision, JobKv, JobState, JobStatus, Quantiles, Where

from .engine_status import Moments, finite, gap_class_name

MOST_TURNS = 100
"""Maximum number of live turns reported per job."""
QUANTILES = {"q10_s": 0.1, "q50_s": 0.5, "q90_s": 0.9, "q99_s": 0.99}
"""Quantiles of a forecast that are reported for a single job."""


class JobView:
    """The jobs of an engine at one moment. Read-only."""

    def __init__(self, half: SchedulerHalf) -> None:
        self._half = half
        self._moments = Moments(half.deps)

    def page(self, after: int, most: int) -> list[JobStatus]:
        """List jobs in the order in which they were first seen.

        Args:
            after: number of the job after which the list starts; 0 for the first job.
            most: maximum number of jobs.
        """
        return [self._row(job) for job in self._half.gaps.manager.jobs.after(after, most)]

    def named(self, name: str, most: int) -> list[dict[str, Any]]:
        """Return full details of up to ``most`` jobs of that name. Clients with different cache
        salts may use the same name."""
        return [self._full(job) for job in self._half.gaps.manager.jobs.named(name, most)]

    def _row(self, job: Job) -> JobStatus:
        turns, gap = self._turns(job), self._half.gaps.manager.open.get(job.key)
        decision = gap.decision if gap is not None else job.decided
        return JobStatus(
            id=job.key.name,
            engine=self._half.facts.replica,
            number=job.number,
            salted=bool(job.key.salt),
            turn=job.turns,
            state=self._state(turns, gap),
            began=self._moments.since_epoch(job.started_at),
            since=self._since(turns, gap),
            context_tokens=_context_tokens(turns, gap),
            kv=self._kv(job, turns, gap),
            forecast=_quantiles(gap),
            decision=_decision(decision) if decision is not None else None,
            session=job.who.session if job.who.session != job.key.name else None,
            agent=job.who.agent,
            parent=job.who.parent,
        )

    def _full(self, job: Job) -> dict[str, Any]:
        live = sorted(self._turns(job), key=lambda turn: turn.number)
        gap = self._half.gaps.manager.open.get(job.key)
        forecast = gap.decision.forecast if gap is not None else None
        return {
            **self._row(job).to_json(),
            "forecast": {name: finite(forecast.quantile(q)) for name, q in QUANTILES.items()}
            if forecast is not None
            else None,
            "live_turns": len(live),
            "turns": [self._turn(turn) for turn in islice(live, MOST_TURNS)],
            "gap": self._gap(gap) if gap is not None else None,
            "parents": list(self._half.snapshots.parents(job.key)),
        }

    def _turns(self, job: Job) -> Sequence[Turn]:
        found = map(self._half.turns.by_id.get, job.running)
        return [turn for turn in found if turn is not None]

    def _state(self, turns: Sequence[Turn], gap: OpenGap | None) -> JobState:
        if not turns:
            return JobState.SILENT if gap is None else JobState.WAITING
        states = {self._turn_state(turn) for turn in turns}
        return next(one for one in JobState if one in states)

    def _turn_state(self, turn: Turn) -> JobState:
        if turn.source.admitted:
            return JobState.RUNNING
        held = turn.request_id in self._half.admission.gate.held
        return JobState.HELD if held else JobState.QUEUED

    def _since(self, turns: Sequence[Turn], gap: OpenGap | None) -> float | None:
        """Return the start of the job's gap, or the arrival of the first of its live turns, seconds
        since the epoch; None if the job is silent."""
        begins = [gap.since] if gap is not None else [turn.arrived_at for turn in turns]
        return self._moments.since_epoch(min(begins)) if begins else None

    def _kv(self, job: Job, turns: Sequence[Turn], gap: OpenGap | None) -> JobKv:
        """Return where a job's KV is kept, and until when."""
        pin = self._half.admission.pins.look(job.key)
        runs = any(turn.source.admitted for turn in turns)
        if runs or pin is not None:
            where = Where.VRAM
        elif gap is not None:
            where = _outside(gap.decision, saved=gap.saved)
        else:
            where = _outside(job.decided, saved=any(turn.gap.saved for turn in turns))
        until = pin.deadline if pin is not None and not runs else float("inf")
        back_s = gap.decision.back_s if gap is not None else None
        back_at = None if gap is None or back_s is None else gap.since + back_s
        return JobKv(
            where=where,
            pinned_blocks=pin.blocks if pin is not None else 0,
            until=self._moments.since_epoch(until),
            back_at=self._moments.since_epoch(back_at) if back_at is not None else None,
        )

    def _turn(self, turn: Turn) -> dict[str, Any]:
        request, source = turn.request, turn.source
        return {
            "number": turn.number,
            "request_id": request.request_id,
            "state": self._turn_state(turn).value,
            "arrived": self._moments.since_epoch(turn.arrived_at),
            "is_last_step": turn.hints.is_last_step,
            "loading": turn.loading,
            "prompt_tokens": request.num_prompt_tokens,
            "computed_tokens": request.num_computed_tokens,
            "output_tokens": request.num_output_tokens,
            "vram_tokens": source.vram_tokens,
            "cpu_tokens": source.cpu_tokens,
            "ssd_tokens": source.ssd_tokens,
        }

    def _gap(self, gap: OpenGap) -> dict[str, Any]:
        end, costs = gap.end, gap.costs
        return {
            "since": self._moments.since_epoch(gap.since),
            "turn": end.turn,
            "aborted": end.aborted,
            "tool": list(end.tool.path) if end.tool is not None else None,
            "tool_unread": gap.unread,
            "expected_tool_s": end.tool.expected_s if end.tool is not None else None,
            "new_tokens": end.new_tokens,
            "output_tokens": end.output_tokens,
            "saved": gap.saved,
            "benefit_s": finite(costs.benefit_s),
            "restore_s": finite(costs.restore_s),
            "recompute_s": finite(costs.recompute_s),
            "cpu_s": finite(costs.cpu_s) if costs.cpu_s is not None else None,
            "tiers_s": {tier: finite(seconds) for tier, seconds in costs.tiers_s.items()},
            "cpu_stay_s": finite(costs.cpu_stay_s),
            "survival": finite(costs.survival),
            "queue_s": finite(costs.queue_s),
            "memoryfulness": finite(costs.memoryfulness),
            "vram_price": finite(costs.vram_price),
            "held_up": finite(costs.held_up),
        }


def _context_tokens(turns: Sequence[Turn], gap: OpenGap | None) -> int:
    if gap is not None:
        return gap.end.context_tokens
    return max((turn.request.num_tokens for turn in turns), default=0)


def _outside(decision: Decision | None, *, saved: bool) -> Where:
    """Return the location of KV that is not in VRAM."""
    if decision is None or not saved:
        return Where.NOWHERE
    return Where.STORE if decision.tier is Tier.STORE else Where.CPU


def _decision(decision: Decision) -> JobDecision:
    return JobDecision(
        tier=decision.tier.value,
        ttl_s=finite(decision.ttl_s),
        gap_class=gap_class_name(decision.gap_class),
    )


def _quantiles(gap: OpenGap | None) -> Quantiles | None:
    forecast = gap.decision.forecast if gap is not None else None
    if forecast is None:
        return None
    return Quantiles(
        finite(forecast.quantile(QUANTILES["q50_s"])), finite(forecast.quantile(QUANTILES["q90_s"]))
    )
