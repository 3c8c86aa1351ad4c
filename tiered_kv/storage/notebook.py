"""A notebook: small facts by name that outlive the process, in a file of lines.

Each line is an xxh3-64 digest of the rest, a space, and JSON. ``{"name": …, "fact": …}`` records a
fact in place of the name's previous fact, or deletes the previous fact if the fact is null.
``{"without": PREFIX}`` deletes every name with that prefix. A line with a wrong digest is ignored:
it was torn by a kill, or modified. When most of the file is superseded by later lines, the file is
rewritten under another name and then renamed.

Nothing is synced: notes survive the process, but may not survive a crash of the machine.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import xxhash

from tiered_kv.file_lock import try_lock
from tiered_kv.json_fields import read_json
from tiered_kv.plain_files import check_owner, open_own, read_own, replace_file, write_all

logger = logging.getLogger(__name__)

MOST_FACTS = 1 << 17
"""Maximum number of names. If there are more, the names noted longest ago are forgotten."""
MOST_BYTES = 128 << 20
"""Maximum size of a notebook, bytes. A larger file is not read as a notebook."""
SPARE_BYTES = 4 << 20
"""Bytes by which a file's superseded lines may exceed its live lines before it is rewritten."""
MOST_QUEUED = 10_000
"""Maximum number of lines queued for a slow disk. The same number of further lines is reserved for
deletions of facts, which are more important: a fact that is not noted is merely unknown."""
MOST_BOOKS = 64
"""Maximum number of engines with one replica number that share a folder."""

Fact = Mapping[str, object]
_Said = Mapping[str, Any]


