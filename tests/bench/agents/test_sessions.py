"""Recorded sessions are read from plain and packed files, and other files are refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tiered_kv.bench.agents.recorded_rows import RecordingError
from tiered_kv.bench.agents.sessions import read_sessions, recording


def test_sessions_are_read_in_the_order_of_their_turns(tmp_path: Path) -> None:
    rows = [
        {"session_id": name, "timestamp": at, "input": f"{at}", "output": "", "more": None}
        for name, at in (("a", 3), ("b", 1), ("a", 2))
    ]
    lines = "\n".join(map(json.dumps, rows)).encode()
    (tmp_path / "plain.jsonl").write_bytes(lines)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines))
    found = read_sessions(recording(tmp_path, "plain"))
    assert [[turn.at for turn in one] for one in found] == [[1], [2, 3]]
    assert read_sessions(recording(tmp_path, "packed")) == found


def test_the_file_that_is_named_is_read_and_not_one_beside_it(tmp_path: Path) -> None:
    plain, packed = tmp_path / "both.jsonl", tmp_path / "both.jsonl.gz"
    for path, name in ((plain, "a"), (packed, "b")):
        row = {"session_id": name, "timestamp": 0, "input": "", "output": ""}
        data = json.dumps(row).encode()
        path.write_bytes(gzip.compress(data) if path is packed else data)
    assert [one[0].session for one in read_sessions(plain)] == ["a"]
    assert [one[0].session for one in read_sessions(packed)] == ["b"]
    assert recording(tmp_path, "both") == packed


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"session_id": "a"}',
        b"no json",
        gzip.compress(b"{}", mtime=0)[:-9],
        gzip.compress(b"", mtime=0)[:10] + b"\xff",
    ],
    ids=["nothing", "no session", "half a turn", "no json", "cut off", "no gzip behind its head"],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes) -> None:
    odd = tmp_path / "odd.jsonl"
    odd.write_bytes(content)
    with pytest.raises(RecordingError):
        read_sessions(odd)
    with pytest.raises(RecordingError):
        read_sessions(recording(tmp_path, "missing"))
