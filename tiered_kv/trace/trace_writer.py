"""Writer of the trace: a thread that appends records to the newest file.

The scheduler must not wait for a disk, so ``write`` only queues records. If ``MAX_QUEUED`` records
are queued, or writing fails, records are dropped and counted, because serving takes precedence over
the trace.
"""

from __future__ import annotations

import logging
import queue
import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from .trace_file import TraceFile
from .trace_header import TraceHeader

logger = logging.getLogger(__name__)

MAX_QUEUED = 10_000
AT_ONCE = 256
"""Maximum number of records per write."""


class Line(Protocol):
    """A record of a turn or of a step."""

    def to_line(self) -> str:
        """Return the record as ASCII, without the line feed."""
        ...


class TraceWriter:
    """Appends records to the trace at ``path``. Only the owner can read the files.

    Attributes:
        dropped: number of records dropped so far.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self.path = path
        self.dropped = 0
        self._queue: queue.Queue[Line | threading.Event | None] = queue.Queue(MAX_QUEUED)
        self._file = TraceFile(path, header.to_line())
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="tiered-kv-trace", daemon=True)
        self._thread.start()

    def write(self, record: Line) -> None:
        """Queue a record, or drop and count it if the queue is full. Never blocks, never raises."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def drain(self, timeout_s: float = 5.0) -> bool:
        """Wait until every record queued so far has been written or dropped. Returns False on
        timeout. The wait takes at most twice ``timeout_s`` seconds.
        """
        written = threading.Event()
        try:
            self._queue.put(written, timeout=timeout_s)
        except queue.Full:
            return False
        return written.wait(timeout_s)

    def close(self) -> None:
        """Write the queued records and stop the thread. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        going_on = True
        while going_on:
            items = [self._queue.get()]
            with suppress(queue.Empty):
                while items[-1] is not None and len(items) < AT_ONCE:
                    items.append(self._queue.get_nowait())
            going_on = items[-1] is not None
            waiting = [item for item in items if isinstance(item, threading.Event)]
            queued = (item for item in items if not isinstance(item, threading.Event))
            self._append([record for record in queued if record is not None])
            for one in waiting:
                one.set()
        self._file.close()

    def _append(self, records: list[Line]) -> None:
        if not records:
            return
        try:
            self._file.append([record.to_line() for record in records])
        except Exception as error:
            self.dropped += len(records)
            if not self._failing:
                self._failing = True
                logger.warning(
                    "the trace %s cannot be written, so records are lost: %s", self.path, error
                )
