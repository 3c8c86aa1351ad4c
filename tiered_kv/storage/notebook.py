"""A notebook: small facts by name that outlive the process, in a file of lines.

Each line is JSON and ends with a newline: ``{"name": …, "fact": …}`` notes a fact in place of the
one before, ``{"without": PREFIX}`` strikes out every name that begins so. A process that is killed
leaves at most its last line torn, and that is ignored. When most of the file was overtaken by later
lines, it is written anew under another name, which then takes its place.

Nothing is synced: what the process wrote outlives it, but perhaps not the machine.
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

from tiered_kv.storage.disk.files import open_plain
from tiered_kv.storage.store.locks import try_lock

logger = logging.getLogger(__name__)

MOST_FACTS = 1 << 17
"""Names that are remembered; of more, those noted longest ago are forgotten."""
MOST_BYTES = 128 << 20
"""A larger file is none of ours."""
SPARE_BYTES = 4 << 20
"""Overtaken lines that a file may have, if they are less than the rest."""
MOST_QUEUED = 10_000
MOST_BOOKS = 64
"""Engines of one replica number that share a folder."""

Fact = Mapping[str, object]


class NoNotebook:
    """A notebook that forgets everything at once."""

    def facts(self, prefix: str) -> dict[str, Fact]:
        """Return nothing."""
        return {}

    def note(self, name: str, fact: Fact) -> None:
        """Do nothing."""

    def strike(self, prefix: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Notebook(NoNotebook):
    """The notebook at ``path``, readable by its owner alone. Reads once, at the start; a thread
    writes.

    Args:
        keep: False if the file goes when the notebook is closed.

    Raises:
        BlockingIOError: another process has it.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, *, keep: bool) -> None:
        self.path = path
        self.lost = 0
        self._keep = keep
        self._lock = open_plain(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
        self._fd = -1
        try:
            if not try_lock(self._lock):
                raise BlockingIOError(f"another process has {path}")
            self._lines = _read(path)
            self._found = {name: json.loads(line)["fact"] for name, line in self._lines.items()}
            self._fd = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._written = self._rewrite()
        except BaseException:
            self._let_go()
            raise
        self._queue = queue.SimpleQueue[tuple[str, Fact | None] | threading.Event | None]()
        self._failing = self._closed = False
        self._thread = threading.Thread(target=self._run, name="tiered-kv-notes", daemon=True)
        self._thread.start()

    def facts(self, prefix: str) -> dict[str, Fact]:
        """Facts that were in the file, by names that begin so; those noted longest ago first.
        They were written by anybody."""
        return {name: fact for name, fact in self._found.items() if name.startswith(prefix)}

    def note(self, name: str, fact: Fact) -> None:
        """Queue a fact, which is JSON. Never blocks, never raises."""
        if self._queue.qsize() < MOST_QUEUED:
            self._queue.put((name, fact))
        else:
            self.lost += 1

    def strike(self, prefix: str) -> None:
        """Queue that all names that begin so are forgotten. Never blocks, never raises."""
        self._queue.put((prefix, None))

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything queued so far is in the file; False if that took longer."""
        written = threading.Event()
        self._queue.put(written)
        return written.wait(timeout_s)

    def close(self) -> None:
        """Write what is queued, and stop the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        if not self._keep:
            self.path.unlink(missing_ok=True)
        self._let_go()

    def _let_go(self) -> None:
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1

    def _run(self) -> None:
        going_on = True
        while going_on:
            lines, waiting = list[bytes](), list[threading.Event]()
            while not lines or not self._queue.empty():
                match self._queue.get():
                    case None:
                        going_on = False
                        break
                    case threading.Event() as written:
                        waiting.append(written)
                        break
                    case name, fact:
                        lines.append(self._take_in(name, fact))
            self._append(lines)
            for one in waiting:
                one.set()

    def _take_in(self, name: str, fact: Fact | None) -> bytes:
        """Change what is known, and return the line that says so."""
        if fact is None:
            for known in [known for known in self._lines if known.startswith(name)]:
                del self._lines[known]
            return _line({"without": name})
        line = _line({"name": name, "fact": fact})
        self._lines.pop(name, None)
        self._lines[name] = line
        if len(self._lines) > MOST_FACTS:
            del self._lines[next(iter(self._lines))]
        return line

    def _append(self, lines: list[bytes]) -> None:
        try:
            _write(self._fd, b"".join(lines))
            self._written += sum(map(len, lines))
            if self._written > SPARE_BYTES + 2 * sum(map(len, self._lines.values())):
                self._written = self._rewrite()
        except OSError as error:
            self.lost += len(lines)
            if not self._failing:
                self._failing = True
                logger.warning("%s cannot be written: %s", self.path, error)

    def _rewrite(self) -> int:
        """Write the file anew, with a line for each fact; returns its size."""
        beside = self.path.with_suffix(".new")
        beside.unlink(missing_ok=True)
        fd = open_plain(beside, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            data = b"".join(self._lines.values())
            _write(fd, data)
            beside.replace(self.path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        os.close(self._fd)
        self._fd = fd
        return len(data)


def open_notebook(folder: Path | None, replica: int, *, keep: bool) -> NoNotebook:
    """Open the first notebook of a replica in a folder that no other process has.

    Args:
        folder: made if it is missing; None keeps nothing.
        keep: as for :class:`Notebook`.
    """
    if folder is None:
        return NoNotebook()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        for number in range(MOST_BOOKS):
            with contextlib.suppress(BlockingIOError):
                return Notebook(folder / f"jobs-{replica}-{number}.jsonl", keep=keep)
    except OSError as error:
        logger.warning("jobs will not be known after a restart: %s", error)
    return NoNotebook()


def _read(path: Path) -> dict[str, bytes]:
    """The line of each fact in a file, those noted longest ago first."""
    try:
        if path.stat().st_size > MOST_BYTES:
            logger.warning("%s has more than %d bytes and is not used", path, MOST_BYTES)
            return {}
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    found = dict[str, bytes]()
    bad = 0
    for line in data.splitlines(keepends=True):
        try:
            said = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            said = None
        match said:
            case {"name": str(name), "fact": dict()}:
                found.pop(name, None)
                found[name] = line
            case {"without": str(prefix)}:
                found = {name: one for name, one in found.items() if not name.startswith(prefix)}
            case _:
                bad += 1
    if bad:
        logger.info("%s: %d lines are torn and not used", path, bad)
    return dict(list(found.items())[-MOST_FACTS:])


def _line(said: Mapping[str, object]) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
