"""Reports of finished turns: to the counters, the trace and the client."""

from __future__ import annotations

from typing import Any

from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.metrics import Counters

from .open_gaps import OpenGap
from .turn_trace import NoTrace, TurnTrace


class TurnLog:
    """Reports turns that ended. Owns the trace.

    Attributes:
        trace: the trace, for events of gaps.
    """

    def __init__(self, counters: Counters, trace: TurnTrace | NoTrace) -> None:
        self.trace = trace
        self._counters = counters

    def turn(self, turn: Turn, gap: OpenGap) -> dict[str, Any] | None:
        """Report a turn that ended; returns the answer to its client, if that named a job."""
        source, prompt = turn.source, turn.request.num_prompt_tokens
        vram = min(source.vram_tokens, prompt)
        cpu = min(source.cpu_tokens, prompt - vram)
        came_from = {"vram": vram, "cpu": cpu, "recomputed": prompt - vram - cpu}
        if not source.admitted:
            came_from = dict.fromkeys(came_from, 0)
        self._counters.add("turns")
        came_from["ssd"] = min(source.ssd_tokens, came_from["cpu"])
        for name, tokens in came_from.items():
            self._counters.add(f"prompt_tokens_{name}", tokens)
        explained = {"prompt_tokens": prompt} | {f"{k}_tokens": v for k, v in came_from.items()}
        self.trace.turn(turn, explained, gap.decision, gap.pinned)
        return {"tiered_kv": explained} if turn.hints.job_id is not None else None
