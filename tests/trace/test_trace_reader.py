"""A trace is read whole, whatever state its files are in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trace.records import HEADER, record
from tiered_kv.trace.rotation import files_of, make_room
from tiered_kv.trace.trace_file import TraceFile
from tiered_kv.trace.trace_reader import MOST_NAMED, TraceReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def requests(reader: TraceReader) -> list[str]:
    return [one.request for one in reader]


def fill(path: Path, count: int) -> list[str]:
    """Write records into several files; returns their requests."""
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


def test_a_last_line_that_was_cut_off_is_no_bad_line(path: Path) -> None:
    path.write_text(f"{record(0).to_line()}\n{record(1).to_line()[:40]}")
    reader = TraceReader(path)
    assert requests(reader) == ["r0"]
    assert not reader.bad_lines


def test_a_whole_last_line_counts_without_its_end(path: Path) -> None:
    path.write_text(f"{record(0).to_line()}\n{record(1).to_line()}")
    assert requests(TraceReader(path)) == ["r0", "r1"]


def test_bad_lines_are_counted_and_the_first_are_named(path: Path) -> None:
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
    assert said[0] == f"{path}, line 1: it is no JSON"
    assert said[3] == f"{path}, line 4: it lacks turn, request, arrived"
    assert said[4] == f"{path}, line 5: it is no object"


def test_a_trace_that_is_not_there_is_an_error(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no trace"):
        list(TraceReader(path))
