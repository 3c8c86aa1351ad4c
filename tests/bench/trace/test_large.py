"""A large trace is one that `trace analyze` reads, whole."""

from __future__ import annotations

from pathlib import Path

from tiered_kv.bench.trace.large import TURNS_OF_A_JOB, analyze_many
from tiered_kv.trace.trace_reader import TraceReader
from tiered_kv.trace.turn_record import StoryEnd


def test_every_turn_is_there_and_is_analysed(tmp_path: Path) -> None:
    found = analyze_many(2_500, tmp_path, seed=1)
    assert found.turns == 2_500
    assert found.mib > 10
    assert found.cpu_s > 0
    reader = TraceReader(tmp_path / "large.jsonl")
    records = list(reader)
    assert not reader.bad
    assert len(records) == 2_500
    assert found.nbytes / 2_500 > 400, "as long as a server's"
    over = sum(one.gap.end is StoryEnd.OVER for one in records)
    assert over == 2_500 // TURNS_OF_A_JOB
    tokens = [one.tokens for one in records]
    assert all(t.vram + t.cpu + t.ssd + t.recomputed == t.prompt for t in tokens)
