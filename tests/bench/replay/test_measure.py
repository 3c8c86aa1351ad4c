"""Traces that runs of a real server leave behind."""

from __future__ import annotations

from pathlib import Path

from tiered_kv.bench.replay.measure import keep_trace


def test_a_run_s_trace_is_kept_with_its_older_files_and_replaces_that_of_an_earlier_try(
    tmp_path: Path,
) -> None:
    scratch, kept = tmp_path / "scratch", tmp_path / "out" / "traces" / "idle-0-tiered"
    scratch.mkdir()
    trace = scratch / "trace.jsonl"
    trace.write_text("newest\n")
    (scratch / "trace.jsonl.1").write_text("older\n")
    kept.mkdir(parents=True)
    (kept / "trace.jsonl.2").write_text("of the run before\n")

    keep_trace(trace, kept)

    assert {file.name: file.read_text() for file in kept.iterdir()} == {
        "trace.jsonl": "newest\n",
        "trace.jsonl.1": "older\n",
    }
