"""Trace: one JSON line per event, written by a separate thread.

The scheduler must not wait for a disk, so ``write`` only queues. When the writer is more than
``MAX_QUEUED`` lines behind, or the file fails, lines are dropped and counted. Serving has
precedence over the trace.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_QUEUED = 10_000


class TraceWriter:
    """Appends JSON lines to ``path``, readable by their owner alone.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        self._queue: queue.Queue[str | threading.Event | None] = queue.Queue(MAX_QUEUED)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, 0o600), "a", encoding="utf-8")
        self._thread = threading.Thread(target=self._run, name="tiered-kv-trace", daemon=True)
        self._thread.start()

    def write(self, event: Mapping[str, object]) -> None:
        """Queue one event. Never blocks, never raises."""
        try:
            self._queue.put_nowait(json.dumps(event, default=str))
        except (queue.Full, TypeError, ValueError):
            self.dropped += 1

    def drain(self, timeout_s: float = 5.0) -> bool:
        """Wait until every line queued so far is in the file. Returns False on timeout."""
        written = threading.Event()
        try:
            self._queue.put(written, timeout=timeout_s)
        except queue.Full:
            return False
        return written.wait(timeout_s)

    def close(self) -> None:
        """Write the queued lines and stop the thread. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        failing = False
        # Closing flushes once more, and fails once more if the disk is full.
        with contextlib.suppress(OSError), self._file as file:
            while True:
                item = self._queue.get()
                if item is None:
                    return
                if isinstance(item, threading.Event):
                    item.set()
                    continue
                try:
                    file.write(item + "\n")
                    if self._queue.empty() or not isinstance(self._queue.queue[0], str):
                        file.flush()
                except (OSError, ValueError) as error:
                    self.dropped += 1
                    if not failing:
                        failing = True
                        logger.warning("trace %s cannot be written: %s", self.path, error)