class NoNotebook:
    """A notebook that stores nothing.

    Attributes:
        stores: True if facts are stored. If it is False, callers need not collect facts.
    """

    stores: ClassVar[bool] = False

    def facts(self, prefix: str) -> dict[str, Fact]:
        """Return nothing."""
        return {}

    def note(self, name: str, fact: Fact) -> None:
        """Do nothing."""

    def strike(self, name: str) -> None:
        """Do nothing."""

    def strike_all(self, prefix: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Notebook(NoNotebook):
    """The notebook at ``path``, readable only by its owner. The file is read once, on creation. A
    thread writes to it.

    Args:
        keep: False to delete the file when the notebook is closed.

    Raises:
        BlockingIOError: another process has the notebook open.
        PermissionError: the file belongs to another user.
        OSError: the file cannot be opened.
    """

    stores: ClassVar[bool] = True

    def __init__(self, path: Path, *, keep: bool) -> None:
        self.path = path
        self.lost = 0
        self._keep = keep
        self._lock = open_own(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
        self._fd = -1
        try:
            if not try_lock(self._lock):
                raise BlockingIOError(f"{path} is in use by another process")
            self._lines, self._found = _read(path)
            self._fd = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._written = self._rewrite()
        except BaseException:
            self._let_go()
            raise
        self._queue = queue.SimpleQueue[_Said | threading.Event | None]()
        self._failing = self._closed = False
        self._thread = threading.Thread(target=self._run, name="tiered-kv-notes", daemon=True)
        self._thread.start()

    def facts(self, prefix: str) -> dict[str, Fact]:
        """Return the facts that were in the file under names with this prefix, by name, oldest
        first. The facts were written by a process of this user, perhaps by another version."""
        return {name: fact for name, fact in self._found.items() if name.startswith(prefix)}

    def note(self, name: str, fact: Fact) -> None:
        """Queue a fact, which must be JSON. Never blocks or raises: if too many lines are queued,
        the fact is dropped and counted in ``lost``."""
        self._say({"name": name, "fact": fact}, MOST_QUEUED)

    def strike(self, name: str) -> None:
        """Queue the deletion of a fact. Never blocks or raises."""
        self._say({"name": name, "fact": None}, 2 * MOST_QUEUED)

    def strike_all(self, prefix: str) -> None:
        """Queue the deletion of all names with this prefix. Never blocks or raises."""
        self._say({"without": prefix}, 2 * MOST_QUEUED)

    def _say(self, said: _Said, most: int) -> None:
        if self._queue.qsize() < most:
            self._queue.put(said)
        else:
            self.lost += 1

    def drain(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds until all queued lines are in the file. Returns False on
        timeout."""
        written = threading.Event()
        self._queue.put(written)
        return written.wait(timeout_s)

    def close(self) -> None:
        """Write all queued lines, and stop the thread. Idempotent."""
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
            lines, waiting, strikes = list[bytes](), list[threading.Event](), False
            while not lines or not self._queue.empty():
                match self._queue.get():
                    case None:
                        going_on = False
                        break
                    case threading.Event() as written:
                        waiting.append(written)
                        break
                    case said:
                        lines.append(line := _line(said))
                        _take_in(self._lines, said, line)
                        strikes |= said.get("fact") is None
            self._append(lines, strikes=strikes)
            for one in waiting:
                one.set()

    def _append(self, lines: list[bytes], *, strikes: bool) -> None:
        try:
            self._add(b"".join(lines), strikes=strikes)
            if self._written > SPARE_BYTES + 2 * sum(map(len, self._lines.values())):
                self._written = self._rewrite()
        except OSError as error:
            self.lost += len(lines)
            if not self._failing:
                self._failing = True
                logger.warning(
                    "%s cannot be written, so a restarted server may not know the latest jobs and "
                    "forecasts: %s",
                    self.path,
                    error,
                )

    def _add(self, data: bytes, *, strikes: bool) -> None:
        """Append lines, or write nothing.

        If the disk is too full for a line that deletes facts, the file is rewritten in place. A
        kill during the rewrite only loses facts, whereas deleted facts must never be found.

        Args:
            strikes: True if a line deletes facts.
        """
        try:
            self._written += write_all(self._fd, [data])
        except OSError:
            os.ftruncate(self._fd, self._written)  # part of a line would corrupt the next one
            if not strikes:
                raise
            os.ftruncate(self._fd, 0)
            self._written = 0
            self._written = write_all(self._fd, self._lines.values())

    def _rewrite(self) -> int:
        """Rewrite the file with one line for each fact. Returns its size, bytes."""
        data = b"".join(self._lines.values())
        fd = replace_file(self.path, data, beside=self.path.with_suffix(".new"), durable=False)
        os.close(self._fd)
        self._fd = fd
        return len(data)


def folder_for_notes(folder: Path | None) -> Path | None:
    """Create the folder for notes if it is missing, and return it. Returns None if ``folder`` is
    None. Also returns None, with a warning, if another user created the folder, or if the folder is
    on hugetlbfs, whose files can be written only through mapped memory."""
    if folder is None:
        return None
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        check_owner(folder)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b" ")
    except OSError as error:
        if error.errno == errno.EINVAL:
            logger.warning(
                "%s is on hugetlbfs, which cannot hold jobs and learned forecasts: the next "
                "engine will find only the pages. Set TIERED_KV_SSD_PATH to save jobs and "
                "forecasts too",
                folder,
            )
            return None
        if error.errno == errno.EPERM:
            logger.warning(
                "jobs and learned forecasts cannot be saved in %s: %s", folder, error.strerror
            )
            return None
    return folder


def open_notebook(folder: Path | None, replica: int, *, keep: bool) -> NoNotebook:
    """Open the first of a replica's notebooks that no other process has open. Returns a notebook
    that stores nothing if ``folder`` is None, or if no notebook can be opened, which is logged:
    the folder cannot be used, or all ``MOST_BOOKS`` notebooks are in use.

    Args:
        folder: folder of the notebooks, which is created if missing; None for a notebook that
            stores nothing.
        keep: False to delete the file when the notebook is closed.
    """
    if folder is None:
        return NoNotebook()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        check_owner(folder)
        for number in range(MOST_BOOKS):
            with contextlib.suppress(BlockingIOError, PermissionError):
                return Notebook(folder / f"jobs-{replica}-{number}.jsonl", keep=keep)
        raise BlockingIOError(f"all {MOST_BOOKS} notebook files in {folder} are in use")
    except OSError as error:
        logger.warning(
            "cannot save jobs and learned forecasts, so they will be lost at a restart: %s", error
        )
    return NoNotebook()


def _read(path: Path) -> tuple[dict[str, bytes], dict[str, Fact]]:
    """Read a file. Returns the line of each fact, and the facts, both oldest first."""
    lines, facts, bad = dict[str, bytes](), dict[str, Fact](), 0
    try:
        data = read_own(path, MOST_BYTES)
    except FileNotFoundError:
        return lines, facts
    except ValueError as error:
        logger.warning("the jobs and learned forecasts in %s are ignored: %s", path, error)
        return lines, facts
    for line in data.splitlines(keepends=True):
        said = _parse(line)
        bad += said is None
        if said is not None:
            _take_in(lines, said, line)
            _take_in(facts, said, said.get("fact"))
    if bad:
        logger.info("number of damaged lines ignored in %s: %d", path, bad)
    return lines, facts


def _take_in(known: dict[str, Any], said: _Said, value: object) -> None:
    """Apply a line to the known facts."""
    if "without" in said:
        for name in [name for name in known if name.startswith(said["without"])]:
            del known[name]
        return
    known.pop(said["name"], None)
    if said["fact"] is not None:
        known[said["name"]] = value
    if len(known) > MOST_FACTS:
        del known[next(iter(known))]


def _line(said: _Said) -> bytes:
    body = json.dumps(said, separators=(",", ":")).encode()
    return xxhash.xxh3_64_hexdigest(body).encode() + b" " + body + b"\n"


def _parse(line: bytes) -> _Said | None:
    """Return the content of a line; None if the line is damaged or not a notebook line."""
    digest, _, body = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or xxhash.xxh3_64_hexdigest(body).encode() != digest:
        return None
    try:
        said = read_json(body, finite=False)
    except ValueError:
        return None
    match said:
        case {"name": str(), "fact": dict() | None} | {"without": str()}:
            return dict(said)
        case _:
            return None
