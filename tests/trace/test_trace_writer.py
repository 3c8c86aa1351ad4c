"""The trace never blocks or stops the scheduler."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trace.records import HEADER, lines_of, record, requests_of
from tiered_kv.trace import trace_writer
from tiered_kv.trace.trace_header import SCHEMA
from tiered_kv.trace.trace_writer import TraceWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def locked(path: Path) -> Iterator[int]:
    """The lock of the trace file, held as if by another process, so that nothing can be written."""
    fd = os.open(path, os.O_CREAT | os.O_RDONLY, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield fd
    os.close(fd)


def test_every_record_is_a_line_in_the_order_of_writing(path: Path) -> None:
    writer = TraceWriter(path, HEADER)
    for n in range(500):
        writer.write(record(n, job="ünïcode\n\ud800"))
    assert writer.drain()
    assert requests_of(path) == [f"r{n}" for n in range(500)]
    writer.close()
    assert writer.dropped == 0


def test_close_writes_what_is_queued_and_joins_the_thread(path: Path) -> None:
    writer = TraceWriter(path, HEADER)
    for n in range(500):
        writer.write(record(n))

    writer.close()
    writer.close()

    assert len(requests_of(path)) == 500
    assert "tiered-kv-trace" not in {thread.name for thread in threading.enumerate()}


def test_only_its_owner_can_read_the_trace(path: Path) -> None:
    """Only the owner may read and write the trace file, even with a umask of 0, because job IDs may
    contain names of people and projects."""
    old = os.umask(0)
    try:
        TraceWriter(path, HEADER).close()
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_existing_trace_is_continued_after_a_new_header(path: Path) -> None:
    for n in range(2):
        writer = TraceWriter(path, HEADER)
        writer.write(record(n))
        writer.close()
    assert requests_of(path) == ["r0", "r1"]
    assert [line.get("schema") for line in lines_of(path)] == [SCHEMA, None, SCHEMA, None]


def test_a_file_that_cannot_be_opened_is_an_error_at_start(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(OSError, match="directory"):
        TraceWriter(tmp_path, HEADER)
    assert threading.active_count() == before


def test_records_are_dropped_and_counted_when_the_disk_does_not_keep_up(
    path: Path, locked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_writer, "MAX_QUEUED", 10)
    writer = TraceWriter(path, HEADER)
    for n in range(500):
        writer.write(record(n))

    # The thread takes a batch from the queue, and then waits for the file with that batch in
    # memory.
    assert writer.dropped >= 500 - 2 * trace_writer.AT_ONCE
    assert not writer.drain(timeout_s=0.0), "what is not in the file is not written"

    fcntl.flock(locked, fcntl.LOCK_UN)
    writer.close()
    written = requests_of(path)
    assert len(written) + writer.dropped == 500
    assert len(written) >= 10
    assert written[0] == "r0"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_counted_logged_once_and_survived(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_badly: list[object] = []
    monkeypatch.setattr(threading, "excepthook", ended_badly.append)
    writer = TraceWriter(Path("/dev/full"), HEADER)
    for n in range(3):
        writer.write(record(n))
        assert writer.drain()

    writer.close()

    assert writer.dropped == 3
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert not ended_badly, "the thread ended in an exception"
