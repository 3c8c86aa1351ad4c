"""What is told of turns: in the counters, in the trace, and to the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.metrics import Counters
from tiered_kv.policies.base import Decision
from tiered_kv.trace import TraceWriter

from .open_gaps import Wait


class Accounts:
    """Writes the trace, one JSON line per event. Owns its writer.

    The events: ``turn`` (a turn ended: where its prompt came from), ``decision`` (where its KV
    waits, out of what; once more if the tool call changed it), ``gap`` (the next turn came, or
    is not waited for any longer: what the decision was worth).

    Args:
        trace: None writes none.
        wall: seconds since the epoch.
    """

    def __init__(
        self, counters: Counters, trace: TraceWriter | None, wall: Callable[[], float]
    ) -> None:
        self._counters = counters
        self._trace = trace
        self._wall = wall

    @property
    def dropped(self) -> int:
        """Trace lines dropped so far."""
        return self._trace.dropped if self._trace else 0

    def turn(self, turn: Turn, decision: Decision, pinned: int) -> dict[str, Any] | None:
        """A turn ended; returns what the client is told."""
        request = turn.request
        prompt = request.num_prompt_tokens
        vram = min(turn.vram_tokens, prompt)
        cpu = min(turn.cpu_tokens, prompt - vram)
        came_from = {"vram": vram, "cpu": cpu, "recomputed": prompt - vram - cpu}
        if not turn.admitted:
            came_from = dict.fromkeys(came_from, 0)
        self._counters.add("turns")
        came_from["ssd"] = min(turn.ssd_tokens, came_from["cpu"])
        for source, tokens in came_from.items():
            self._counters.add(f"prompt_tokens_{source}", tokens)
        explained = {"prompt_tokens": prompt} | {f"{k}_tokens": v for k, v in came_from.items()}
        if self._trace is not None:
            self._write(
                "turn",
                {
                    "job_id": turn.job.key.name if turn.job else None,
                    "turn": turn.number,
                    "request_id": request.request_id,
                    **explained,
                    "output_tokens": request.num_output_tokens,
                    "finish": request.outcome,
                    "tier": decision.tier.value,
                    "ttl_s": decision.ttl_s,
                    "pinned_blocks": pinned,
                },
            )
        return {"tiered_kv": explained} if turn.hints.job_id is not None else None

    def decision(self, wait: Wait) -> None:
        """It was decided where a turn's KV waits, or decided anew."""
        if self._trace is None:
            return
        end, costs, made = wait.end, wait.costs, wait.decision
        forecast = made.forecast
        self._write(
            "decision",
            {
                **_name(wait),
                "tool": end.tool.path if end.tool else None,
                "context_tokens": end.context_tokens,
                "new_tokens": end.new_tokens,
                "output_tokens": end.output_tokens,
                "class": made.gap_class.value if made.gap_class else None,
                "q50_s": _finite(forecast.quantile(0.5)) if forecast else None,
                "q90_s": _finite(forecast.quantile(0.9)) if forecast else None,
                "benefit_s": costs.benefit_s,
                "restore_s": costs.restore_s,
                "recompute_s": costs.recompute_s,
                "cpu_s": costs.cpu_s,
                "tiers_s": dict(costs.tiers_s),
                "cpu_stay_s": _finite(costs.cpu_stay_s),
                "survival": costs.survival,
                "queue_s": costs.queue_s,
                "memoryfulness": costs.memoryfulness,
                "vram_price": costs.vram_price,
                "tier": made.tier.value,
                "ttl_s": made.ttl_s,
                "back_s": made.back_s,
            },
        )

    def gap(self, wait: Wait, gap_s: float, *, ended: bool, held: bool) -> None:
        """The next turn came after ``gap_s``, or had not come by then (not ``ended``).

        Args:
            held: whether the pin was still there.
        """
        if self._trace is None:
            return
        pinned_s = min(gap_s, wait.decision.ttl_s) if wait.pinned else 0.0
        in_time = ended and held
        self._write(
            "gap",
            {
                **_name(wait),
                "gap_s": gap_s,
                "ended": ended,
                "tier": wait.decision.tier.value,
                "ttl_s": wait.decision.ttl_s,
                "pinned_blocks": wait.pinned,
                "in_vram": in_time,
                "saved_s": wait.costs.benefit_s if in_time else 0.0,
                "cost_s": wait.costs.vram_price * pinned_s,
            },
        )

    def _write(self, event: str, said: dict[str, object]) -> None:
        assert self._trace is not None
        self._trace.write({"event": event, "t": self._wall(), **said})

    def close(self) -> None:
        """Write what is queued. Idempotent."""
        if self._trace is not None:
            self._trace.close()


def _name(wait: Wait) -> dict[str, object]:
    job = wait.end.job
    return {
        "job_id": job.name if job else None,
        "turn": wait.end.turn,
        "request_id": wait.request_id,
    }


def _finite(seconds: float) -> float | None:
    return seconds if seconds < float("inf") else None
