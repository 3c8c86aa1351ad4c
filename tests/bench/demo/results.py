"""Turn results for the tests of this folder."""

from __future__ import annotations

from tiered_kv.bench.demo.agents import TurnResult


def turn_result(
    job: str,
    turn: int,
    *,
    ttft_s: float = 0.5,
    prompt: int = 100,
    cached: int = 0,
    ended_s: float = 1.0,
    text: str = "answer",
) -> TurnResult:
    """A turn as a client would have seen it."""
    return TurnResult(
        job=job,
        turn=turn,
        ttft_s=ttft_s,
        latency_s=ttft_s + 0.5,
        ended_s=ended_s,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=10,
        text=text,
    )
