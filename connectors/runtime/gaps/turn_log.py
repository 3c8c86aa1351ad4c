"""Reports of finished turns: to the counters, the trace and the client."""

from __future__ import annotations

from typing import Any

from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.metrics import Counters
from tiered_kv.trace.turn_record import TurnTokens

from .open_gaps import OpenGap, OpenGaps
from .turn_trace import NoTrace, TurnTrace


class TurnLog:
    """Reports turns that ended. Owns the trace.

    Attributes:
        trace: the trace, for what happens to turns later.
    """

    def __init__(self, counters: Counters, trace: TurnTrace | NoTrace, gaps: OpenGaps) -> None:
        self.trace = trace
        self._counters = counters
        self._gaps = gaps

    def turn(self, turn: Turn, gap: OpenGap) -> dict[str, Any] | None:
        """Report a turn that ended; returns the answer to its client, if that named a job."""
        tokens = _tokens(turn, gap)
        came_up = tokens.cpu + tokens.ssd  # what came from SSD came through CPU memory
        came_from = {
            "vram": tokens.vram,
            "cpu": came_up,
            "recomputed": tokens.recomputed,
            "ssd": tokens.ssd,
        }
        self._counters.add("turns")
        for name, count in came_from.items():
            self._counters.add(f"prompt_tokens_{name}", count)
        self.trace.ended(turn, gap, tokens, waits=self._gaps.holds(gap))
        if turn.hints.job_id is None:
            return None
        explained = {f"{name}_tokens": count for name, count in came_from.items()}
        return {"tiered_kv": {"prompt_tokens": tokens.prompt, **explained}}


def _tokens(turn: Turn, gap: OpenGap) -> TurnTokens:
    source, prompt, output = turn.source, turn.request.num_prompt_tokens, gap.end.output_tokens
    if not source.admitted:
        return TurnTokens(prompt=prompt, new=gap.end.new_tokens, output=output)
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
        new=gap.end.new_tokens,
        output=output,
    )
