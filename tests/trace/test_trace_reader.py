"""A trace is read completely, whatever the state of its files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.trace.records import HEADER, record
from tiered_kv.trace.rotation import files_of, make_room, steps_of
from tiered_kv.trace.steps.step_record import StepRecord
from tiered_kv.trace.steps.step_tracks import StepReader, has_steps
from tiered_kv.trace.trace_file import TraceFile
from tiered_kv.trace.trace_reader import MOST_NAMED, TraceReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def requests(reader: TraceReader) -> list[str]:
    return [one.request for one in reader]


def fill(path: Path, count: int) -> list[str]:
    """Write records to a trace with several files. Returns their request IDs."""
    file = TraceFile(path, HEADER.to_line(), 2048)
    for n in range(count):
        file.append([record(n).to_line()])
    file.close()
    return [f"r{n}" for n in range(count)]


def test_files_are_read_from_the_oldest_to_the_newest(path: Path) -> None:
    written = fill(path, 100)
    reader = TraceReader(path)
    assert requests(reader) == written
    assert reader.headers == [HEADER] * sum(one.exists() for one in files_of(path))
    assert not reader.bad


def test_a_trace_that_is_moved_while_it_is_read_is_read_once(path: Path) -> None:
    written = fill(path, 100)
    found = iter(TraceReader(path))
    first = next(found).request
    make_room(path)
    path.write_text(record(999).to_line() + "\n")
    assert [first, *(one.request for one in found)] == written


def test_a_truncated_last_line_is_not_an_invalid_line(path: Path) -> None:
    path.write_text(f"{record(0).to_line()}\n{record(1).to_line()[:40]}")
    reader = TraceReader(path)
    assert requests(reader) == ["r0"]
    assert not reader.bad_lines


def test_a_complete_last_line_without_a_line_feed_is_read(path: Path) -> None:
    path.write_text(f"{record(0).to_line()}\n{record(1).to_line()}")
    assert requests(TraceReader(path)) == ["r0", "r1"]


def test_invalid_lines_are_counted_and_the_first_are_reported(path: Path) -> None:
    odd = [
        b"\xff\xfe",
        b"{",
        b"[" * 100_000,
        b'{"event": "turn", "t": 1.5}',
        b"7",
        b"",
        b'"schema"',
    ]
    good = record(0).to_line().encode()
    path.write_bytes(b"\n".join([*odd, good, *([b"?"] * 100), good, b""]))
    reader = TraceReader(path)
    assert requests(reader) == ["r0", "r0"]
    assert reader.bad_lines == 106
    assert len(reader.bad) == MOST_NAMED
    said = [str(one) for one in reader.bad[:5]]
    assert said[0] == f"{path}, line 1: the line is not JSON"
    assert said[3] == f"{path}, line 4: missing fields: turn, request, arrived"
    assert said[4] == f"{path}, line 5: 7 is not an object"


def test_a_missing_trace_is_an_error(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no trace"):
        list(TraceReader(path))


def pack(path: Path, keep: bool = False) -> None:
    """Compress a file as ``gzip`` does."""
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    if not keep:
        path.unlink()


def test_a_compressed_trace_is_read_by_either_name(path: Path) -> None:
    written = fill(path, 100)
    for one in filter(Path.exists, files_of(path)):
        pack(one)
    for name in (path, path.with_name("trace.jsonl.gz")):
        reader = TraceReader(name)
        assert requests(reader) == written
        assert not reader.bad_lines


def test_older_files_may_be_compressed_and_are_read_once(path: Path) -> None:
    written = fill(path, 100)
    older = [one for one in files_of(path) if one.exists()][1:]
    for n, one in enumerate(older):
        pack(one, keep=n % 2 == 0)
    assert requests(TraceReader(path)) == written


def test_a_trace_whose_name_ends_in_gz_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    written = fill(path, 100)
    assert requests(TraceReader(path)) == written


def test_compressed_steps_are_read(path: Path) -> None:
    path.write_text(f"{record(0).to_line()}\n")
    steps_of(path).write_text(StepRecord(step=1, at=1.0).to_line() + "\n")
    pack(path)
    packed = path.with_name("trace.jsonl.gz")
    assert has_steps(packed)
    pack(steps_of(path))
    assert has_steps(packed)
    assert [one.step for one in StepReader(packed)] == [1]


def test_a_truncated_gzip_file_is_reported_and_read_as_far_as_it_goes(path: Path) -> None:
    fill(path, 3)
    pack(path)
    packed = path.with_name("trace.jsonl.gz")
    packed.write_bytes(packed.read_bytes()[:-9])
    reader = TraceReader(packed)
    assert requests(reader) == ["r0", "r1", "r2"]
    assert [one.reason for one in reader.bad] == ["the gzip data is damaged or truncated"]


def test_a_line_ends_with_a_line_feed_alone(path: Path) -> None:
    found = {**json.loads(record(0).to_line()), "request": "a\u2028b\u0085c"}
    path.write_text(json.dumps(found, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert requests(TraceReader(path)) == ["a\u2028b\u0085c"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("turn", -1),
        ("replica", -1),
        ("arrived", -1.0),
        ("tokens", {"prompt": -184}),
        ("times", {"end_s": -0.5}),
        ("times", {"admitted_s": -1}),
        ("preempted", {"count": 1, "at_s": [-1.0]}),
        ("would_have", {"ssd": -1}),
        ("pin", {"held_s": -1.0}),
        ("pages", {"evicted": {"ssd": -1}}),
        ("gap", {"gap_s": -2.0}),
    ],
)
def test_negative_counts_and_times_make_a_line_invalid(
    path: Path, field: str, value: object
) -> None:
    found = {**json.loads(record(0).to_line()), field: value}
    path.write_text(f"{json.dumps(found)}\n{record(1).to_line()}\n")
    reader = TraceReader(path)
    assert requests(reader) == ["r1"]
    (bad,) = reader.bad
    assert bad.reason.startswith(f"{field}: ")
    assert bad.reason.endswith(" is below 0")


def test_negative_values_in_a_decision_are_accepted(path: Path) -> None:
    found = {**json.loads(record(0).to_line()), "decision": {"benefit_s": -3.5, "q50_s": -1}}
    path.write_text(json.dumps(found) + "\n")
    (one,) = TraceReader(path)
    assert (one.decision.benefit_s, one.decision.q50_s) == (-3.5, -1.0)


def test_a_header_without_a_size_is_refused(path: Path) -> None:
    found = {**json.loads(HEADER.to_line()), "block_size": -16}
    path.write_text(f"{json.dumps(found)}\n{record(0).to_line()}\n")
    reader = TraceReader(path)
    assert requests(reader) == ["r0"]
    assert not reader.headers
    assert reader.bad[0].reason == "block_size: -16 is below 0"
