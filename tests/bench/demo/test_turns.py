from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.demo.results import turn_result
from tests.trace.records import record
from tiered_kv.bench.demo.turns import (
    Sources,
    TraceError,
    read_trace,
    rows_by_turn,
    sources_from_trace,
    sources_from_usage,
)
from tiered_kv.trace.turn_record import TurnTokens


def trace_line(job: str | None = "a", turn: int = 1, vram: int = 64, cpu: int = 30) -> str:
    """A turn of 100 prompt tokens as the connector writes it; 10 more came from SSD."""
    tokens = TurnTokens(100, vram, max(0, cpu - 10), min(cpu, 10), 100 - vram - cpu)
    return record(job=job, turn=turn, tokens=tokens).to_line() + "\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_turns_of_jobs_are_read(trace: Path) -> None:
    trace.write_text(trace_line() + trace_line(job=None) + trace_line(turn=2, cpu=0))
    found = sources_from_trace(read_trace(trace), [turn_result("a", 1), turn_result("a", 2)])
    assert found == {("a", 1): Sources(64, 30, 6), ("a", 2): Sources(64, 0, 36)}


def test_a_last_line_that_was_cut_off_is_passed_over(trace: Path) -> None:
    trace.write_text(trace_line() + trace_line(turn=2)[:40])
    assert [turn.turn for turn in read_trace(trace)] == [1]


@pytest.mark.parametrize(
    "text", ["not json\n" + trace_line(), trace_line().replace('"turn":1', '"turn":null'), "{}\n"]
)
def test_a_damaged_trace_is_refused(trace: Path, text: str) -> None:
    trace.write_text(text)
    with pytest.raises(TraceError, match="line 1: "):
        read_trace(trace)


def test_a_missing_trace_is_refused(trace: Path) -> None:
    with pytest.raises(TraceError, match="wrote no trace"):
        read_trace(trace)


def test_a_trace_must_account_for_every_turn_of_the_client() -> None:
    traced = [
        record(job="a", tokens=TurnTokens(100, 64, 30, 0, 6)),
        record(job="other", tokens=TurnTokens(3, 1, 1, 0, 1)),
    ]
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
