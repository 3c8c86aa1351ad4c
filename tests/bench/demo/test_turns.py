from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.demo.results import turn_result
from tiered_kv.bench.demo.turns import (
    Sources,
    TracedTurn,
    TraceError,
    read_trace,
    rows_by_turn,
    sources_from_trace,
    sources_from_usage,
)


def trace_line(job: str | None = "a", turn: int = 1, vram: int = 64, cpu: int = 30) -> str:
    """A turn event of 100 prompt tokens as the connector writes it."""
    event = {
        "event": "turn",
        "t": 1.5,
        "job_id": job,
        "turn": turn,
        "request_id": "chatcmpl-1",
        "prompt_tokens": 100,
        "vram_tokens": vram,
        "cpu_tokens": cpu,
        "recomputed_tokens": 100 - vram - cpu,
        "output_tokens": 24,
        "tier": "pin",
        "of_a_later_version": {"nested": [1]},
    }
    return json.dumps(event) + "\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_turns_are_read_and_other_events_passed_over(trace: Path) -> None:
    other = '{"event": "pin_expired", "blocks": 3}\n'
    trace.write_text(trace_line() + other + trace_line(job=None) + trace_line(turn=2, cpu=0))
    assert read_trace(trace) == [
        TracedTurn("a", 1, Sources(64, 30, 6)),
        TracedTurn("a", 2, Sources(64, 0, 36)),
    ]


def test_a_last_line_that_was_cut_off_is_passed_over(trace: Path) -> None:
    trace.write_text(trace_line() + trace_line(turn=2)[:40])
    assert [turn.turn for turn in read_trace(trace)] == [1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("not json\n" + trace_line(), "line 1"),
        (trace_line().replace('"turn": 1', '"turn": null'), "line 1"),
        ('{"event": "turn", "job_id": "a"}\n', "line 1"),
    ],
)
def test_a_damaged_trace_is_refused(trace: Path, text: str, reason: str) -> None:
    trace.write_text(text)
    with pytest.raises(TraceError, match=reason):
        read_trace(trace)


def test_a_missing_trace_is_refused(trace: Path) -> None:
    with pytest.raises(TraceError, match="wrote no trace"):
        read_trace(trace)


def test_a_trace_must_account_for_every_turn_of_the_client() -> None:
    traced = [TracedTurn("a", 1, Sources(64, 30, 6)), TracedTurn("other", 1, Sources(1, 1, 1))]
    wanted = sources_from_trace(traced, [turn_result("a", 1)])
    assert wanted == {("a", 1): Sources(64, 30, 6)}
    with pytest.raises(TraceError, match="lacks turn 2 of a"):
        sources_from_trace(traced, [turn_result("a", 2)])
    with pytest.raises(TraceError, match=r"cpu=30.* in the trace, but 120 prompt"):
        sources_from_trace(traced, [turn_result("a", 1, prompt=120)])


def test_usage_counts_cached_tokens_as_vram() -> None:
    results = [turn_result("a", 1, prompt=100, cached=32)]
    assert sources_from_usage(results) == {("a", 1): Sources(32, 0, 68)}


def test_rows_sum_tokens_and_average_times_by_turn() -> None:
    results = [
        turn_result("b", 2, ttft_s=3.0, cached=50),
        turn_result("a", 1, ttft_s=1.0),
        turn_result("b", 1, ttft_s=2.0),
        turn_result("a", 2, ttft_s=1.0, prompt=200, cached=150),
    ]
    first, second, total = rows_by_turn(results, sources_from_usage(results))
    assert (first.turn, first.requests, first.sources) == (1, 2, Sources(0, 0, 200))
    assert (second.turn, second.sources, second.sources.prompt) == (2, Sources(200, 0, 100), 300)
    assert second.ttft_mean_s == 2.0
    assert second.ttft_p95_s == pytest.approx(1.0 + 0.95 * 2.0), "between two, as in the replays"
    assert (total.turn, total.requests, total.sources) == (None, 4, Sources(200, 0, 300))
