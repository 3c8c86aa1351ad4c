"""Reports of finished turns: to the counters, the trace and the client."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tiered_kv.connectors.runtime.steps.step_trace import StepTrace
from tiered_kv.connectors.runtime.turn import LiveTurns, Turn
from tiered_kv.metrics import GAP_CLASSES, Counters, decision_event
from tiered_kv.policies.base import JobKey
from tiered_kv.trace.turn_record import PinEnd, TurnTokens

from .open_gaps import OpenGap, OpenGaps
from .turn_trace import NoTrace, TurnTrace, held_s


class TurnLog:
    """Reports turns that ended, and what came of what was decided. Owns the trace.

    Args:
        turns: the live requests.

    Attributes:
        trace: the trace, for what happens to turns later.
        steps: the trace of steps; None without a trace.
    """

    def __init__(
        self,
        counters: Counters,
        trace: TurnTrace | NoTrace,
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
        """Records of turns and steps that were not written so far."""
        return self.trace.dropped + (self.steps.dropped if self.steps is not None else 0)

    def turn(self, turn: Turn, gap: OpenGap) -> dict[str, Any] | None:
        """Report a turn that ended; returns the answer to its client, if that named a job."""
        tokens = _tokens(turn)
        came_up = tokens.cpu + tokens.ssd  # what came from below came through CPU memory
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
        if turn.hints.job_id is None:
            return None
        explained = {f"{name}_tokens": count for name, count in came_from.items()}
        return {"tiered_kv": {"prompt_tokens": tokens.prompt, **explained}}

    def pin_ended(self, job: JobKey, why: PinEnd) -> None:
        """Report that a job's pin has ended."""
        self._counters.add(f"pins_ended_{why.value}")
        self.trace.pin_ended(job, why)

    def decided(self, gap: OpenGap) -> None:
        """Report where a turn's KV waits, decided for good. Once for each gap."""
        made = gap.decision
        gap_class = made.gap_class.value if made.gap_class is not None else GAP_CLASSES[-1]
        self._counters.add(decision_event(made.tier.value, gap_class))

    def returned(self, gap: OpenGap, gap_s: float) -> None:
        """Report how long a gap was that ended with a turn, beside what was forecast."""
        forecast = gap.decision.forecast
        if forecast is None or gap.end.aborted:  # what follows then is a client that tries again
            return
        for name, part in (("gap_over_median", 0.5), ("gap_over_p90", 0.9)):
            if 0 < (predicted := forecast.quantile(part)) < math.inf:
                self._counters.observe(name, gap_s / predicted)

    def close(self) -> None:
        """Write what is known of turns that did not end, and stop the trace. Idempotent."""
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
        # The last token is computed always: its logits are wanted.
        lost=max(0, min(turn.pages.shared_tokens, prompt - 1) - vram - cpu),
        new=new,
        output=output,
    )
