"""The trace never makes the scheduler wait, and never ends it."""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiered_kv import trace
from tiered_kv.trace import TraceWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def stalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TraceWriter, int]]:
    """A writer on a pipe that nobody reads, and the pipe's other end."""
    monkeypatch.setattr(trace, "MAX_QUEUED", 10)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    writer = TraceWriter(tmp_path / "pipe")
    yield writer, reader
    read_all(reader, writer.close)
    os.close(reader)


def read_all(reader: int, meanwhile: Callable[[], None]) -> list[bytes]:
    """Lines of a pipe until its writer closes it, which ``meanwhile`` must bring about."""
    os.set_blocking(reader, True)
    lines: list[bytes] = []
    with os.fdopen(reader, "rb", closefd=False) as pipe:
        thread = threading.Thread(target=lambda: lines.extend(pipe))
        thread.start()
        meanwhile()
        thread.join()
    return lines


def read_events(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_event_is_a_line_in_the_order_of_writing(path: Path) -> None:
    writer = TraceWriter(path)
    events = [{"event": "turn", "n": n, "job": "ünïcode\n\ud800"} for n in range(500)]
    for event in events:
        writer.write(event)
    assert writer.drain()
    assert read_events(path) == events
    writer.close()
    assert writer.dropped == 0


def test_close_writes_what_is_queued_and_joins_the_thread(path: Path) -> None:
    writer = TraceWriter(path)
    for n in range(500):
        writer.write({"n": n})

    writer.close()
    writer.close()

    assert len(read_events(path)) == 500
    assert "tiered-kv-trace" not in {thread.name for thread in threading.enumerate()}


def test_only_its_owner_can_read_the_trace(path: Path) -> None:
    """Job ids may be names of people and of their work."""
    old = os.umask(0)
    try:
        TraceWriter(path).close()
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_trace_that_is_there_is_continued(path: Path) -> None:
    path.write_text('{"n": 0}\n')
    writer = TraceWriter(path)
    writer.write({"n": 1})
    writer.close()
    assert read_events(path) == [{"n": 0}, {"n": 1}]


def test_a_file_that_cannot_be_opened_is_an_error_at_start(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(OSError, match="directory"):
        TraceWriter(tmp_path)
    assert threading.active_count() == before


def test_values_that_json_does_not_know_are_written_as_text(path: Path) -> None:
    writer = TraceWriter(path)
    writer.write({"path": Path("a/b"), "key": b"k"})
    writer.close()
    assert read_events(path) == [{"path": "a/b", "key": "b'k'"}]


def test_an_event_that_is_no_json_is_counted_and_dropped(path: Path) -> None:
    circle: dict[str, object] = {}
    circle["self"] = circle
    writer = TraceWriter(path)

    writer.write(circle)
    writer.write({"fine": True})

    writer.close()
    assert writer.dropped == 1
    assert read_events(path) == [{"fine": True}]


def test_lines_are_dropped_and_counted_when_the_disk_does_not_keep_up(
    stalled: tuple[TraceWriter, int],
) -> None:
    writer, reader = stalled
    writer.write({"n": 0, "padding": "x" * (1 << 20)})  # more than a pipe holds
    select.select([reader], [], [])  # so it is being written
    for n in range(1, 50):
        writer.write({"n": n})

    assert writer.dropped == 39, "one line is being written, ten are queued"
    assert not writer.drain(timeout_s=0.0), "what is stuck in the pipe is not written"

    lines = read_all(reader, writer.close)
    assert len(lines) + writer.dropped == 50
    assert [json.loads(line)["n"] for line in lines] == list(range(len(lines)))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_counted_said_once_and_survived(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_badly: list[object] = []
    monkeypatch.setattr(threading, "excepthook", ended_badly.append)
    writer = TraceWriter(Path("/dev/full"))
    for n in range(3):
        writer.write({"n": n})
        assert writer.drain()

    writer.close()

    assert writer.dropped >= 3
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert not ended_badly, "the thread ended in an exception"
