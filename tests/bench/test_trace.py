"""``trace analyze`` reads a large trace completely."""

from __future__ import annotations

from pathlib import Path

from tiered_kv.bench.trace import TURNS_OF_A_JOB, analyze_many
from tiered_kv.trace.trace_reader import TraceReader
from tiered_kv.trace.turn_record import StoryEnd


def test_every_turn_is_written_and_analysed(tmp_path: Path) -> None:
    found = analyze_many(2_500, tmp_path, seed=1)
    assert found["analyze_turns"] == 2_500
    assert found["analyze_mib"] > 10
    assert found["analyze_cpu_s"] > 0
    assert found["analyze_bytes"] / 2_500 > 400, "as long as a server's"
    reader = TraceReader(tmp_path / "large.jsonl")
    records = list(reader)
    assert not reader.bad
    assert sum(one.gap.end is StoryEnd.OVER for one in records) == 2_500 // TURNS_OF_A_JOB
    tokens = [one.tokens for one in records]
    assert all(t.vram + t.cpu + t.ssd + t.recomputed == t.prompt for t in tokens)
