"""The pause between two requests, where a record has only when they were sent."""

from __future__ import annotations

from tiered_kv.bench.agents.recorded_rows import DECODE_TOKENS_PER_S
from tiered_kv.bench.replay.jobs import LEAST_GAP_S


def gap_s(apart_s: float | None, output_tokens: float) -> float:
    """Seconds from an answer to the next request.

    Args:
        apart_s: from request to request; None if no other follows.
        output_tokens: of the answer, which is taken to have come at 60 tokens/s.
    """
    if apart_s is None:
        return 0.0
    return max(LEAST_GAP_S, apart_s - output_tokens / DECODE_TOKENS_PER_S)
