"""The trace of turns, decisions and gaps: one JSON line per event."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tiered_kv.connectors.runtime.turn import Turn
from tiered_kv.policies.base import Decision
from tiered_kv.trace import TraceWriter

from .open_gaps import OpenGap


class TurnTrace:
    """Writes the trace. Owns its writer.

    The events: ``turn`` (a turn ended: where its prompt came from), ``decision`` (where its KV
    waits, out of what; once more if the tool call changed it), ``gap`` (the next turn came, or
    is not waited for any longer: what the decision was worth).

    Args:
        wall: seconds since the epoch.
    """

    def __init__(self, writer: TraceWriter, wall: Callable[[], float]) -> None:
        self._writer = writer
        self._wall = wall

    @property
    def dropped(self) -> int:
        """Lines dropped so far."""
        return self._writer.dropped

    def turn(
        self, turn: Turn, explained: Mapping[str, object], decision: Decision, pinned: int
    ) -> None:
        """Write that a turn ended.

        Args:
            explained: tokens of its prompt by their source.
            pinned: blocks pinned for it.
        """
        request = turn.request
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

    def decision(self, gap: OpenGap) -> None:
        """Write where a turn's KV waits."""
        end, costs, made = gap.end, gap.costs, gap.decision
        forecast = made.forecast
        self._write(
            "decision",
            {
                **_name(gap),
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

    def gap(self, gap: OpenGap, gap_s: float, *, ended: bool, held: bool) -> None:
        """Write that the next turn came after ``gap_s``, or had not by then (not ``ended``).

        Args:
            held: True if the pin was still there.
        """
        pinned_s = min(gap_s, gap.decision.ttl_s) if gap.pinned else 0.0
        in_time = ended and held
        self._write(
            "gap",
            {
                **_name(gap),
                "gap_s": gap_s,
                "ended": ended,
                "tier": gap.decision.tier.value,
                "ttl_s": gap.decision.ttl_s,
                "pinned_blocks": gap.pinned,
                "in_vram": in_time,
                "saved_s": gap.costs.benefit_s if in_time else 0.0,
                "cost_s": gap.costs.vram_price * pinned_s,
            },
        )

    def _write(self, event: str, said: dict[str, object]) -> None:
        self._writer.write({"event": event, "t": self._wall(), **said})

    def close(self) -> None:
        """Write what is queued. Idempotent."""
        self._writer.close()


class NoTrace:
    """Writes nothing. See ``TurnTrace``."""

    dropped = 0

    def turn(
        self, turn: Turn, explained: Mapping[str, object], decision: Decision, pinned: int
    ) -> None:
        pass

    def decision(self, gap: OpenGap) -> None:
        pass

    def gap(self, gap: OpenGap, gap_s: float, *, ended: bool, held: bool) -> None:
        pass

    def close(self) -> None:
        pass


def _name(gap: OpenGap) -> dict[str, object]:
    job = gap.end.job
    return {
        "job_id": job.name if job else None,
        "turn": gap.end.turn,
        "request_id": gap.request_id,
    }


def _finite(seconds: float) -> float | None:
    return seconds if seconds < float("inf") else None
