"""Trace files stay within their size limit, however many processes write them and however those
processes end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trace.records import HEADER, lines_of, requests_of
from tiered_kv.trace.rotation import FILES, files_of
from tiered_kv.trace.trace_file import TraceFile

KIB = 1024


def line(n: int, length: int = 200) -> str:
    text = f'{{"request":"r{n}","padding":""}}'
    return text[:-2] + "x" * (length - len(text)) + text[-2:]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def file(path: Path) -> Iterator[TraceFile]:
    made = TraceFile(path, HEADER.to_line(), 4 * KIB)
    yield made
    made.close()


def test_a_full_file_is_rotated_and_the_oldest_deleted(file: TraceFile, path: Path) -> None:
    written = [f"r{n}" for n in range(400)]
    for n in range(400):
        file.append([line(n)])

    files = files_of(path)
    assert sorted(path.parent.iterdir()) == sorted(files)
    assert len(files) == FILES
    kept = [name for one in reversed(files) for name in requests_of(one)]
    assert kept == written[-len(kept) :], "the newest, without a gap"
    for one in files:
        assert one.stat().st_size <= 4 * KIB
        assert one.stat().st_mode & 0o777 == 0o600
        assert "schema" in lines_of(one)[0], "each file begins with a header"


def test_a_write_larger_than_the_file_limit_has_a_file_of_its_own(
    file: TraceFile, path: Path
) -> None:
    file.append([line(0)])
    file.append([line(n) for n in range(1, 40)])
    file.append([line(40)])
    newest, full, first = files_of(path)[:3]
    assert requests_of(first) == ["r0"]
    assert len(requests_of(full)) == 39
    assert requests_of(newest) == ["r40"]


def test_an_incomplete_line_of_a_killed_process_is_ended(path: Path) -> None:
    path.write_text('{"request":"r0"}\n{"requ')
    file = TraceFile(path, HEADER.to_line())
    file.append([line(1)])
    file.close()
    assert path.read_text().splitlines()[1] == '{"requ'
    assert len(path.read_text().splitlines()) == 4, "a header and a record on lines of their own"


def test_a_gap_between_the_files_is_closed(file: TraceFile, path: Path) -> None:
    for n in range(40):
        file.append([line(n)])
    files_of(path)[1].unlink()
    for n in range(40, 100):
        file.append([line(n)])
    assert requests_of(path)[-1] == "r99"


def test_a_deleted_or_moved_file_is_recreated(file: TraceFile, path: Path) -> None:
    file.append([line(0)])
    path.rename(path.with_name("kept"))
    file.append([line(1)])
    path.unlink()
    file.append([line(2)])
    assert requests_of(path) == ["r2"]
    assert requests_of(path.with_name("kept")) == ["r0"]


def test_a_recreated_folder_is_written_to_again(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "trace.jsonl"
    file = TraceFile(path, HEADER.to_line())
    folder.rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        file.append([line(0)])
    folder.mkdir()
    file.append([line(1)])
    file.close()
    assert requests_of(path) == ["r1"]


def test_replicas_share_a_trace_and_lose_nothing(path: Path) -> None:
    """Three threads write to one trace concurrently, and every record is written once. Each thread
    opens the file separately, as processes do, because a lock belongs to an open file."""
    begin = threading.Barrier(3)

    def write(first: int) -> None:
        file = TraceFile(path, HEADER.to_line(), 8 * KIB)
        begin.wait()
        for n in range(first, first + 60):
            file.append([line(n)])
        file.close()

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = [one for one in files_of(path) if one.exists()]
    assert 1 < len(files) <= FILES
    found = [name for one in files for name in requests_of(one)]
    assert sorted(found) == sorted(
        f"r{n}" for first in (0, 100, 200) for n in range(first, first + 60)
    )
    assert all("schema" in lines_of(one)[0] for one in files)
